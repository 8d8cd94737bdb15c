"""Runs that are killed at random moments, resumed, and compared with uninterrupted ones.

    python benchmarks/kills.py --kills 8 --out kills.json
    python benchmarks/kills.py --parts trackers data --kills 6 --trackers wandb mlflow trackio

- moments: each trainer is killed `--kills` times, at random times.
- trackers: a run with each tracker is killed; then the tracker must have each metric at each step
  once, as `metrics.jsonl` has.
- data: a run is killed, and a file of its data is changed. It must not resume before the file is
  restored, and is then equal to an uninterrupted one.

Seeds of the moments are fixed; the moments depend on the machine's load.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from measuring import build_parser, markdown_table, report_figures

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import ChangedDataError
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.resume_check import (
    RUN,
    SETTINGS,
    find_fault,
    in_a_fork,
    read_run_contents,
    resume_or_restart,
)
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import grouped
from nip_astra.utils.forked import blocked_signals, fork
from tests.kit.resuming import short_experiment

TRAINERS = [
    *("ast_dpo", "ast_ppo", "self_hosted_grpo", "remote_api_grpo"),
    *("vanilla_ppo", "solo_agent", "spg", "pure_text_ei"),
]
MAX_TRIES = 5


def killed_after(work: Callable[[], object], seconds: float, log: Path) -> bool:
    """Do the work in a forked process, and kill it after some seconds; return whether it ran."""
    with blocked_signals():
        child = fork("a run to be killed", is_worker=False)
    if child is None:
        try:
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            work()
        finally:
            os._exit(0)
    has_ended = child.wait(seconds)
    child.kill()
    return not has_ended


def run_whole(resolved: ResolvedExperiment, folder: Path, **settings: Any) -> float:
    """Run in a forked process; return the seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    work = partial(
        run_experiment, resolved, runs_dir=str(folder), run_id=RUN, num_threads=1, **settings
    )
    assert in_a_fork(work, folder / "log.txt", name="an uninterrupted run") == 0, folder
    return time.monotonic() - started


