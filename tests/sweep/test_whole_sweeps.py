"""Complete sweeps that are killed: their tables equal those of single runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from nip_astra.sweep.plan import SweepPlan
from nip_astra.sweep.results import read_sweep
from nip_astra.sweep.runner import SweepOptions, run_sweep

ROOT = Path(__file__).parents[2]
SMALL = [
    "training.num_iterations=3",
    "training.eval_period=1",
    "training.num_episodes_per_experience=2",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.use_random_search=false",
]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        assert process is None or process.poll() is None, "it ended before it was killed"
        time.sleep(0.05)


def count_of(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def assert_table_of_single_runs(directory: Path, scenario: Path, alone: Path) -> None:
    """Each row of the table equals the result of a separate run."""
    results = read_sweep(directory)
    assert results.num_ended == len(results.plan.runs)
    assert (directory / "table.csv").read_bytes().decode() == results.to_csv()
    for run in results.plan.runs:
        resolved = resolve_experiment(
            trainer=run.arm.trainer, scenario=str(scenario), overrides=SMALL, seed=run.seed
        )
        folder = run.folder_in(directory)
        run_experiment(resolved, runs_dir=str(alone), run_id=folder.name, progress=False)
        own = alone / folder.name
        swept, single = (json.loads((one / "results.json").read_text()) for one in (folder, own))
        whens = ("before", "after")
        assert [swept[when] for when in whens] == [single[when] for when in whens]
        rows = [row for row in results.rows if row["run_id"] == folder.name]
        rewards = {row["value"] for row in rows if row["name"] == "mean_reward"}
        assert rewards == {single[when]["mean_reward"] for when in whens}
        assert (folder / "metrics.jsonl").read_text() == (own / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_has_the_table_of_single_runs(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "sweep"
    command = [sys.executable, str(ROOT / "run.py"), "sweep", "--sweep-dir", str(directory)]
    command += ["--trainer", "ast_dpo,ast_ipo,ast_grpo", "--seeds", "0..1", "--num-processes", "2"]
    command += ["--scenario", str(tiny_scenario)]
    for one in SMALL:
        command += ["--set", one]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for num_ended in (1, 3):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        wait_for(lambda n=num_ended: count_of(directory, "*/results.json") >= n, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[6/6]" in done.stdout
    assert_table_of_single_runs(directory, tiny_scenario, tmp_path / "alone")


@pytest.mark.slow
def test_a_run_whose_ray_worker_was_killed_is_gone_on_with(
    tiny_scenario: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    directory = tmp_path / "sweep"
    killed: list[int] = []

    def kill_a_worker() -> None:
        wait_for(lambda: count_of(directory, "*/metrics.jsonl") > 0)
        run = next(directory.glob("*/metrics.jsonl")).parent
        wait_for(lambda: count_of(run, "checkpoints/*/*") > 0)
        process = json.loads((run / ".lock").read_text())["pid"]
        status = Path(f"/proc/{process}/status").read_text()
        worker = int(status.partition("PPid:")[2].split()[0])
        os.kill(worker, signal.SIGKILL)
        killed.append(worker)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    plan = SweepPlan(
        trainers=["ast_dpo"], scenarios=[str(tiny_scenario)], seeds=[0, 1], overrides=SMALL
    )
    settings = {"checkpoint_period": 1}
    results = run_sweep(
        directory,
        options=SweepOptions(settings=settings, place="ray", num_processes=2, num_cpus=1),
        progress=False,
        **plan.to_dict(),
    )
    killer.join()
    assert killed
    assert results.num_ended == 2
    assert_table_of_single_runs(directory, tiny_scenario, tmp_path / "alone")
    logs = "".join(log.read_text() for log in (directory / "logs").glob("*.txt"))
    assert "SIGTERM" in logs, "the run's own process saved its work"
