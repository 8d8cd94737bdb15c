"""Processes that train a run together play the problems of a task together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.team import open_team
from nip_astra.errors import LostProcessError, NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers import tasks
from tests.distributed.processes import together

CPU = torch.device("cpu")


@pytest.fixture
def resolved() -> ResolvedExperiment:
    return resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="guess_number",
        overrides=[
            "training.num_iterations=2",
            "training.eval_period=2",
            "training.num_episodes_per_experience=5",
            "task.num_rollout_parts=4",
            "task.evaluation.num_problems=6",
            "task.evaluation.num_dev_problems=4",
        ],
    )


def trained(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """What a run logs and finds, and how many problems this process had to play each time."""
    own: list[int] = []
    play = tasks.play_episodes

    def noted(agent: Any, openings: Any, *how: Any) -> Any:
        own.append(len({opening.problem for opening in openings}))
        return play(agent, openings, *how)

    with open_team(CPU, store) as team, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "play_episodes", noted)
        settings = ExperimentSettings(progress=False, num_threads=1)
        trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
        written: list[dict[str, float]] = []
        trainer.tracker.log_metrics = lambda metrics, step: written.append(dict(metrics))
        trainer.train()
        return {"written": written, "before": trainer.state.before, "own": own}


def test_two_processes_play_what_one_does_each_a_part(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    alone = trained(resolved, None)
    leader, other = together(lambda store: trained(resolved, store), tmp_path)
    assert leader["before"] == alone["before"]
    assert other["written"] == []
    played = {n: v for n, v in alone["written"][0].items() if n.startswith(("rollout/", "tokens/"))}
    # What was played is the same to the last digit; what is learnt is, up to rounding.
    names = [n for n in played if not n.startswith("tokens/") or n == "tokens/generated"]
    assert len(names) > 8
    assert {n: leader["written"][0][n] for n in names} == {n: played[n] for n in names}
    assert leader["written"][0]["loss"] == pytest.approx(alone["written"][0]["loss"], abs=1e-5)
    # Of every measurement, rollout and dev evaluation.
    assert sorted(leader["own"] + other["own"]) == sorted(alone["own"])
    assert len(leader["own"]) == len(other["own"]) >= 2 * 5


def test_a_part_that_cannot_be_played_ends_the_run_in_all(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    play = tasks.play_episodes

    def fails(store: str) -> str:
        with open_team(CPU, store) as team, pytest.MonkeyPatch.context() as patch:

            def broken(*asked: Any) -> Any:
                if team.rank == 1:
                    raise NipAstraError("no voice")
                return play(*asked)

            patch.setattr(tasks, "play_episodes", broken)
            settings = ExperimentSettings(progress=False, num_threads=1)
            trainer = prepare_experiment(resolved, settings, team=team).trainer
            with pytest.raises((WorkerProcessError, LostProcessError)) as caught:
                trainer.train()
            return str(caught.value)

    leader, other = together(fails, tmp_path)
    assert "process 1 of 2 failed in its part of a rollout: no voice" in leader
    assert "the leading process has failed" in other