def kill_run(
    resolved: ResolvedExperiment,
    folder: Path,
    seconds: float,
    draw: random.Random,
    *,
    earliest: float = 0.05,
    **settings: Any,
) -> bool:
    """Kill a run at a random moment, `earliest` a share of its duration.

    Returns whether it has a checkpoint.
    """
    work = partial(
        run_experiment, resolved, runs_dir=str(folder), run_id=RUN, num_threads=1, **settings
    )
    for _ in range(MAX_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        if killed_after(work, seconds * draw.uniform(earliest, 0.95), folder / "log.txt"):
            break
        folder = folder.rename(folder.with_name(f"{folder.name}-ended"))
    return CheckpointStore(folder / RUN / "checkpoints").latest() is not None


def measure_moments(trainer: str, num_kills: int, folder: Path) -> dict[str, Any]:
    """Kill a trainer's runs at random moments."""
    resolved = short_experiment(trainer, folder / "scenario", num_iterations=4)
    settings = {**SETTINGS, "num_threads": 1}
    seconds = run_whole(resolved, folder / "whole", **SETTINGS)
    expected = read_run_contents(folder / "whole" / RUN)
    draw = random.Random(f"kills of {trainer}")
    differences: list[str] = []
    num_resumed = 0
    for number in range(num_kills):
        place = folder / str(number)
        num_resumed += kill_run(resolved, place, seconds, draw, **SETTINGS)
        again = in_a_fork(partial(resume_or_restart, resolved, place, settings), place / "log.txt")
        difference = find_fault(place, expected) or (f"exit code {again}" if again else "")
        if difference:
            differences.append(difference)
    return {
        "kills": num_kills,
        "resumed from a checkpoint": num_resumed,
        "equal": num_kills - len(differences),
        "differences": differences,
    }


def steps_of_tracker(name: str, run: Path) -> Counter[tuple[int, str]]:
    """Return how often a tracker has each metric at each step."""
    if name == "wandb":
        from nip_astra.tracking.wandb_runs import STEP, offline_runs
        from tests.tracking.wandb_log import WandbLog

        folders = offline_runs(run)
        assert len(folders) == 1, folders
        (file,) = folders[0].glob("*.wandb")
        rows = WandbLog(file).history
        return Counter((int(row[STEP]), key) for row in rows if STEP in row for key in row)
    if name == "mlflow":
        import mlflow

        client = mlflow.tracking.MlflowClient(f"sqlite:///{run.parent.resolve() / 'mlflow.db'}")
        run_id = json.loads((run / "mlflow.json").read_text())["run_id"]
        return Counter(
            (metric.step, key)
            for key in client.get_run(run_id).data.metrics
            for metric in client.get_metric_history(run_id, key)
        )
    import trackio

    logs = trackio.SQLiteStorage.get_logs("nip_astra", RUN)
    return Counter((int(log["step"]), key) for log in logs if "step" in log for key in log)


def fault_of_tracker(name: str, run: Path) -> str:
    """Return the first metric of a run that a tracker lacks or has twice."""
    counts = steps_of_tracker(name, run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            count = counts[row["step"], grouped(key)]
            if key != "step" and value is not None and count != 1:
                return f"{key} at step {row['step']}: {count} times"
    return ""


def measure_tracker(name: str, num_kills: int, folder: Path) -> dict[str, Any]:
    """Kill runs with a tracker."""
    resolved = short_experiment("ast_dpo", folder / "scenario", num_iterations=4)
    settings = {**SETTINGS, "checkpoint_period": 2, "trackers": [name]}
    if name == "wandb":
        settings |= {"trackers": [], "wandb": "offline"}
    os.environ["TRACKIO_DIR"] = str(folder / "trackio-whole")
    run_whole(resolved, folder / "whole", **settings)
    # The first run reads more files.
    seconds = run_whole(resolved, folder / "again", **settings)
    expected = read_run_contents(folder / "whole" / RUN)
    draw = random.Random(f"kills with {name}")
    differences: list[str] = []
    num_resumed = 0
    for number in range(num_kills):
        place = folder / str(number)
        os.environ["TRACKIO_DIR"] = str(folder / f"trackio-{number}")
        # Trackers take half of the time to start.
        num_resumed += kill_run(resolved, place, seconds, draw, earliest=0.5, **settings)
        again = in_a_fork(partial(_resume_and_close, resolved, place, settings), place / "log.txt")
        checked = in_a_fork(partial(_write_fault, name, place), place / "check.txt")
        difference = ""
        if again or checked:
            log = place / ("log.txt" if again else "check.txt")
            last_lines = log.read_text(errors="replace").splitlines()[-3:]
            difference = f"exit code {again or checked}: {' / '.join(last_lines)}"
        difference = difference or (place / "fault").read_text() or find_fault(place, expected)
        if difference:
            differences.append(difference)
    return {
        "kills": num_kills,
        "resumed from a checkpoint": num_resumed,
        "equal": num_kills - len(differences),
        "differences": differences,
    }


def _resume_and_close(
    resolved: ResolvedExperiment, place: Path, settings: Mapping[str, Any]
) -> None:
    resume_or_restart(resolved, place, {**settings, "num_threads": 1})
    if settings["wandb"] == "offline":
        import wandb

        # W&B's own process writes the last records after the run has ended.
        wandb.teardown()


def _write_fault(name: str, place: Path) -> None:
    (place / "fault").write_text(fault_of_tracker(name, place / RUN))


def measure_data(num_kills: int, folder: Path) -> dict[str, Any]:
    """Kill runs and change their data."""
    resolved = short_experiment("ast_dpo", folder / "scenario", num_iterations=4)
    data = folder / "scenario" / "train.txt"
    before = data.read_text()
    seconds = run_whole(resolved, folder / "whole", **SETTINGS)
    expected = read_run_contents(folder / "whole" / RUN)
    draw = random.Random("kills before changes")
    differences: list[str] = []
    num_refused = num_resumed = 0
    for number in range(num_kills):
        place = folder / str(number)
        has_checkpoint = kill_run(resolved, place, seconds, draw, **SETTINGS)
        num_resumed += has_checkpoint
        # A run with results reads no more data.
        if has_checkpoint and not RunDirectory(place / RUN).has_ended:
            data.write_text(before + "another prompt\n")
            is_refused = in_a_fork(partial(_is_refused, place / RUN), place / "log.txt") == 0
            num_refused += is_refused
            data.write_text(before)
            if not is_refused:
                differences.append("not refused")
                continue
        again = in_a_fork(
            partial(resume_or_restart, resolved, place, {**SETTINGS, "num_threads": 1}),
            place / "log.txt",
        )
        difference = find_fault(place, expected) or (f"exit code {again}" if again else "")
        if difference:
            differences.append(difference)
    return {
        "kills": num_kills,
        "resumed from a checkpoint": num_resumed,
        "refused with changed data": num_refused,
        "equal": num_kills - len(differences),
        "differences": differences,
    }


def _is_refused(run: Path) -> None:
    try:
        resume_experiment(run, progress=False)
    except ChangedDataError:
        return
    raise AssertionError("the run went on")


def main(arguments: list[str] | None = None) -> None:
    """Kill runs and print a table."""
    parser = build_parser(
        __doc__,
        kills=8,
        parts=["moments", "trackers", "data"],
        trainers=TRAINERS,
        trackers=["wandb", "mlflow", "trackio"],
    )
    given = parser.parse_args(arguments)
    figures: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        if "moments" in given.parts:
            for trainer in given.trainers:
                figures[trainer] = measure_moments(trainer, given.kills, folder / trainer)
        if "trackers" in given.parts:
            for tracker in given.trackers:
                figures[f"ast_dpo with {tracker}"] = measure_tracker(
                    tracker, given.kills, folder / tracker
                )
        if "data" in given.parts:
            figures["ast_dpo with changed data"] = measure_data(given.kills, folder / "data")
    heads = ["run", "kills", "resumed from a checkpoint", "equal or refused", "differences"]
    rows = [
        [
            run,
            found["kills"],
            found["resumed from a checkpoint"],
            found["equal"],
            "; ".join(found["differences"]) or "none",
        ]
        for run, found in figures.items()
    ]
    report_figures(figures, given.out, shown=markdown_table(heads, rows))


if __name__ == "__main__":
    main()
