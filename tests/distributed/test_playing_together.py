"""Processes that train a run together share its rollouts, and play the same as a single process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.team import Team, open_team
from nip_astra.errors import LostProcessError, NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor, tasks
from nip_astra.samplers.trees import TreeSampler
from tests.distributed.processes import together
from tests.kit.recording import record_calls
from tests.kit.resuming import short_experiment
from tests.kit.tiny import CPU

MORE = (
    "training.num_episodes_per_experience=5",
    "ast_chat.num_rollout_parts=4",
    "ast_chat.evaluation.num_episodes=4",
)


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedExperiment:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    return short_experiment("ast_dpo", tmp_path / "scenario", *MORE, num_iterations=2)


def trainer_of(resolved: ResolvedExperiment, team: Team) -> Any:
    settings = ExperimentSettings(progress=False, num_threads=1)
    return prepare_experiment(resolved, settings, team=team).trainer


def played(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """A training rollout, a random search and an evaluation, and this process's share of them."""
    with open_team(CPU, store) as team, pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch, TreeSampler, "_play")
        trainer = trainer_of(resolved, team)
        models = {role: getattr(trainer.sampler, role).language_model for role in trainer._models}

        def work() -> Any:
            tree = trainer.rollouts.play(0)
            ordinary = trainer.sampler.with_attacker(trainer.sampler.reference)
            other = ordinary.sample(["hello"] * 6, tree_width=1, tree_depth=2, key=(1, "x"))
            report = trainer.measure("before", range(trainer.num_measure_parts()))
            counts = {role: model.token_count for role, model in models.items()}
            trees = [(list(t.rows()), t.contexts, str(t.prompts)) for t in (tree, other)]
            return trees, str(report), str(counts)

        with trainer._threads(), torch.no_grad():
            result = trainer.run_on_leader(work)
        return {"result": result, "own": [len(call.arguments[1]) for call in calls]}


@pytest.mark.parametrize(("count", "num_least"), [(2, 4), (3, 0)])
def test_several_processes_share_the_rollout_of_one(
    resolved: ResolvedExperiment, count: int, num_least: int, tmp_path: Path
) -> None:
    alone = played(resolved, None)
    leader, *others = together(lambda store: played(resolved, store), tmp_path, count=count)
    assert leader["result"] == alone["result"]
    assert {other["result"] for other in others} == {None}
    shares = [leader["own"], *(other["own"] for other in others)]
    assert sorted(size for own in shares for size in own) == sorted(alone["own"])
    assert min(map(len, shares)) >= num_least


def trained(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """A run's log and measurements, and the problems that this process played each time."""
    with open_team(CPU, store) as team, pytest.MonkeyPatch.context() as patch:
        calls = record_calls(patch, tasks, "play_episodes")
        trainer = trainer_of(resolved, team)
        logged: list[dict[str, float]] = []
        trainer.tracker.log_metrics = lambda metrics, step: logged.append(dict(metrics))
        trainer.train()
        own = [len({opening.problem for opening in call.arguments[1]}) for call in calls]
        return {"logged": logged, "before": trainer.state.before, "own": own}


def test_a_run_on_a_task_that_is_played_together_logs_the_same_first_metrics(
    tmp_path: Path,
) -> None:
    overrides = (
        *("training.num_iterations=2", "training.eval_period=2"),
        *("training.num_episodes_per_experience=5", "task.num_rollout_parts=4"),
        *("task.evaluation.num_problems=6", "task.evaluation.num_dev_problems=4"),
    )
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="guess_number", overrides=overrides
    )
    alone = trained(resolved, None)
    leader, other = together(lambda store: trained(resolved, store), tmp_path)
    assert leader["before"] == alone["before"]
    assert other["logged"] == []
    # The rollouts are equal to the last digit; the training is, up to rounding.
    mine, theirs = (result["logged"][0] for result in (leader, alone))
    names = [name for name in theirs if name.startswith(("tokens/generated", "rollout/"))]
    assert len(names) > 5
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    # Of every measurement, rollout and dev evaluation.
    assert sorted(leader["own"] + other["own"]) == sorted(alone["own"])
    assert len(leader["own"]) == len(other["own"]) >= 2 * 5


def test_a_part_that_cannot_be_played_ends_the_run_in_all(
    resolved: ResolvedExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = TreeSampler._play

    def failing(*given: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise NipAstraError("no voice")
        return play(*given)

    def message_of(store: str) -> str:
        with (
            open_team(CPU, store) as team,
            pytest.raises((WorkerProcessError, LostProcessError)) as caught,
        ):
            trainer_of(resolved, team).train()
        return str(caught.value)

    monkeypatch.setattr(TreeSampler, "_play", failing)
    leader, other = together(message_of, tmp_path)
    assert "process 1 of 2 failed in its part of a rollout: no voice" in leader
    assert "the leading process has failed" in other
