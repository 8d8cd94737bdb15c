"""Wrong solutions are subtly wrong: they pass at least half of the tests, but never all."""

from __future__ import annotations

import ast
import json
import random
import runpy
from pathlib import Path

import pytest
from verified import (
    LIMITS,
    Case,
    expected_values,
    mutations,
    normal_form,
    passed_of,
    share_passed,
    solutions,
    special_cases,
    varied,
)

from nip_astra.errors import DataError
from nip_astra.utils.interpreter import call_in_interpreter

DATA = Path(__file__).resolve().parents[3] / "scenarios" / "code_validation" / "problems.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
CLAMP = "def clamp(n, low):\n    if n < low:   # below\n        return low\n    return n"


@pytest.mark.parametrize(
    ("code", "kind", "changed"),
    [
        ("a < b", "comparison", {"a <= b", "a > b"}),
        ("a not in b", "comparison", {"a in b"}),
        ("a // b", "arithmetic", {"a * b"}),
        ("x = 3", "number", {"x = 4", "x = 2"}),
        ("a and b", "logic", {"a or b"}),
        ("x = True", "logic", {"x = False"}),
        ("min(a)", "twin", {"max(a)"}),
        ("a.lower()", "twin", {"a.upper()"}),
        ("a[b:c]", "slice", {"a[b + 1:c]", "a[b:c + 1]"}),
        ("range(n)", "range", {"range(n - 1)"}),
        ("range(a, b, c)", "range", {"range(a, b - 1, c)"}),
        ("while a:\n    x += b", "statement", {"while a:\n    pass"}),
        ("if a:\n    x = b\nelse:\n    x = c", "branch", {"if a:\n    x = b"}),
    ],
)
def test_each_kind_of_mutation_changes_one_place(code: str, kind: str, changed: set[str]) -> None:
    result = {item.code.rstrip() for item in mutations(code) if item.kind == kind}
    assert result == changed


def test_mutations_differ_from_each_other_and_report_their_place() -> None:
    result = mutations(CLAMP)
    assert [item.line for item in result] == [2, 2]
    assert len({item.code for item in result} | {normal_form(CLAMP)}) == 3


def test_special_cases_change_arguments_beyond_a_size() -> None:
    result = special_cases(CLAMP, {"n": ("number", 7)})
    for item, shift in zip(result, (-1, 1), strict=True):
        names: dict[str, object] = {}
        exec(item.code, names)
        clamp = names["clamp"]
        assert callable(clamp)
        assert (clamp(7, 0), clamp(8, 0)) == (7, 8 + shift)


def test_tests_have_as_many_answers_as_there_are() -> None:
    cases = [Case((n,), n > 8) for n in (*range(10), 0)]
    chosen = varied(cases, 3)
    assert [case.expected for case in chosen] == [False, True, False]
    assert len(varied(cases, 99)) == 10


@pytest.mark.needs_sandbox
def test_a_share_counts_values_of_the_right_type_only() -> None:
    code = "def f(n):\n    return [True, 1, 1.0, [1], None][n]"
    cases = [Case((0,), 1), Case((1,), 1), Case((2,), 1), Case((3,), [1]), Case((9,), None)]
    assert share_passed(code, "f", cases) == 2 / 5


@pytest.mark.needs_sandbox
def test_a_right_solution_that_fails_is_refused() -> None:
    with pytest.raises(DataError, match="ZeroDivisionError"):
        expected_values("def f(n): return 1 / n", "f", [(1,), (0,)])
    with pytest.raises(DataError, match="fails a test"):
        solutions("def f(n): return n", "f", [Case((1,), 2)], 1, random.Random(0))


@pytest.mark.needs_sandbox
def test_equal_seeds_give_equal_solutions() -> None:
    cases = expected_values(CLAMP, "clamp", [(n, 3) for n in range(8)])
    result = [solutions(CLAMP, "clamp", cases, 3, random.Random(5)) for _ in range(2)]
    assert result[0] == result[1]
    assert [item.is_correct for item in result[0]] == [True, False, False]


def test_the_data_that_ship_are_as_promised() -> None:
    """The complete build takes minutes; people edit only questions and right solutions."""
    built = runpy.run_path(str(DATA.parent / "problems.py"))["PROBLEMS"]
    problems = {problem.name: problem for problem in built}
    assert len({row["name"] for row in ROWS}) == len(ROWS) >= 100
    for row in ROWS:
        problem = problems[row["name"]]
        assert row["question"] == " ".join(problem.question.split())
        assert row["level"] == problem.level in (1, 2, 3)
        assert row["solutions"][0]["code"] == normal_form(problem.solution)
        right, *wrong = row["solutions"]
        assert right["is_correct"]
        assert len(wrong) >= 2
        assert len({item["code"] for item in row["solutions"]}) == len(row["solutions"])
        assert all(0.5 <= item["share_passed"] < 1 and not item["is_correct"] for item in wrong)
        assert all(item["mutation"] and ast.parse(item["code"]) for item in wrong)
        assert len(row["tests"]) >= 8


@pytest.mark.needs_sandbox
def test_programs_of_the_data_behave_as_labelled() -> None:
    for row in random.Random(0).sample(ROWS, 3):
        cases = [Case(tuple(arguments), expected) for arguments, expected in row["tests"]]
        for solution in row["solutions"]:
            result = share_passed(solution["code"], row["name"], cases)
            assert result == pytest.approx(solution["share_passed"])


@pytest.mark.parametrize("count", [40, pytest.param(508, marks=pytest.mark.slow)])
def test_the_interpreter_gives_the_same_verdicts(count: int) -> None:
    """Including `majority`, which iterates over a set of numbers."""
    pytest.importorskip("pydantic_monty")
    programs = [(row, item) for row in ROWS for item in row["solutions"]]
    chosen = [item for item in programs if item[0]["name"] == "majority"]
    chosen += random.Random(0).sample(programs, min(count, len(programs)))
    for row, solution in chosen:
        cases = [Case(tuple(arguments), expected) for arguments, expected in row["tests"]]
        arguments = [case.arguments for case in cases]
        results = call_in_interpreter(solution["code"], row["name"], arguments, LIMITS)
        passed = passed_of(results, cases)
        assert sum(passed) / len(passed) == pytest.approx(solution["share_passed"]), row["name"]
