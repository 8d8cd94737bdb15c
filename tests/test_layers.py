"""Imports go down the layers, or stay within a layer without cycles, also within functions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest

from tests.kit.documents import ROOT

PACKAGE = "nip_astra"
PACKAGE_DIR = ROOT / PACKAGE
FLOORS = [
    names.split()
    for names in (
        "errors version lazy built_ins registry plugins progress deadlines call_outcomes tracking "
        "safe_text trust",
        "parameters experiment_settings",
        "rollouts rl_objectives checkpoints distributed utils",
        "language_models scorers reward_terms message_regressors",
        "protocols scenario_base samplers",
        "factory scenario_instance scenarios",
        "trainers evaluation report",
        # The last two resolve and build the experiments of runs; measuring code of trainers is
        # below.
        "run resume_check recipes trl_options hub overview installation resolving sweep cli serve "
        "astra nip nexrl __main__ evaluation.api evaluation.families",
    )
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
# The package itself exports names of every layer, so only the top may import from it.
TOP = len(FLOORS) - 1
FRAGMENT = 60
"""Lines below which a module with one importer belongs into that one."""
SHORT_MODULES = {
    "nip_astra.astra.utils.logging": "a path that users of ASTRA-RL import",
    "nip_astra.trainers.vanilla_ppo": "a path that users of nip import",
}
HEAVY = {"torch", "transformers", "tensordict", "wandb", "peft", "datasets"}


@dataclass(frozen=True)
class Import:
    """An import: importer, imported module, line, and whether it runs at module load."""

    importer: str
    imported: str
    line: int
    is_at_top: bool
    is_for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def floor_of(module: str) -> int:
    parts = module.split(".")
    named = ".".join(parts[1:3])
    return TOP if len(parts) == 1 else FLOOR_OF[named if named in FLOOR_OF else parts[1]]


def is_package(module: str, known: Iterable[str]) -> bool:
    return any(name.startswith(f"{module}.") for name in known)


def imports_of(module: str, tree: ast.Module, known: Iterable[str]) -> list[Import]:
    """Every import of a module, also those inside functions and for type checkers."""
    known = set(known)
    package = module if is_package(module, known) else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, at_top: bool, for_types: bool) -> None:
        for name in names_imported(node, package, known):
            found.append(Import(module, name, getattr(node, "lineno", 0), at_top, for_types))
        guarded = node.body if isinstance(node, ast.If) and is_for_types(node.test) else []
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_top and not is_function, for_types or child in guarded)

    visit(tree, True, False)
    return found


def last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_for_types(test: ast.expr) -> bool:
    return any(last_name(part) == "TYPE_CHECKING" for part in ast.walk(test))


def names_imported(node: ast.AST, package: str, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parts, *([base] if base else [])])
        inner = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in inner]
    if isinstance(node, ast.Call) and last_name(node.func) == "import_module":
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def upward_edges(imports: Iterable[Import]) -> list[str]:
    return [
        str(one)
        for one in imports
        if one.imported.partition(".")[0] == PACKAGE
        and floor_of(one.imported) > floor_of(one.importer)
    ]


def find_cycle(imports: Iterable[Import]) -> list[str]:
    """The modules of an import cycle, or nothing; imports for type checkers do not count."""
    graph: dict[str, set[str]] = {}
    for one in imports:
        if one.imported.partition(".")[0] == PACKAGE and not one.is_for_types:
            graph.setdefault(one.importer, set()).add(one.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


class Module(NamedTuple):
    """A module without its syntax tree, which takes much memory."""

    imports: list[Import]
    docstring: str | None
    statements: set[type[ast.stmt]]
    num_lines: int


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    """Every module, by its dotted name."""
    paths = {}
    for path in sorted(PACKAGE_DIR.rglob("*.py")):
        parts = [PACKAGE, *path.relative_to(PACKAGE_DIR).with_suffix("").parts]
        if "_content" not in parts:
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        statements = {type(node) for node in tree.body}
        imports = imports_of(name, tree, paths)
        found[name] = Module(imports, ast.get_docstring(tree), statements, text.count("\n"))
    return found


@pytest.fixture(scope="module")
def imports(modules: dict[str, Module]) -> list[Import]:
    return [one for module in modules.values() for one in module.imports]


def test_every_module_has_a_floor(modules: dict[str, Module]) -> None:
    tops = {name.split(".")[1] for name in modules if "." in name}
    assert tops - FLOOR_OF.keys() == set(), "give these a floor in FLOORS"


def test_no_module_imports_from_a_floor_above_it(imports: list[Import]) -> None:
    assert len(imports) > 100
    assert upward_edges(imports) == []


def test_no_modules_import_each_other_in_a_circle(imports: list[Import]) -> None:
    assert find_cycle(imports) == []


def fragments(imports: Iterable[Import], lengths: Mapping[str, int]) -> list[str]:
    """Short modules with a single importer; the facade does not count."""
    importers: dict[str, set[str]] = {}
    for one in imports:
        if one.importer not in (PACKAGE, one.imported):
            importers.setdefault(one.imported, set()).add(one.importer)
    return [
        name
        for name, length in lengths.items()
        if length < FRAGMENT and len(importers.get(name, ())) == 1
    ]


def test_no_short_module_has_a_single_importer(
    imports: list[Import], modules: dict[str, Module]
) -> None:
    lengths = {
        name: module.num_lines for name, module in modules.items() if not is_package(name, modules)
    }
    assert set(fragments(imports, lengths)) == set(SHORT_MODULES), "merge it into its importer"


def test_the_lower_floors_import_nothing_heavy_at_module_top(imports: list[Import]) -> None:
    heavy = [
        str(one)
        for one in imports
        if one.imported.partition(".")[0] in HEAVY
        and floor_of(one.importer) <= 1
        and one.is_at_top
        and not one.is_for_types
    ]
    assert heavy == []


def test_packages_hold_a_docstring_and_lazy_exports_only(modules: dict[str, Module]) -> None:
    allowed = {ast.Expr, ast.Import, ast.ImportFrom, ast.If, ast.Assign, ast.FunctionDef}
    for name, module in modules.items():
        if not is_package(name, modules):
            continue
        assert module.docstring, f"{name} needs a docstring"
        eager = [
            str(one)
            for one in module.imports
            if one.imported.partition(".")[0] == PACKAGE
            and not one.is_for_types
            and one.imported not in (f"{PACKAGE}.version", f"{PACKAGE}.lazy")
        ]
        assert eager == [], f"{name} imports its modules at once"
        assert module.statements <= allowed, name


def test_nothing_imports_the_content_folders(imports: list[Import]) -> None:
    content = {"parameters", "scenarios", "benchmarks", "tests"}
    assert [str(one) for one in imports if one.imported.partition(".")[0] in content] == []


def found_in(**modules: str) -> list[Import]:
    """The imports of modules of the package, given by name with `__` for a dot."""
    trees = {f"{PACKAGE}.{name.replace('__', '.')}": ast.parse(t) for name, t in modules.items()}
    return [one for name, tree in trees.items() for one in imports_of(name, tree, trees)]


@pytest.mark.parametrize(
    "text",
    [
        "import nip_astra.trainers.ast.dpo",
        "def f():\n    from nip_astra.trainers import ast_dpo",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nip_astra.run import x",
        "from .. import run",
        "from ..trainers import registry",
        "import importlib\nimportlib.import_module('nip_astra.run')",
        "from nip_astra import run_experiment",
    ],
)
def test_the_check_sees_every_form_of_an_upward_import(text: str) -> None:
    found = found_in(utils__seeding=text, run="from nip_astra.errors import X", errors="import re")
    assert [one.partition(":")[0] for one in upward_edges(found)] == ["nip_astra.utils.seeding"]


def test_the_check_sees_a_cycle_through_a_function_and_a_fragment() -> None:
    in_function = "def f():\n    from nip_astra.utils.a import x"
    found = found_in(utils__a="from nip_astra.utils import b", utils__b=in_function)
    assert upward_edges(found) == []
    assert set(find_cycle(found)) == {"nip_astra.utils.a", "nip_astra.utils.b"}
    both = "from nip_astra import once, twice"
    found = found_in(once="", twice="", a=both, b="from nip_astra import twice")
    assert find_cycle(found) == []
    names = ("nip_astra.once", "nip_astra.twice")
    assert fragments(found, dict.fromkeys(names, 10)) == ["nip_astra.once"]
    assert fragments(found, dict.fromkeys(names, FRAGMENT)) == []
