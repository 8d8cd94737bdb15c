"""The command itself, started by torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.documents import ROOT

pytestmark = pytest.mark.slow
SHORT = (
    "training.num_iterations=2",
    "ast_chat.evaluation.num_episodes=2",
    "ast_chat.evaluation.use_random_search=false",
)


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_torchrun_trains_and_one_process_writes(
    sharding: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    sets = [part for one in SHORT for part in ("--set", one)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(ROOT / "run.py"), "--trainer", "ast_dpo", *sets),
            *("--scenario", str(tiny_scenario), "--runs-dir", str(tmp_path), "--run-id", "two"),
            *("--settings", f"sharding={sharding}"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["two"]
    assert len((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()) == 2
    # The table and the paths appear there once.
    assert done.stdout.count("held-out episodes before and after training") == 1
    assert done.stdout.count("results.json") == 1


def test_torchrun_plays_the_problems_of_a_task_in_all_processes(tmp_path: Path) -> None:
    """The first rollout is the same for any number of processes, to the last digit."""
    short = (
        *("training.num_iterations=1", "training.num_episodes_per_experience=6"),
        *("task.num_rollout_parts=4", "task.evaluation.num_problems=8"),
    )
    sets = [part for one in short for part in ("--set", one)]
    found = []
    for count in ("1", "2"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", count, str(ROOT / "run.py")),
                *("--trainer", "self_hosted_grpo", "--scenario", "guess_number", *sets),
                *("--runs-dir", str(tmp_path), "--run-id", f"by-{count}"),
            ],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        run = tmp_path / f"by-{count}"
        (line,) = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        played = {name: value for name, value in line.items() if name.startswith("rollout/")}
        found.append((played, json.loads((run / "results.json").read_text())["before"]))
    assert len(found[0][0]) > 8
    assert found[0] == found[1]
