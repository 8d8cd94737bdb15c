"""Cached tensors are read back to the bit, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nip_astra.utils import tensor_cache
from nip_astra.utils.tensor_cache import (
    digest_of_code,
    digest_of_tensors,
    keep_tensors,
    take_tensors,
)


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    shared, path = torch.arange(6.0).view(2, 3), tmp_path / "new" / "kept.safetensors"
    tensors = {"a": shared, "b": shared.t(), "c": torch.tensor(True), "d": torch.zeros(0)}
    keep_tensors(path, tensors)
    torch.testing.assert_close(take_tensors(path), tensors, rtol=0, atol=0)
    assert list(path.parent.iterdir()) == [path]


def test_every_changed_byte_is_detected(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kept.safetensors"
    keep_tensors(path, {"a": torch.arange(3.0)})
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        result = take_tensors(path)
        # Of the header, only changes that keep names, types, shapes, values and digest.
        assert result is None or torch.equal(result["a"], torch.arange(3.0)), place
    path.write_bytes(whole[:-1])
    caplog.clear()
    assert take_tensors(tmp_path / "none.safetensors") is None
    assert caplog.messages == []
    assert take_tensors(path) is None
    assert "computed again" in caplog.text


def test_a_file_of_another_writer_has_no_digest(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert take_tensors(tmp_path / "other.safetensors") is None


def test_names_types_and_shapes_count_as_values_do() -> None:
    x = torch.zeros(4)
    others = ({"a": x}, {"b": x}, {"a": x.view(2, 2)}, {"a": x.int()}, {"a": x + 1})
    assert len({digest_of_tensors(tensors) for tensors in others}) == 5


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
    # The order does not count; a module without a file counts by its name.
    names = ["nip_astra.errors", "nip_astra.registry"]
    assert digest_of_code(names) == digest_of_code(reversed(names))
    assert digest_of_code(names) != digest_of_code(names[:1])
    assert digest_of_code(["no_such_module"]) != digest_of_code(["another_such_module"])
