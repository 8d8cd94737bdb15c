"""Processes that train a run together share its rollouts, and play the same as a single process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.team import open_team
from nip_astra.errors import LostProcessError, NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor, tasks
from nip_astra.samplers.trees import TreeSampler
from tests.distributed.processes import together
from tests.kit.resuming import short_experiment

CPU = torch.device("cpu")
MORE = (
    "training.num_episodes_per_experience=5",
    "ast_chat.num_rollout_parts=4",
    "ast_chat.evaluation.num_episodes=4",
)


@pytest.fixture
def resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResolvedExperiment:
    monkeypatch.setattr(executor, "SMALLEST_PART", 2)
    return short_experiment("ast_dpo", tmp_path / "scenario", *MORE, num_iterations=2)


def played(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """A training rollout, a random search and an evaluation, and this process's share of them."""
    own: list[int] = []
    play = TreeSampler._play

    def noted(self: TreeSampler, prompts: Any, plan: Any, first: int) -> Any:
        own.append(len(prompts))
        return play(self, prompts, plan, first)

    with open_team(CPU, store) as team, pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeSampler, "_play", noted)
        settings = ExperimentSettings(progress=False, num_threads=1)
        trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
        models = {role: getattr(trainer.sampler, role).language_model for role in trainer._models}

        def work() -> Any:
            tree = trainer.rollouts.play(0)
            ordinary = trainer.sampler.with_attacker(trainer.sampler.reference)
            other = ordinary.sample(["hello"] * 6, tree_width=1, tree_depth=2, key=(1, "x"))
            report = trainer.measure("before", range(trainer.num_measure_parts()))
            counts = {role: model.token_count for role, model in models.items()}
            return [(list(t.rows()), t.contexts, str(t.prompts)) for t in (tree, other)], (
                *(str(report), str(counts)),
            )

        with trainer._threads(), torch.no_grad():
            found = trainer.run_on_leader(work)
    return {"found": found, "own": own}


@pytest.mark.parametrize("count", [2, 3])
def test_several_processes_share_the_rollout_of_one(
    resolved: ResolvedExperiment, count: int, tmp_path: Path
) -> None:
    alone = played(resolved, None)
    leader, *others = together(lambda store: played(resolved, store), tmp_path, count=count)
    assert leader["found"] == alone["found"]
    assert {other["found"] for other in others} == {None}
    owns = [leader["own"], *(other["own"] for other in others)]
    assert sorted(one for own in owns for one in own) == sorted(alone["own"])
    if count == 2:
        assert min(map(len, owns)) >= 4


def task_run() -> ResolvedExperiment:
    return resolve_experiment(
        trainer="self_hosted_grpo",
        scenario="guess_number",
        overrides=[
            *("training.num_iterations=2", "training.eval_period=2"),
            *("training.num_episodes_per_experience=5", "task.num_rollout_parts=4"),
            *("task.evaluation.num_problems=6", "task.evaluation.num_dev_problems=4"),
        ],
    )


def trained(resolved: ResolvedExperiment, store: str | None) -> dict[str, Any]:
    """A run's log and measurements, and the problems that this process played each time."""
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


OF_TREES = ("mean_", "failure", "target_", "tokens/attacker", "tokens/target")


@pytest.mark.parametrize("is_task", [False, True], ids=["trees", "task"])
def test_a_run_that_is_played_together_writes_the_same_first_metrics(
    resolved: ResolvedExperiment, is_task: bool, tmp_path: Path
) -> None:
    resolved = task_run() if is_task else resolved
    alone = trained(resolved, None)
    leader, other = together(lambda store: trained(resolved, store), tmp_path)
    assert leader["before"] == alone["before"]
    assert other["written"] == []
    # The rollouts are equal to the last digit; the training is, up to rounding.
    mine, theirs = (one["written"][0] for one in (leader, alone))
    kinds = ("tokens/generated", *(("rollout/",) if is_task else OF_TREES))
    names = [name for name in theirs if name.startswith(kinds)]
    assert len(names) > 5
    assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    # Of every measurement, rollout and dev evaluation.
    assert sorted(leader["own"] + other["own"]) == sorted(alone["own"])
    assert len(leader["own"]) == len(other["own"]) >= 2 * 5 * is_task


@pytest.mark.parametrize("is_task", [False, True], ids=["trees", "task"])
def test_a_part_that_cannot_be_played_ends_the_run_in_all(
    resolved: ResolvedExperiment, is_task: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = (tasks, "play_episodes") if is_task else (TreeSampler, "_play")
    play = getattr(owner, name)

    def failing(*asked: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise NipAstraError("no voice")
        return play(*asked)

    def fails(store: str) -> str:
        with open_team(CPU, store) as team:
            settings = ExperimentSettings(progress=False, num_threads=1)
            chosen = task_run() if is_task else resolved
            trainer = prepare_experiment(chosen, settings, team=team).trainer
            with pytest.raises((WorkerProcessError, LostProcessError)) as caught:
                trainer.train()
        return str(caught.value)

    monkeypatch.setattr(owner, name, failing)
    leader, other = together(fails, tmp_path)
    assert "process 1 of 2 failed in its part of a rollout: no voice" in leader
    assert "the leading process has failed" in other
