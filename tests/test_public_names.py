"""The public names of the originals: each has a row in its guide, which tells the truth."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from nip_astra.errors import DataError
from tests.kit.documents import ROOT, find
from tests.kit.public_names import STATUSES, deciding_path, public_names, statements_of


class Original(NamedTuple):
    """An original: its list of names, our guide about it, and the roots of imports."""

    data: str
    guide: str
    their_root: str
    our_root: str


ORIGINALS = (
    Original("astra_rl.yaml", "coming-from-astra-rl.md", "astra_rl", "nip_astra.astra"),
    Original("nexrl.yaml", "coming-from-nexrl.md", "nexrl", "nip_astra.nexrl"),
    Original("nip.yaml", "coming-from-nip.md", "nip", "nip_astra.nip"),
)
each_original = pytest.mark.parametrize("original", ORIGINALS, ids=lambda one: one.their_root)


@cache
def names_of(original: Original) -> tuple[str, ...]:
    """Every public name with its module, without the root."""
    text = (ROOT / "tests" / "public_names" / original.data).read_text(encoding="utf-8")
    modules: dict[str, list[str]] = yaml.safe_load(text)
    paths = (f"{module}.{name}" for module, names in modules.items() for name in names)
    return tuple(path.removeprefix(f"{original.their_root}.") for path in paths)


@cache
def statuses_of(original: Original) -> dict[str, str]:
    rows = statements_of(ROOT / "doc" / "guides" / original.guide)
    return {path: row.status for row in rows for path in row.paths}


def is_there(path: str) -> bool:
    """Return whether a dotted path can be imported, or is a field of a class that can."""
    try:
        find(path)
    except DataError:
        # The name of a list that a user provides.
        return True
    except (ImportError, AttributeError):
        owner, _, name = path.rpartition(".")
        return owner.count(".") > 1 and is_there(owner) and is_field(find(owner), name)
    return True


def is_field(owner: Any, name: str) -> bool:
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return any(name in getattr(base, "__annotations__", {}) for base in bases)


@each_original
def test_every_public_name_has_a_row_and_every_row_a_name(original: Original) -> None:
    statuses, names = statuses_of(original), names_of(original)
    deciding = {name: deciding_path(name, statuses) for name in names}
    assert len(names) > 100
    assert [name for name, path in deciding.items() if path is None] == []
    assert sorted(set(statuses) - {path for path in deciding.values() if path}) == []


@each_original
def test_every_row_says_that_a_name_works_differs_or_is_not_here(original: Original) -> None:
    statuses = statuses_of(original)
    assert [path for path, status in statuses.items() if not status.startswith(STATUSES)] == []
    assert [path for path, status in statuses.items() if status in STATUSES[1:]] == []


@each_original
def test_names_can_be_imported_as_their_rows_say(original: Original) -> None:
    statuses = statuses_of(original)
    wrong = []
    for name in names_of(original):
        path = deciding_path(name, statuses)
        assert path is not None
        is_here = not statuses[path].startswith("not here")
        if is_there(f"{original.our_root}.{name}") != is_here:
            wrong.append(f"{name}: {statuses[path]}")
    assert wrong == []


def test_names_are_read_from_source_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "tool"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("from .inner.maths import add as plus\nimport torch\n")
    (package / "inner" / "maths.py").write_text(
        "raise ImportError\n"
        "LIMIT = 3\n_hidden = 4\nlogger = 5\n"
        "def add(a, b): ...\n"
        "class Box:\n    size: int\n    def open(self): ...\n    def _peek(self): ...\n"
    )
    (package / "tests").mkdir()
    (package / "tests" / "case.py").write_text("def check(): ...\n")
    assert public_names(package, frozenset({"tests"})) == {
        "tool": ["plus"],
        "tool.inner.maths": ["Box", "Box.open", "Box.size", "LIMIT", "add"],
    }


def test_the_longest_path_decides_for_a_name(tmp_path: Path) -> None:
    guide = tmp_path / "guide.md"
    guide.write_text(
        "## Every public name\n\n| theirs | here |\n|---|---|\n| `a`, `b.C` | works |\n"
        "| `a.f` | not here: no use |\n\n## Other\n\n| `c` | works |\n"
    )
    statuses = {path: row.status for row in statements_of(guide) for path in row.paths}
    assert statuses == {"a": "works", "b.C": "works", "a.f": "not here: no use"}
    assert deciding_path("a.f", statuses) == "a.f"
    assert deciding_path("a.g.h", statuses) == "a"
    assert deciding_path("b.D", statuses) is None
