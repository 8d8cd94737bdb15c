"""Trainers on trajectories play on actors and in parts, but never divide a service's rollouts."""

from __future__ import annotations

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.run import prepare_experiment, run_experiment
from nip_astra.trainers.service.base import informative_groups
from nip_astra.trainers.service.self_hosted import SelfHostedGrpoTrainer, SelfHostedOpdTrainer
from nip_astra.utils.actors import ActorOptions, Actors, get_actors, using_actors
from tests.kit import actors_here
from tests.kit.messages import says

SMALL = (
    "training.num_iterations=2",
    "training.eval_period=1",
    "training.num_episodes_per_experience=4",
    "task.num_rollout_parts=4",
    "task.evaluation.num_problems=6",
    "task.evaluation.num_dev_problems=5",
)
HTTP = "{backend: http, base_url: 'http://127.0.0.1:1'}"


def written(folder: Path, num_actors: int, *more: str) -> Any:
    """A run's output that must not depend on its numbers of processes."""
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="guess_number", overrides=[*SMALL, *more]
    )
    settings = {"num_actors": num_actors, "progress": False}
    settings |= {"actor_cpus": 0.25} if num_actors else {}
    run = run_experiment(resolved, runs_dir=str(folder), run_id=f"by-{num_actors}", **settings)
    path = run.run_directory.path
    files = [path / "metrics.jsonl", *sorted(path.glob("rollouts/*.jsonl"))]
    return [file.read_bytes() for file in files], run.results["before"], run.results["after"]


def test_a_run_on_actors_writes_the_same_as_a_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of learning, and with replacements for problems that carry no information."""
    made = actors_here.install(monkeypatch)
    more = ("self_hosted_grpo.max_staleness=1", "self_hosted_grpo.max_resampling_rounds=1")
    alone = written(tmp_path, 0, *more)
    assert not made
    assert written(tmp_path, 2, *more) == alone
    # Two iterations, two dev evaluations, and two measurements.
    assert made[0].turn >= 6 * 4


@pytest.mark.slow
def test_runs_on_any_number_of_actors_of_ray_write_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    found = {count: written(tmp_path, count) for count in (0, 1, 2, 4)}
    assert all(one == found[0] for one in found.values())


@pytest.mark.slow
def test_an_actor_that_is_killed_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="guess_number", overrides=SMALL
    )
    trainer: Any = prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer
    marker = tmp_path / "killed"
    with torch.no_grad():
        expected = trainer._play_iteration(0)
        with using_actors(ActorOptions(2, num_cpus=0.5)):
            actors = get_actors()
            assert isinstance(actors, Actors)
            trainer.task.environment = partial(_deadly, trainer.task.environment, marker)
            found = trainer._play_iteration(0)
    assert marker.exists()
    assert found.metrics == expected.metrics
    assert found.records == expected.records
    for one, other in zip(found.trajectories, expected.trajectories, strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert one.reward == other.reward


class _Deadly:
    """An environment that ends its process at the first step, once."""

    def __init__(self, inner: Any, marker: Path) -> None:
        self.inner, self.marker = inner, marker
        self.solution, self.columns = inner.solution, inner.columns

    def reset(self) -> Any:
        return self.inner.reset()

    def step(self, message: str) -> Any:
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner.step(message)


def _deadly(environment: Any, marker: Path, split: str, index: int) -> _Deadly:
    return _Deadly(environment(split, index), marker)


def refusal(trainer: str, *overrides: str, **settings: Any) -> str:
    resolved = resolve_experiment(trainer=trainer, overrides=[*SMALL[:3], *overrides])
    with pytest.raises(ConfigurationError) as caught:
        prepare_experiment(resolved, ExperimentSettings(progress=False, **settings))
    return str(caught.value)


@pytest.mark.parametrize("trainer", ["remote_api_grpo", "self_hosted_grpo"])
def test_rollouts_of_a_service_are_not_divided(trainer: str) -> None:
    service = f"{trainer}.train_service={HTTP}"
    asked = refusal(trainer, service, "task.num_rollout_parts=2")
    assert says(asked, "num_rollout_parts is 2", "the service 'http'", "to 1")
    asked = refusal(trainer, service, num_actors=3)
    assert says(asked, "num_actors is 3", "the service 'http'", "to 0")


def test_actors_beyond_the_parts_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", overrides=[*SMALL[:3], "task.num_rollout_parts=3"]
    )
    for num_actors, is_told in ((3, False), (4, True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare_experiment(resolved, progress=False, num_actors=num_actors)
        assert ("1 of 4 actors have nothing to play" in caplog.text) is is_told


@pytest.mark.parametrize(
    ("needs_spread", "expected"),
    [(True, {"mixed", "partly"}), (False, {"mixed", "partly", "equal", "lone"})],
)
def test_groups_are_informative_by_their_spread_and_only_with_rewards(
    needs_spread: bool, expected: set[str]
) -> None:
    rewards = {
        "nothing": [None, None],
        "equal": [1.0, 1.0],
        "mixed": [1.0, 0.0],
        "partly": [1.0, None, 0.5],
        "lone": [1.0, None],
    }
    trajectories = [
        Trajectory([1, 2], [0, 1], reward=reward, group_id=group, run_id=run)
        for group, given in rewards.items()
        for run, reward in enumerate(given)
    ]
    informative, others = informative_groups(trajectories, needs_spread=needs_spread)
    assert {one.group_id for one in informative} == expected
    assert {one.group_id for one in others} == set(rewards) - expected
    assert len(informative) + len(others) == len(trajectories)


def test_problems_are_replaced_only_where_equal_rewards_teach_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def num_played(*overrides: str) -> float:
        resolved = resolve_experiment(
            trainer="self_hosted_grpo",
            overrides=[
                *SMALL[:3],
                "self_hosted_grpo.group_size=1",
                "self_hosted_grpo.max_resampling_rounds=2",
                *overrides,
            ],
        )
        trainer: Any = prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer
        with torch.no_grad():
            return float(trainer._play_iteration(0).metrics["rollout/played_problems"])

    assert num_played() == 4 * 3
    assert num_played("self_hosted_grpo.baseline=none", "self_hosted_grpo.scale=none") == 4
    # A trainer that does not learn from rewards.
    monkeypatch.setattr(
        SelfHostedGrpoTrainer, "learns_from_rewards", SelfHostedOpdTrainer.learns_from_rewards
    )
    assert num_played() == 4
