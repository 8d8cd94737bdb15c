"""How many solutions does the sandbox check in a minute, and does the interpreter agree with it?

    python benchmarks/sandbox.py --out sandbox.json

Solutions of `code_validation`, right and wrong, each with all tests of its problem in one sandbox;
so many sandboxes at a time as there are processes. Once by bubblewrap, and once by the interpreter
that stands in where there is none: a solution counts as agreed on where the same tests pass.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import options_of, tell

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import call_in_interpreter, why_no_interpreter
from nip_astra.utils.sandbox import CallResult, call_in_sandbox, check_sandbox

SCENARIO = Path(__file__).resolve().parents[1] / "scenarios" / "code_validation"
PROBLEMS = SCENARIO / "problems.jsonl"
sys.path.append(str(SCENARIO))
from verified import LIMITS, Case, passed_of  # noqa: E402  # beside the data

Task = tuple[str, str, list[Case]]


def read_tasks(count: int) -> list[Task]:
    """Solutions with their tests, drawn from all problems."""
    tasks = []
    for line in PROBLEMS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cases = [Case(tuple(given), expected) for given, expected in row["tests"]]
        tasks += [(one["code"], row["name"], cases) for one in row["solutions"]]
    return random.Random(0).sample(tasks, min(count, len(tasks)))


def by_bubblewrap(task: Task) -> list[CallResult]:
    """All calls of a solution in one sandbox."""
    code, function, cases = task
    return call_in_sandbox(code, function, [case.arguments for case in cases], LIMITS)


def by_interpreter(task: Task) -> list[CallResult] | None:
    """The same by the interpreter; None where it lacks what the solution needs."""
    code, function, cases = task
    try:
        return call_in_interpreter(code, function, [case.arguments for case in cases], LIMITS)
    except SandboxUnavailableError:
        return None


def measure(tasks: Sequence[Task], num_processes: int) -> dict[str, Any]:
    """Solutions a minute of both ways, and how often they agree."""
    found: dict[str, Any] = {"num_solutions": len(tasks), "num_processes": num_processes}
    results = []
    for check in (by_bubblewrap, by_interpreter):
        if check is by_interpreter and why_no_interpreter():
            break
        started = time.perf_counter()
        with ThreadPoolExecutor(num_processes) as pool:
            results.append(list(pool.map(check, tasks)))
        rate = 60 * len(tasks) / (time.perf_counter() - started)
        found[f"{check.__name__}_a_minute"] = round(rate)
    if len(results) == 2:
        kinds: Counter[str] = Counter()
        for (_, _, cases), ours, other in zip(tasks, *results, strict=True):
            is_same = other is not None and passed_of(ours, cases) == passed_of(other, cases)
            kinds["refused" if other is None else "agreed" if is_same else "differing"] += 1
        found |= {f"num_{name}": kinds[name] for name in ("agreed", "refused", "differing")}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    given = options_of(__doc__, solutions=400, processes=2).parse_args(arguments)
    check_sandbox()
    tell(measure(read_tasks(given.solutions), given.processes), given.out)


if __name__ == "__main__":
    main()
