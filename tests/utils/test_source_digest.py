"""A digest of code changes with what is computed, not with where the code lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.utils import tensor_cache
from nip_astra.utils.tensor_cache import digest_of_code


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tensor_cache._digest_of.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "a_package_for_a_digest"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "fast.c").write_text("int x;")
    (folder / "notes.txt").write_text("old")
    return folder


def digest(package: Path) -> str:
    tensor_cache._digest_of.cache_clear()
    return digest_of_code([package.name])


def test_a_line_of_c_below_a_package_counts_and_a_note_does_not(package: Path) -> None:
    before = digest(package)
    (package / "notes.txt").write_text("new")
    assert digest(package) == before
    (package / "inner" / "fast.c").write_text("int y;")
    assert digest(package) != before


def test_a_module_counts_by_its_own_file(package: Path) -> None:
    (package / "one.py").write_text("x = 1\n")
    before = digest_of_code([f"{package.name}.one"])
    (package / "two.py").write_text("x = 2\n")
    tensor_cache._digest_of.cache_clear()
    assert digest_of_code([f"{package.name}.one"]) == before
    assert digest_of_code([f"{package.name}.two"]) != before


def test_the_order_of_modules_does_not_count() -> None:
    names = ["nip_astra.errors", "nip_astra.registry"]
    assert digest_of_code(names) == digest_of_code(reversed(names))
    assert digest_of_code(names) != digest_of_code(names[:1])


def test_a_module_without_a_file_counts_by_its_name() -> None:
    assert digest_of_code(["no_such_module"]) != digest_of_code(["another_such_module"])
