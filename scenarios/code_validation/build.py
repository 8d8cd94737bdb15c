"""Build `problems.jsonl` from `problems.py`: tests, a right solution and wrong ones for each.

    python scenarios/code_validation/build.py

Every program runs in the sandbox. The same seed gives the same file.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from problems import PROBLEMS, Problem
from tqdm import tqdm

from nip_astra.scenarios.code.verified import expected_values, solutions, varied

HERE = Path(__file__).parent
NUM_DRAWS = 200
NUM_TESTS = 24
NUM_WRONG = 4


def build(problem: Problem, seed: int) -> dict[str, Any]:
    """A row of the file: a problem with its tests and solutions."""
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


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "problems.jsonl")
    options = parser.parse_args()
    rows = [build(problem, options.seed) for problem in tqdm(PROBLEMS)]
    # A problem with a single wrong solution, or none, would be known by it.
    kept = [row for row in rows if len(row["solutions"]) > 2]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in kept]
    options.out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
