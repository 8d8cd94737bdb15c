"""Runs that are killed at their file operations go on as if they had not been."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import plugins_forgotten_after
from tests.killing import killed_runs
from tests.resuming import SHORT_TRAINERS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")


class Killing:
    """Kills runs in forks of this process, which has imported what they need."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capfd = folder, capfd

    def __call__(self, trainer: str, every: int) -> dict[str, Any]:
        """What became of runs that were killed at every so many-th of their file operations."""
        with plugins_forgotten_after():
            num_faults = killed_runs(trainer, self.folder / trainer, every)
        said = self.capfd.readouterr()
        assert num_faults == 0, f"{said.out}\n{said.err[-4000:]}"
        found: dict[str, Any] = json.loads(said.out.splitlines()[-1])
        return found


@pytest.fixture
def killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Killing:
    return Killing(tmp_path, capfd)


def test_a_run_of_no_model_is_killed_all_over(killed: Killing) -> None:
    toy = killed("toy_trainer", 14)
    # The run directory, four checkpoints, results and report.
    assert toy["operations"] > 100
    assert toy["kills"] > 8


@pytest.mark.parametrize("trainer", ["ast_dpo", "vanilla_ppo", "solo_agent"])
def test_a_run_of_each_family_is_killed_here_and_there(trainer: str, killed: Killing) -> None:
    assert killed(trainer, 60)["kills"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["toy_trainer", *SHORT_TRAINERS])
def test_a_run_is_killed_at_every_file_operation(trainer: str, killed: Killing) -> None:
    found = killed(trainer, 1)
    assert found["kills"] == found["operations"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["pure_text_ei", "pure_text_malt"])
def test_a_run_of_chat_models_is_killed_all_over(trainer: str, killed: Killing) -> None:
    """Models and jobs are in its own process; behind a service, see `test_text_kills`."""
    assert killed(trainer, 10)["kills"] > 20
