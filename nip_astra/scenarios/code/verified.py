"""Solutions whose rightness is known: programs with the outcome of each of their tests."""

from __future__ import annotations

import ast
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from nip_astra.errors import DataError
from nip_astra.scenarios.code.mutations import (
    Mutation,
    mutations,
    normal_form,
    special_cases,
)
from nip_astra.utils.sandbox import CallResult, SandboxLimits, call_in_sandbox

Item = TypeVar("Item")

LIMITS = SandboxLimits(seconds=10, cpu_seconds=1, memory_mib=256)
"""What a solution may use while all of its tests run."""


@dataclass(frozen=True)
class Case:
    """A test: arguments of a function, and the value that is right."""

    arguments: tuple[Any, ...]
    expected: Any


@dataclass(frozen=True)
class Solution:
    """A program that is known to be right or wrong.

    Attributes
    ----------
    code : str
        The program in its normal form.
    is_correct : bool
        Whether it passes every test.
    share_passed : float
        Of its tests, from 0 to 1.
    mutation : str
        What was changed to make it wrong; empty for the right one.
    line : int
        Where; 0 for the right one.
    """

    code: str
    is_correct: bool
    share_passed: float
    mutation: str = ""
    line: int = 0


def expected_values(code: str, function: str, arguments: Sequence[tuple[Any, ...]]) -> list[Case]:
    """Tests whose expected values a right solution gives.

    Raises
    ------
    DataError
        When the solution fails on any of the arguments.
    SandboxUnavailableError
        When this machine offers no sandbox; no code is run.
    """
    results = call_in_sandbox(code, function, arguments, LIMITS)
    cases = []
    for given, result in zip(arguments, results, strict=True):
        if result.error:
            raise DataError(
                f"the right solution {function!r} fails on {given!r}: {result.error}; mend it, or "
                "leave this input out"
            )
        cases.append(Case(given, result.value))
    return cases


def varied(cases: Iterable[Case], count: int) -> list[Case]:
    """So many different tests at most, as many expected values among them as there are."""
    by_value: dict[str, list[Case]] = defaultdict(list)
    seen = set()
    for case in cases:
        if (key := repr(case.arguments)) not in seen:
            seen.add(key)
            by_value[repr(case.expected)].append(case)
    return _in_turns(by_value.values())[:count]


def share_passed(code: str, function: str, cases: Sequence[Case]) -> float:
    """The share of tests that a program passes, run in the sandbox; from 0 to 1."""
    results = call_in_sandbox(code, function, [case.arguments for case in cases], LIMITS)
    passed = passed_of(results, cases)
    return sum(passed) / len(passed)


def passed_of(results: Sequence[CallResult], cases: Sequence[Case]) -> list[bool]:
    """Whether each test is passed: the call ended, with the expected value and its type."""
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
    num_processes: int = 2,
) -> list[Solution]:
    """A right solution and subtly wrong ones, which pass half of the tests at least, but not all.

    Parameters
    ----------
    code : str
        The right solution.
    function : str
        The function that the tests call.
    cases : sequence of Case
        The tests.
    num_wrong : int
        Wrong solutions at most; of as many kinds of mutation as there are.
    rng : random.Random
        Chooses among them.
    num_processes : int
        Sandboxes at a time.

    Raises
    ------
    DataError
        If the correct solution fails a test.
    """
    candidates = [*mutations(code), *special_cases(code, _large_sizes(code, cases))]
    return verified_solutions(
        normal_form(code),
        lambda one: share_passed(one, function, cases),
        candidates,
        num_wrong,
        rng,
        name=function,
        num_processes=num_processes,
    )


def verified_solutions(
    right: str,
    share_of: Callable[[str], float],
    candidates: Sequence[Mutation],
    num_wrong: int,
    rng: random.Random,
    *,
    name: str,
    num_processes: int = 2,
) -> list[Solution]:
    """The same for tests of any kind: `share_of` gives the share of them that a program passes.

    Raises
    ------
    DataError
        If the correct solution fails a test.
    """
    if share_of(right) != 1:
        raise DataError(
            f"the correct solution of {name!r} fails a test. Fix it, or leave the problem out."
        )
    with ThreadPoolExecutor(num_processes) as pool:
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
    """Some of as many kinds as there are; special cases, which look made, come last."""
    by_kind: dict[str, list[tuple[Mutation, float]]] = defaultdict(list)
    for one in rng.sample(subtle, len(subtle)):
        by_kind[one[0].kind].append(one)
    made = by_kind.pop("case", [])
    return [*_in_turns(by_kind.values()), *made][:count]


def _in_turns(groups: Collection[list[Item]]) -> list[Item]:
    """The first of each group, then the second of each, and so on."""
    rounds = max(map(len, groups), default=0)
    return [group[at] for at in range(rounds) for group in groups if at < len(group)]


def _large_sizes(code: str, cases: Sequence[Case]) -> dict[str, tuple[str, int]]:
    """For each parameter its kind, and the size that a third of the tests exceed at most."""
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
    """Whether a value is the expected one, of its type too: 1 is not True."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(map(_is_same, value, expected))
        )
    return type(value) is type(expected) and bool(value == expected)
