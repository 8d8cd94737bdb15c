"""Solutions checked per minute by the sandbox and by the interpreter, and their agreement.

    python benchmarks/sandbox.py --out sandbox.json

Runs correct and incorrect solutions of `code_validation`, each with all tests of its problem in one
sandbox and `--processes` sandboxes at a time, with bubblewrap and with the fallback interpreter.
They agree on a solution if the same tests pass.
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

from measuring import build_parser, report_figures

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import call_in_interpreter, why_no_interpreter
from nip_astra.utils.sandbox import CallResult, call_in_sandbox, check_sandbox

SCENARIO = Path(__file__).resolve().parents[1] / "scenarios" / "code_validation"
PROBLEMS = SCENARIO / "problems.jsonl"
sys.path.append(str(SCENARIO))
from verified import (  # type: ignore[import-not-found]  # noqa: E402  # next to the data
    LIMITS,
    Case,
    passed_of,
)

Task = tuple[str, str, list[Case]]


def read_tasks(count: int) -> list[Task]:
    """Sample solutions of all problems, with their tests."""
    tasks = []
    for line in PROBLEMS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        cases = [Case(tuple(arguments), expected) for arguments, expected in row["tests"]]
        tasks += [(solution["code"], row["name"], cases) for solution in row["solutions"]]
    return random.Random(0).sample(tasks, min(count, len(tasks)))


def by_bubblewrap(task: Task) -> list[CallResult]:
    """Run all calls of a solution in one sandbox."""
    code, function, cases = task
    return call_in_sandbox(code, function, [case.arguments for case in cases], LIMITS)


def by_interpreter(task: Task) -> list[CallResult] | None:
    """Run all calls in the interpreter; None if it does not support the solution."""
    code, function, cases = task
    try:
        return call_in_interpreter(code, function, [case.arguments for case in cases], LIMITS)
    except SandboxUnavailableError:
        return None


def measure(tasks: Sequence[Task], num_processes: int) -> dict[str, Any]:
    """Solutions per minute of both, and counts of agreement."""
    figures: dict[str, Any] = {"num_solutions": len(tasks), "num_processes": num_processes}
    results = []
    for check in (by_bubblewrap, by_interpreter):
        if check is by_interpreter and why_no_interpreter():
            break
        started = time.perf_counter()
        with ThreadPoolExecutor(num_processes) as pool:
            results.append(list(pool.map(check, tasks)))
        rate = 60 * len(tasks) / (time.perf_counter() - started)
        figures[f"{check.__name__}_a_minute"] = round(rate)
    if len(results) == 2:
        kinds: Counter[str] = Counter()
        for (_, _, cases), ours, theirs in zip(tasks, *results, strict=True):
            is_same = theirs is not None and passed_of(ours, cases) == passed_of(theirs, cases)
            kinds["refused" if theirs is None else "agreed" if is_same else "differing"] += 1
        figures |= {f"num_{name}": kinds[name] for name in ("agreed", "refused", "differing")}
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the figures."""
    options = build_parser(__doc__, solutions=400, processes=2).parse_args(arguments)
    check_sandbox()
    report_figures(measure(read_tasks(options.solutions), options.processes), options.out)


if __name__ == "__main__":
    main()
