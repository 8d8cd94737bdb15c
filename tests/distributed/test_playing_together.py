"""Processes that train a run together play its rollouts together, and play what one would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.distributed.team import open_team
from nip_astra.errors import LostProcessError, NipAstraError, WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import ResolvedExperiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor, trees
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
    """A training rollout, a random search and an evaluation, and what this process had to do."""
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


def test_two_processes_play_what_one_does_each_a_part(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    alone = played(resolved, None)
    leader, other = together(lambda store: played(resolved, store), tmp_path)
    assert leader["found"] == alone["found"]
    assert other["found"] is None
    assert sorted(leader["own"] + other["own"]) == sorted(alone["own"])
    assert len(other["own"]) >= 4


def test_more_processes_than_parts_play_the_same(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    alone = played(resolved, None)
    found = together(lambda store: played(resolved, store), tmp_path, count=3)
    assert found[0]["found"] == alone["found"]


def test_a_part_that_cannot_be_played_ends_the_run_in_all(
    resolved: ResolvedExperiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = TreeSampler._play

    def failing(self: TreeSampler, *asked: Any) -> Any:
        if os.environ["RANK"] == "1":
            raise NipAstraError("no voice")
        return play(self, *asked)

    def fails(store: str) -> str:
        with pytest.raises((WorkerProcessError, LostProcessError)) as caught:
            played(resolved, store)
        return str(caught.value)

    monkeypatch.setattr(trees.TreeSampler, "_play", failing)
    leader, other = together(fails, tmp_path)
    assert "process 1 of 2 failed in its part of a rollout: no voice" in leader
    assert "the leading process has failed" in other


def test_a_run_that_is_played_together_writes_the_same_first_metrics(
    resolved: ResolvedExperiment, tmp_path: Path
) -> None:
    def losses(store: str | None) -> list[dict[str, float]]:
        with open_team(CPU, store) as team:
            settings = ExperimentSettings(progress=False, num_threads=1)
            trainer: Any = prepare_experiment(resolved, settings, team=team).trainer
            written: list[dict[str, float]] = []
            trainer.tracker.log_metrics = lambda metrics, step: written.append(dict(metrics))
            trainer.train()
            return written

    alone = losses(None)
    leader, other = together(losses, tmp_path)
    assert other == []
    assert len(leader) == len(alone) == 2
    # What was played is the same to the last digit; what is learnt is, up to rounding.
    kinds = ("mean_", "failure", "target_", "tokens/generated", "tokens/attacker", "tokens/target")
    names = [name for name in alone[0] if name.startswith(kinds)]
    assert len(names) > 5
    assert {n: leader[0][n] for n in names} == {n: alone[0][n] for n in names}
    assert leader[0]["loss"] == pytest.approx(alone[0]["loss"], abs=1e-5)
