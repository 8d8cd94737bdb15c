"""Correct and subtly wrong programs: mutations of the syntax tree, and tests run in the sandbox."""

from __future__ import annotations

import ast
import copy
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from nip_astra.errors import DataError
from nip_astra.utils.sandbox import (
    CallResult,
    SandboxLimits,
    call_in_sandbox,
    run_beside_in_sandbox,
    run_in_sandbox,
)

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
    """A program that differs from its original in one place."""

    code: str
    """The whole program."""
    kind: str
    """Type of change: comparison, arithmetic, number, logic, twin, statement, slice, branch, range
    (one iteration fewer) or case (arguments beyond a size are changed)."""
    line: int
    """Line of the original, from 1, in the normal form of `ast.unparse`."""


def normal_form(code: str) -> str:
    """Return a program in the format of `ast.unparse`, so that it does not reveal the change."""
    return ast.unparse(ast.parse(code)) + "\n"


def mutations(code: str) -> list[Mutation]:
    """Return all programs that differ by one mutation; some may still be correct."""
    original = normal_form(code)
    tree = ast.parse(original)
    found, seen = [], {original}
    for index, node in enumerate(ast.walk(tree)):
        for number, (kind, _) in enumerate(_changes(node)):
            changed = copy.deepcopy(tree)
            target = next(islice(ast.walk(changed), index, None))
            list(_changes(target))[number][1](target)
            text = ast.unparse(ast.fix_missing_locations(changed)) + "\n"
            if text not in seen:
                seen.add(text)
                found.append(Mutation(text, kind, _line_of_change(original, text)))
    return found


def special_cases(code: str, sizes: Mapping[str, tuple[str, int]]) -> list[Mutation]:
    """Return programs that change arguments beyond a size.

    Parameters
    ----------
    code : str
        A program whose first statement is the function.
    sizes : Mapping
        Kind (`number` or `sequence`) and largest unchanged size, by parameter.
    """
    cases = []
    for name, (kind, size) in sizes.items():
        measure = name if kind == "number" else f"len({name})"
        for change in ("{} - 1", "{} + 1") if kind == "number" else ("{}[:-1]", "{}[1:]"):
            tree = ast.parse(normal_form(code))
            function = tree.body[0]
            assert isinstance(function, ast.FunctionDef)
            lines = f"if {measure} > {size}:\n    {name} = {change.format(name)}"
            function.body[:0] = ast.parse(lines).body
            cases.append(Mutation(ast.unparse(tree) + "\n", "case", 2))
    return cases


def _line_of_change(original: str, changed: str) -> int:
    lines, others = original.splitlines(), changed.splitlines()
    return next(
        (at for at, (a, b) in enumerate(zip(lines, others, strict=False), 1) if a != b),
        min(len(lines), len(others)),
    )


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """Yield every change of one node: its kind, and a function that applies it."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            for other in _COMPARISONS.get(type(op), ()):
                yield "comparison", _set_item("ops", place, other)
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
    if isinstance(node, ast.If) and node.orelse and not isinstance(node.orelse[0], ast.If):
        yield "branch", _set("orelse", [])
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            for place, statement in enumerate(block):
                if isinstance(statement, ast.AugAssign | ast.Expr | ast.Break | ast.Continue):
                    yield "statement", _set_item(name, place, ast.Pass)


def _set(name: str, value: object) -> Callable[[ast.AST], None]:
    return lambda node: setattr(node, name, value)


def _set_item(name: str, place: int, item: type[ast.AST]) -> Callable[[ast.AST], None]:
    return lambda node: getattr(node, name).__setitem__(place, item())


def _shift(bound: str) -> Callable[[ast.AST], None]:
    return lambda node: setattr(
        node, bound, ast.BinOp(getattr(node, bound), ast.Add(), ast.Constant(1))
    )


def _shorten(node: ast.AST) -> None:
    assert isinstance(node, ast.Call)
    place = min(1, len(node.args) - 1)
    node.args[place] = ast.BinOp(node.args[place], ast.Sub(), ast.Constant(1))


Item = TypeVar("Item")

NUM_SANDBOXES = 2
"""Number of concurrent sandboxes."""
LIMITS = SandboxLimits(seconds=10, cpu_seconds=1, memory_mib=256)
"""Limits of a solution over all of its tests."""


@dataclass(frozen=True)
class Case:
    """A test: arguments of a function, and the correct value."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class Solution:
    """A program of known correctness."""

    code: str
    """The program in its normal form."""
    is_correct: bool
    """Whether it passes every test."""
    share_passed: float
    """Fraction of passed tests."""
    mutation: str = ""
    """The change; empty for the correct program."""
    line: int = 0
    """Changed line; 0 for the correct program."""


