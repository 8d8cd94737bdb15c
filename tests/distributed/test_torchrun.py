"""The command itself, started by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.documents import ROOT
from tests.kit.experiments import FAST, metrics_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_torchrun_trains_and_one_process_writes(
    sharding: str, tiny_scenario: Path, tmp_path: Path
) -> None:
    sets = [part for one in ("training.num_iterations=2", *FAST) for part in ("--set", one)]
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
    assert len(metrics_of(tmp_path / "two")) == 2
    # The table and the paths appear there once.
    assert done.stdout.count("held-out episodes before and after training") == 1
    assert done.stdout.count("results.json") == 1
