"""The public names of the originals: each has a row in its guide, which tells the truth."""

from __future__ import annotations

from pathlib import Path

from tests.kit.public_names import deciding_path, public_names, statements_of


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
