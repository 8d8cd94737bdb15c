"""Right programs made wrong in one place: mutations of the syntax tree, one each."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_TWINS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "lower": "upper",
    "upper": "lower",
}


@dataclass(frozen=True)
class Mutation:
    """A program that differs from its original in one place.

    Attributes
    ----------
    code : str
        The whole program.
    kind : str
        What was changed: comparison, arithmetic, number, logic, twin, statement, slice, branch,
        range (one turn less of a loop) or case (arguments beyond a size are changed).
    line : int
        Line of the original, from 1, in the normal form that `ast.unparse` gives it.
    """

    code: str
    kind: str
    line: int


def normal_form(code: str) -> str:
    """A program as `ast.unparse` writes it, so that no formatting tells what was changed."""
    return ast.unparse(ast.parse(code)) + "\n"


def mutations(code: str) -> list[Mutation]:
    """All programs that one mutation makes of another; some may still be right.

    Raises
    ------
    SyntaxError
        When the program cannot be parsed.
    """
    original = normal_form(code)
    tree = ast.parse(original)
    found, seen = [], {original}
    for index, node in enumerate(ast.walk(tree)):
        for number, (kind, _) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = _nth(changed, index)
            list(_changes(target))[number][1](target)
            text = ast.unparse(ast.fix_missing_locations(changed)) + "\n"
            if text not in seen:
                seen.add(text)
                found.append(Mutation(text, kind, _line_of_change(original, text)))
    return found


def special_cases(code: str, sizes: Mapping[str, tuple[str, int]]) -> list[Mutation]:
    """Programs that treat arguments beyond a size as if they were others.

    Parameters
    ----------
    code : str
        A program whose first statement is the function.
    sizes : Mapping
        By parameter, its kind (`number` or `sequence`) and the size beyond which it is changed.
    """
    found = []
    for name, (kind, size) in sizes.items():
        measure = name if kind == "number" else f"len({name})"
        for change in ("{} - 1", "{} + 1") if kind == "number" else ("{}[:-1]", "{}[1:]"):
            tree = ast.parse(normal_form(code))
            function = tree.body[0]
            assert isinstance(function, ast.FunctionDef)
            lines = f"if {measure} > {size}:\n    {name} = {change.format(name)}"
            function.body[:0] = ast.parse(lines).body
            found.append(Mutation(ast.unparse(tree) + "\n", "case", 2))
    return found


def _nth(tree: ast.AST, index: int) -> ast.AST:
    return next(node for place, node in enumerate(ast.walk(tree)) if place == index)


def _line_of_change(original: str, changed: str) -> int:
    lines, others = original.splitlines(), changed.splitlines()
    return next(
        (at for at, (a, b) in enumerate(zip(lines, others, strict=False), 1) if a != b),
        min(len(lines), len(others)),
    )


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Every change of one node: its kind, and what makes it."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            for other in _COMPARISONS.get(type(op), ()):
                yield "comparison", _set_comparison(place, other)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _ARITHMETIC:
        yield "arithmetic", _set("op", _ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value + 1, node.value - 1):
            yield "number", _set("value", value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "logic", _set("value", not node.value)
    elif isinstance(node, ast.BoolOp):
        yield "logic", _set("op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.Name) and node.id in _TWINS:
        yield "twin", _set("id", _TWINS[node.id])
    elif isinstance(node, ast.Attribute) and node.attr in _TWINS:
        yield "twin", _set("attr", _TWINS[node.attr])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        yield "range", _shorten
    elif isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                yield "slice", _shift(bound)
    yield from _changes_of_blocks(node)


def _changes_of_blocks(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    if isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
        yield "branch", _drop_else
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            for place, statement in enumerate(block):
                if isinstance(statement, ast.AugAssign | ast.Expr | ast.Break | ast.Continue):
                    yield "statement", _drop(name, place)


def _set(name: str, value: object) -> Callable[[ast.AST], None]:
    return lambda node: setattr(node, name, value)


def _set_comparison(place: int, op: type[ast.cmpop]) -> Callable[[ast.AST], None]:
    def change(node: ast.AST) -> None:
        assert isinstance(node, ast.Compare)
        node.ops[place] = op()

    return change


def _shift(bound: str) -> Callable[[ast.AST], None]:
    def change(node: ast.AST) -> None:
        setattr(node, bound, ast.BinOp(getattr(node, bound), ast.Add(), ast.Constant(1)))

    return change


def _shorten(node: ast.AST) -> None:
    assert isinstance(node, ast.Call)
    place = min(1, len(node.args) - 1)
    node.args[place] = ast.BinOp(node.args[place], ast.Sub(), ast.Constant(1))


def _drop(name: str, place: int) -> Callable[[ast.AST], None]:
    def change(node: ast.AST) -> None:
        getattr(node, name)[place] = ast.Pass()

    return change


def _drop_else(node: ast.AST) -> None:
    assert isinstance(node, ast.If)
    node.orelse = []
