"""Kill a run at its file operations, one after the other, and go on from what is left.

One line of JSON is printed a fault, and one that sums up each trainer. Processes are forked from
one that has run once, so that a kill costs a run.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nip_astra.errors import RunDirectoryError
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.tracking.run_directory import HAS_CHECKPOINTS, REPORT, RESULTS
from nip_astra.tracking.run_lock import LOCK
from tests.resuming import short_experiment, what_was_found
from tests.toy_scenario import toy_scenario_in

WATCHED = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "truncate", "open")
SETTINGS = {"progress": False, "checkpoint_period": 1}


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Count file operations, and end the process without a word before one of them."""
    done: list[str] = []
    before: list[tuple[Any, str, Any]] = []

    def watch(module: Any, name: str, counts: Callable[..., bool]) -> None:
        call = getattr(module, name)
        before.append((module, name, call))

        def watched(*args: Any, **kwargs: Any) -> Any:
            if counts(*args, **kwargs):
                done.append(f"{name} {args[:2]}")
                if len(done) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(module, name, watched)

    for name in WATCHED:
        watch(os, name, lambda *_, **__: True)
    for module in (io, builtins):
        watch(module, "open", _writes)
    try:
        yield done
    finally:
        for module, name, call in before:
            setattr(module, name, call)


def _writes(_file: object, mode: str = "r", *_: object, **__: object) -> bool:
    return any(letter in mode for letter in "wax+")


def in_a_fork(work: Callable[[], object]) -> int:
    """The exit status of a process that does the work; an error is printed."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def go_on(resolved: ResolvedExperiment, runs_dir: Path) -> None:
    """Resume a killed run; where it has no directory yet, start it again."""
    path = runs_dir / "run"
    if not path.exists():
        run_experiment(resolved, runs_dir=str(runs_dir), run_id="run", **SETTINGS)
        return
    is_whole = (path / RESULTS).exists() and (path / REPORT).exists()
    try:
        resume_experiment(path, progress=False)
    except RunDirectoryError as error:
        if not (is_whole and "has ended" in str(error)):
            raise


def fault_of(runs_dir: Path, expected: dict[str, bytes]) -> str:
    """Say what is not as if the run had never been killed; an empty text where all is."""
    path = runs_dir / "run"
    if not (path / REPORT).exists():
        return "there is no report"
    found = what_was_found(path)
    if found != expected:
        return f"others: {sorted(k for k in found | expected if found.get(k) != expected.get(k))}"
    hidden = {file.relative_to(runs_dir).as_posix() for file in runs_dir.rglob(".*")}
    left = hidden - {f"run/{LOCK}", f"run/{HAS_CHECKPOINTS}"}
    return f"left over: {sorted(left)}" if left else ""


def kill_everywhere(resolved: ResolvedExperiment, folder: Path, every: int) -> int:
    """Kill a run at every `every`-th operation, print what becomes of it, and count the faults."""

    def run(name: str) -> None:
        run_experiment(resolved, runs_dir=str(folder / name), run_id="run", **SETTINGS)

    # The first one imports what the others have, which is file operations too.
    run("first")
    with killed_at(0) as operations:
        run("whole")
    expected = what_was_found(folder / "whole" / "run")
    num_faults = num_killed = 0
    for number in range(1, len(operations) + 1, every):
        runs_dir = folder / str(number)

        def until_killed(number: int = number) -> None:
            with killed_at(number):
                run(str(number))

        status = in_a_fork(until_killed)
        again = in_a_fork(lambda runs_dir=runs_dir: go_on(resolved, runs_dir))
        fault = f"going on ended with {again}" if again else fault_of(runs_dir, expected)
        if status != -signal.SIGKILL:
            fault = f"ended with {status}, not killed. {fault}"
        num_killed += 1
        num_faults += bool(fault)
        if fault:
            print(json.dumps([number, operations[number - 1], fault]))
    print(json.dumps({"kills": num_killed, "operations": len(operations), "faults": num_faults}))
    return num_faults


def killed_runs(trainer: str, folder: Path, every: int) -> int:
    """Kill a short run of a trainer, and count the faults."""
    if trainer != "toy_trainer":
        resolved = short_experiment(trainer, folder / "scenario", num_iterations=2)
        return kill_everywhere(resolved, folder, every)
    with toy_scenario_in(folder / "scenario") as scenario:
        resolved = resolve_experiment(trainer=trainer, scenario=str(scenario))
        return kill_everywhere(resolved, folder, every)
