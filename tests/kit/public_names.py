"""Public names of a package, read from its source, and what our guides say about each.

`python -m tests.kit.public_names CHECKOUT/PACKAGE` prints the names as YAML; the files in
`tests/public_names/` are made this way.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.kit.documents import prose

HEADING = "## Every public name"
"""Heading of the table of names in a guide."""
STATUSES = ("works", "differs: ", "not here: ")
"""Beginnings of what a guide says about a name."""


class Statement(NamedTuple):
    """A row of a guide's table: the paths that it is about, without their root, and the status."""

    paths: list[str]
    status: str


# ---- reading the names of a package


def public_names(package: Path, without: frozenset[str] = frozenset()) -> dict[str, list[str]]:
    """Return the public names that each module of a package defines, by the module's path.

    Names are those of functions, classes, their methods, properties and fields, and of variables.
    A package's `__init__` also has the names that it imports from its own modules.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(package.rglob("*.py")):
        parts = [package.name, *file.relative_to(package).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        if is_package:
            parts.pop()
        if without.intersection(parts) or not all(map(is_public, parts)):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = list(names_defined(tree.body))
        if is_package:
            names += imported_from_package(tree, package.name)
        if names:
            found[".".join(parts)] = sorted(set(names))
    return found


def is_public(name: str) -> bool:
    return not name.startswith("_")


def names_defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Yield the public names that statements define, with those of classes below them."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.ClassDef):
            names = [node.name]
            if is_public(node.name):
                yield from names_defined(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from (prefix + name for name in names if is_public(name) and name != "logger")


def imported_from_package(tree: ast.Module, root: str) -> list[str]:
    """Return the names that an `__init__` exports from modules of its own package."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            is_own = node.level > 0 or (node.module or "").partition(".")[0] == root
            names += [alias.asname or alias.name for alias in node.names if is_own]
    return [name for name in names if is_public(name) and name != "*"]


# ---- reading a guide


def statements_of(guide: Path) -> list[Statement]:
    """Return the rows of a guide's table of names."""
    section = f"\n{prose(guide)}".partition(f"\n{HEADING}\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    statements = []
    for row in rows[2:]:
        names, status = re.split(r"(?<!\\)\|", row)[1:-1]
        statements.append(Statement(re.findall(r"`([^`]+)`", names), status.strip()))
    return statements


def deciding_path(name: str, statuses: Mapping[str, str]) -> str | None:
    """Return the longest path that is a name or contains it; None without one."""
    parts = name.split(".")
    paths = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((path for path in paths if path in statuses), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--without", action="append", default=[], help="Folder to leave out")
    options = parser.parse_args()
    names = public_names(options.package, frozenset(options.without))
    print(yaml.safe_dump(names, width=100, default_flow_style=None), end="")


if __name__ == "__main__":
    main()