def expected_values(code: str, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Case]:
    """Return tests with the values of a correct solution."""
    results = call_in_sandbox(code, function, arguments, LIMITS)
    cases = []
    for given, result in zip(arguments, results, strict=True):
        if result.error:
            raise DataError(
                f"the correct solution {function!r} fails on {given!r}: {result.error}. Fix it, or "
                "omit this input."
            )
        cases.append(Case(given, result.value))
    return cases


def varied(cases: Iterable[Case], count: int) -> list[Case]:
    """Return at most `count` different tests, with as many different values as possible."""
    by_value: dict[str, list[Case]] = defaultdict(list)
    seen = set()
    for case in cases:
        if (key := repr(case.arguments)) not in seen:
            seen.add(key)
            by_value[repr(case.expected)].append(case)
    return _in_turns(by_value.values())[:count]


def share_passed(code: str, function: str, cases: Sequence[Case]) -> float:
    """Return the fraction of tests that a program passes in the sandbox."""
    results = call_in_sandbox(code, function, [case.arguments for case in cases], LIMITS)
    passed = passed_of(results, cases)
    return sum(passed) / len(passed)


def passed_of(results: Sequence[CallResult], cases: Sequence[Case]) -> list[bool]:
    """Return whether each call returned the expected value, with its type."""
    return [
        not result.error and _is_same(result.value, case.expected)
        for result, case in zip(results, cases, strict=True)
    ]


def solutions(
    code: str,
    function: str,
    cases: Sequence[Case],
    num_wrong: int,
    rng: random.Random,
) -> list[Solution]:
    """Return a correct solution and at most `num_wrong` that fail some tests, at most half of them.

    Wrong solutions have as many kinds of mutation as possible.
    """
    candidates = [*mutations(code), *special_cases(code, _large_sizes(code, cases))]
    return verified_solutions(
        normal_form(code),
        lambda one: share_passed(one, function, cases),
        candidates,
        num_wrong,
        rng,
        name=function,
    )


def verified_solutions(
    right: str,
    share_of: Callable[[str], float],
    candidates: Sequence[Mutation],
    num_wrong: int,
    rng: random.Random,
    *,
    name: str,
) -> list[Solution]:
    """Do the same for any tests: `share_of` gives the fraction that a program passes."""
    if share_of(right) != 1:
        raise DataError(
            f"the correct solution of {name!r} fails a test. Fix it, or leave the problem out."
        )
    with ThreadPoolExecutor(NUM_SANDBOXES) as pool:
        shares = pool.map(lambda one: share_of(one.code), candidates)
        subtle = [
            (mutation, share)
            for mutation, share in zip(candidates, shares, strict=True)
            if 0.5 <= share < 1
        ]
    chosen = _of_many_kinds(subtle, num_wrong, rng)
    wrong = [Solution(one.code, False, share, one.kind, one.line) for one, share in chosen]
    return [Solution(right, True, 1.0), *wrong]


def _of_many_kinds(
    subtle: list[tuple[Mutation, float]], count: int, rng: random.Random
) -> list[tuple[Mutation, float]]:
    """Select as many kinds as possible; special cases, which look artificial, come last."""
    by_kind: dict[str, list[tuple[Mutation, float]]] = defaultdict(list)
    for one in rng.sample(subtle, len(subtle)):
        by_kind[one[0].kind].append(one)
    made = by_kind.pop("case", [])
    return [*_in_turns(by_kind.values()), *made][:count]


