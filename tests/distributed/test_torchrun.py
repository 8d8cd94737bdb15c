"""The command itself, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from nip_astra.evaluation.run_results import read_results
from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of

pytestmark = pytest.mark.slow


def torchrun(count: int, *arguments: str, overrides: Sequence[str]) -> str:
    """Run the command in some processes, and return its standard output."""
    sets = [part for override in overrides for part in ("--set", override)]
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(count), str(ROOT / "run.py"), *arguments, *sets],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_torchrun_trains_and_one_process_writes(
    sharding: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    output = torchrun(
        *(2, "--trainer", "ast_dpo", "--scenario", str(tiny_scenario)),
        *("--runs-dir", str(tmp_path), "--run-id", "two", "--settings", f"sharding={sharding}"),
        overrides=("training.num_iterations=2", *FAST),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert len(metrics_of(tmp_path / "two")) == 2
    # The table and the paths appear there once.
    assert output.count("held-out episodes before and after training") == 1
    assert output.count("results.json") == 1


def test_torchrun_plays_the_problems_of_a_task_in_all_processes(tmp_path: Path) -> None:
    """The first rollout is the same for any number of processes, to the last digit."""
    short = (
        *("training.num_iterations=1", "training.num_episodes_per_experience=6"),
        *("task.num_rollout_parts=4", "task.evaluation.num_problems=8"),
    )
    results = []
    for count in (1, 2):
        torchrun(
            *(count, "--trainer", "self_hosted_grpo", "--scenario", "guess_number"),
            *("--runs-dir", str(tmp_path), "--run-id", f"by-{count}"),
            overrides=short,
        )
        run = tmp_path / f"by-{count}"
        (row,) = metrics_of(run)
        rollout = {name: value for name, value in row.items() if name.startswith("rollout/")}
        results.append((rollout, read_results(run).results["before"]))
    assert len(results[0][0]) > 8
    assert results[0] == results[1]
