"""Resuming at the size of the presets: batches of tiny trees round alike however they are cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resume_check import what_was_found
from nip_astra.run import resume_experiment, run_experiment
from tests.kit.resuming import copy_as_killed_after

SHORT = (
    "ast_chat.evaluation.num_episodes=20",
    "ast_chat.evaluation.use_random_search=false",
    "ast_chat.evaluation.batch_size=20",
)


def check_every_checkpoint(folder: Path, trainer: str, *overrides: str, period: int) -> None:
    """Resume from each of a run's checkpoints, and compare all that was computed."""
    resolved = resolve_experiment(trainer=trainer, seed=1, overrides=[*SHORT, *overrides])
    settings = {"runs_dir": str(folder), "progress": False, "num_checkpoints_kept": 99}
    whole = run_experiment(resolved, run_id="whole", checkpoint_period=period, **settings)
    run = whole.run_directory.path
    steps = sorted(run.glob("checkpoints/step_*"))[:-1]
    assert steps
    for step in steps:
        copy = folder / step.name
        copy_as_killed_after(run, step, copy)
        resume_experiment(copy, progress=False)
        assert what_was_found(copy) == what_was_found(run), step.name
        shutil.rmtree(copy)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ast_ppo", "ast_dpo", "ast_grpo", "ast_reinforce"])
def test_no_checkpoint_of_eighteen_iterations_changes_what_follows(
    tmp_path: Path, trainer: str
) -> None:
    check_every_checkpoint(tmp_path, trainer, "training.num_iterations=18", period=2)
