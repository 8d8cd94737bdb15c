"""Trainers on trajectories play on actors and in parts, but never divide a service's rollouts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.run_results import read_results
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.run import prepare_experiment
from nip_astra.trainers.service.base import informative_groups
from nip_astra.trainers.service.self_hosted import SelfHostedGrpoTrainer, SelfHostedOpdTrainer
from tests.kit import actors_here
from tests.kit.experiments import run_in
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


def prepare(*overrides: str, trainer: str = "self_hosted_grpo", **settings: Any) -> Any:
    resolved = resolve_experiment(trainer=trainer, overrides=[*SMALL[:3], *overrides])
    return prepare_experiment(resolved, progress=False, **settings).trainer


def written(folder: Path, num_actors: int, *more: str) -> Any:
    """A run's output that must not depend on its numbers of processes."""
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="guess_number", overrides=[*SMALL, *more]
    )
    settings = {"actor_cpus": 0.25} if num_actors else {}
    run = run_in(folder, resolved, f"by-{num_actors}", num_actors=num_actors, **settings)
    results = read_results(run).results
    files = [run / "metrics.jsonl", *sorted(run.glob("rollouts/*.jsonl"))]
    return [file.read_bytes() for file in files], results["before"], results["after"]


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


@pytest.mark.parametrize(
    ("trainer", "overrides", "settings", "fact"),
    [
        ("remote_api_grpo", ["task.num_rollout_parts=2"], {}, "num_rollout_parts is 2"),
        ("self_hosted_grpo", [], {"num_actors": 3}, "num_actors is 3"),
    ],
)
def test_rollouts_of_a_service_are_not_divided(
    trainer: str, overrides: list[str], settings: dict[str, int], fact: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        prepare(f"{trainer}.train_service={HTTP}", *overrides, trainer=trainer, **settings)
    assert says(caught.value, "'http'", fact)


@pytest.mark.parametrize(("num_actors", "is_reported"), [(3, False), (4, True)])
def test_actors_beyond_the_parts_are_reported(
    num_actors: int, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        prepare("task.num_rollout_parts=3", num_actors=num_actors)
    assert ("1 of 4 actors have nothing to play" in caplog.text) is is_reported


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
        options = ("group_size=1", "use_run_ids=false", "max_resampling_rounds=2", *overrides)
        trainer = prepare(*(f"self_hosted_grpo.{option}" for option in options))
        with torch.no_grad():
            return float(trainer._play_iteration(0).metrics["rollout/num_problems_sampled"])

    assert num_played() == 4 * 3
    assert num_played("baseline=none", "scale=none") == 4
    # A trainer that does not learn from rewards.
    monkeypatch.setattr(
        SelfHostedGrpoTrainer, "learns_from_rewards", SelfHostedOpdTrainer.learns_from_rewards
    )
    assert num_played() == 4


def test_an_epoch_with_resampling_draws_every_problem_once(tmp_path: Path) -> None:
    drawn: list[int] = []
    options = ("group_size=2", "max_resampling_rounds=2")

    def trainer_with_resampling() -> Any:
        trainer = prepare(*(f"self_hosted_grpo.{option}" for option in options))
        play = trainer._play

        def record(split: str, problems: Any, *given: Any, **more: Any) -> Any:
            drawn.extend(problems)
            return play(split, problems, *given, **more)

        trainer._play = record
        return trainer

    trainer = trainer_with_resampling()
    with torch.no_grad():
        for iteration in range(2):
            trainer._play_iteration(iteration)
        state = {name: part.save() for name, part in trainer.kept_parts().items()}
        # A resumed run goes on with the next problem.
        resumed = trainer_with_resampling()
        for name, part in resumed.kept_parts().items():
            part.load(state[name])
        resumed._play_iteration(2)
    assert len(drawn) > 3 * 4
    assert drawn == [trainer.problem(number) for number in range(len(drawn))]
