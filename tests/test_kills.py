"""Runs that are killed at their file operations go on as if they had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.resuming import SHORT_TRAINERS

REPOSITORY = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


def killed(folder: Path, **every: int) -> list[dict[str, Any]]:
    """What became of runs that were killed at every so many-th of their file operations."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    runs = [f"{trainer}={number}" for trainer, number in every.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.killing", str(folder), *runs],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    summaries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [summary["faults"] for summary in summaries] == [0] * len(every), done.stdout
    return summaries


def test_runs_are_killed_all_over_and_one_of_each_family_here_and_there(tmp_path: Path) -> None:
    toy, *families = killed(tmp_path, toy_trainer=14, ast_dpo=60, vanilla_ppo=60, solo_agent=60)
    # The run directory, four checkpoints, results and report.
    assert toy["operations"] > 100
    assert toy["kills"] > 8
    assert all(found["kills"] >= 2 for found in families)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["toy_trainer", *SHORT_TRAINERS])
def test_a_run_is_killed_at_every_file_operation(trainer: str, tmp_path: Path) -> None:
    (found,) = killed(tmp_path, **{trainer: 1})
    assert found["kills"] == found["operations"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["pure_text_ei", "pure_text_malt"])
def test_a_run_of_chat_models_is_killed_all_over(trainer: str, tmp_path: Path) -> None:
    """Models and jobs are in its own process; behind a service, see `test_text_kills`."""
    (found,) = killed(tmp_path, **{trainer: 10})
    assert found["kills"] > 20