def _in_turns(groups: Collection[list[Item]]) -> list[Item]:
    """Interleave the groups: the first item of each, then the second of each, and so on."""
    rounds = max(map(len, groups), default=0)
    return [group[at] for at in range(rounds) for group in groups if at < len(group)]


def _large_sizes(code: str, cases: Sequence[Case]) -> dict[str, tuple[str, int]]:
    """Return each parameter's kind, and a size that at most a third of the tests exceed."""
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    sizes = {}
    for place, parameter in enumerate(function.args.args):
        values = [case.arguments[place] for case in cases]
        is_number = all(type(value) is int for value in values)
        if is_number or all(isinstance(value, str | list) for value in values):
            ordered = sorted(values if is_number else map(len, values))
            kind = "number" if is_number else "sequence"
            sizes[parameter.arg] = (kind, ordered[len(ordered) * 2 // 3])
    return sizes


def _is_same(value: Any, expected: Any) -> bool:
    """Return whether a value equals the expected one in type too: 1 is not True."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_is_same, value, expected))
        )
    return type(value) is type(expected) and bool(value == expected)


_NOTING = """
_noted = []
def _note(passes):
    try:
        _noted.append(bool(passes()))
    except Exception:
        _noted.append(False)
"""


def count_asserts(code: str, test: str, function: str) -> tuple[int, int]:
    """Return how many assertions of a test hold, and how many were reached.

    The test runs in another process than the code, which cannot see expected values.

    Parameters
    ----------
    test : str
        Source of a function `check`, which takes the function of the code, and of its helpers.
    """
    tree = _NoteAsserts().visit(ast.parse(test))
    mark = f"{os.urandom(8).hex()}:"
    program = "\n".join(
        [
            f"_function = {function}",
            _NOTING,
            ast.unparse(ast.fix_missing_locations(tree)),
            f"{function} = _function",
            f"try:\n    check({function})\nexcept Exception:\n    _noted.append(False)",
            f"print('\\n{mark}' + __import__('json').dumps([sum(_noted), len(_noted)]))",
        ]
    )
    output = run_beside_in_sandbox(code, function, program, LIMITS).stdout.splitlines()
    counts = [line.removeprefix(mark) for line in output if line.startswith(mark)]
    if not counts:
        return 0, 0
    held, reached = json.loads(counts[-1])
    return int(held), int(reached)


class _NoteAsserts(ast.NodeTransformer):
    """Replaces assertions of `check` by calls of `_note`."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "check":
                self.generic_visit(part)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        held = ast.Lambda(nothing, node.test)
        return ast.Expr(ast.Call(ast.Name("_note", ast.Load()), [held], []))


def read_and_write(code: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return the fraction of inputs with the correct output words."""
    passed = 0
    for given, expected in zip(inputs, outputs, strict=True):
        result = run_in_sandbox(code, _text(given), LIMITS)
        is_correct = result.stdout.split() == _text(expected).split()
        passed += result.outcome == "finished" and is_correct
    return passed / len(inputs)


def call_cases(code: str, function: str, inputs: Sequence[Any], outputs: Sequence[Any]) -> float:
    """Return the fraction of correct calls of a function, or of a method of `Solution`.

    Some data sets put the expected value into a list; both forms count.
    """
    caller = (
        f"{code}\ndef _called(*arguments):\n"
        f"    owner = Solution() if 'Solution' in globals() else None\n"
        f"    call = globals()[{function!r}] if owner is None else getattr(owner, {function!r})\n"
        "    return call(*arguments)\n"
    )
    results = call_in_sandbox(caller, "_called", [list(given) for given in inputs], LIMITS)
    passed = [
        not result.error and expected in (result.value, [result.value])
        for result, expected in zip(results, outputs, strict=True)
    ]
    return sum(passed) / len(passed)


def _text(lines: Any) -> str:
    """Return a text that may be given as its lines."""
    return lines if isinstance(lines, str) else "\n".join(map(str, lines))
