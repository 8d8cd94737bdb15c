"""The command itself, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

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
    # The table and the paths stand there once.
    assert done.stdout.count("held-out episodes before and after training") == 1
    assert done.stdout.count("results.json") == 1
