"""Runs that are killed at their file operations go on as if they had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nip_astra.parameters.types import TrainerType

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def killed(trainer: str, folder: Path, every: int) -> dict[str, Any]:
    """What became of a run that was killed at every `every`-th of its file operations."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.killing", trainer, str(folder), str(every)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert summary["faults"] == 0
    return summary


def test_a_run_of_no_model_is_killed_all_over(tmp_path: Path) -> None:
    found = killed("toy_trainer", tmp_path, 14)
    # The run directory, four checkpoints, results and report.
    assert found["operations"] > 100
    assert found["kills"] > 8


@pytest.mark.parametrize("trainer", ["ast_dpo", "vanilla_ppo", "solo_agent"])
def test_a_run_of_each_family_is_killed_here_and_there(trainer: str, tmp_path: Path) -> None:
    assert killed(trainer, tmp_path, 60)["kills"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["toy_trainer", *map(str, TrainerType)])
def test_a_run_is_killed_at_every_file_operation(trainer: str, tmp_path: Path) -> None:
    found = killed(trainer, tmp_path, 1)
    assert found["kills"] == found["operations"]
