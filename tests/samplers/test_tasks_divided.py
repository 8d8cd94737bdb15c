"""Rollouts of tasks are cut by the experiment alone, whoever plays their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import WorkerProcessError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.tree_engine.sessions import CachedSession
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.samplers import executor, tasks
from nip_astra.samplers.tasks import TaskPlan, TaskRollout, play_task, requested_part
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.tasks.base import Episode, GeneratedTask, Reaction, Task
from nip_astra.scenario_base.tasks.library import GuessNumberEnvironment
from nip_astra.scorers.base import Message
from nip_astra.utils.actors import ActorOptions, using_actors
from nip_astra.utils.forked import can_fork, using_processes
from tests.kit import actors_here

PLAN = TaskPlan("train", num_runs=2, max_turns=4, key=(0, "parts"))
PROBLEMS = [4, 0, 7, 2, 9]
CPU = torch.device("cpu")
needs_forks = pytest.mark.skipif(not can_fork(), reason="needs Linux without a GPU")


class Unrated(GuessNumberEnvironment):
    """Leaves its verdict to the task."""

    def step(self, message: str) -> Reaction:
        return super().step(message)._replace(reward=None)


class RatedGuessing(GeneratedTask):
    """Rates by what its environments remember."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, seed=0, device=CPU, scenario_dir=None)
        self.asked: list[int] = []

    def draw(self, generator: torch.Generator) -> GuessNumberEnvironment:
        one = GuessNumberEnvironment.draw(self.parameters, generator)
        return Unrated(one.hidden, one.start, one.most, one.max_turns)

    def rate(self, episodes: Sequence[Episode]) -> None:
        self.asked.append(len(episodes))
        for one in episodes:
            assert isinstance(one.environment, Unrated)
            one.reward = one.environment.num_turns + one.environment.hidden / 100


@pytest.fixture
def trainer() -> Any:
    overrides = ["training.num_episodes_per_experience=4", "training.num_iterations=1"]
    resolved = resolve_experiment(
        trainer="self_hosted_grpo", scenario="guess_number", overrides=overrides
    )
    return prepare_experiment(resolved, ExperimentSettings(progress=False)).trainer


@pytest.fixture
def agent(trainer: Any) -> ConversationAgent:
    found: ConversationAgent = trainer.agent
    return found


@pytest.fixture(params=["reward", "rated"])
def task(trainer: Any, request: pytest.FixtureRequest) -> Task:
    """One whose environments reward, and one that rates by their state."""
    own: Task = trainer.task
    return own if request.param == "reward" else RatedGuessing(own.parameters)


def told(rollout: TaskRollout) -> tuple[list[Any], list[Any]]:
    rows = [
        {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in one.to_plain().items()}
        for one in rollout.trajectories
    ]
    said = [(one.messages, one.reward, vars(one.environment)) for one in rollout.episodes]
    return rows, said


@needs_forks
@pytest.mark.parametrize(("num_processes", "num_forked"), [(2, 1), (9, 2)])
def test_any_number_of_forked_processes_plays_the_same(
    agent: ConversationAgent,
    task: Task,
    num_processes: int,
    num_forked: int,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.0)
    model = agent.language_model
    with model.counting() as alone:
        expected = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    assert not forked
    with using_processes(num_processes), model.counting() as spent:
        found = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    assert found == expected
    assert spent == alone
    assert len(forked) == num_forked
    assert len({len(messages) for messages, *_ in found[1]}) > 1, "episodes of several lengths"


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_any_number_of_actors_plays_the_same(
    agent: ConversationAgent, task: Task, num_actors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = actors_here.install(monkeypatch)
    model = agent.language_model
    with model.counting() as alone:
        expected = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=4))
    with using_actors(ActorOptions(num_actors)), model.counting() as spent:
        found = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=4))
        assert made[0].turn == 4
    assert found == expected
    assert spent == alone


def test_the_task_rates_once_and_stays_in_this_process(
    trainer: Any, agent: ConversationAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it rates with may be a connection, which cannot be sent."""
    actors_here.install(monkeypatch)
    task: Any = RatedGuessing(trainer.task.parameters)
    task.connection = (number for number in range(3))
    with using_actors(ActorOptions(2)):
        rollout = play_task(agent, task, PROBLEMS, PLAN, num_parts=4)
    assert task.asked == [len(PROBLEMS) * PLAN.num_runs]
    assert all(one.reward is not None and one.reward > 1 for one in rollout.trajectories)


def test_one_part_is_what_is_played_without_any(
    agent: ConversationAgent, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    generate = CachedSession.generate

    def noted(self: Any, contexts: Any, *more: Any, **options: Any) -> Any:
        sizes.append(len(contexts))
        return generate(self, contexts, *more, **options)

    monkeypatch.setattr(CachedSession, "generate", noted)
    one = told(play_task(agent, task, PROBLEMS, PLAN))
    assert sizes[0] == len(PROBLEMS)
    by_service = play_task(
        agent, task, PROBLEMS, PLAN, num_parts=3, sample=agent.token_sampler.generate
    )
    assert told(by_service)[1] == one[1], "what a service draws is not cut"
    sizes.clear()
    play_task(agent, task, PROBLEMS, PLAN, num_parts=64)
    assert sizes.count(1) >= len(PROBLEMS), "a problem is never cut"


@needs_forks
@pytest.mark.parametrize(("seconds", "is_forked"), [(0.02, True), (0.01, False)])
def test_parts_that_take_no_time_are_not_worth_a_process(
    agent: ConversationAgent,
    trainer: Any,
    seconds: float,
    is_forked: bool,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smaller of two has two problems, of two runs each."""
    known = tasks._seconds_of_episode
    monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.05)
    with using_processes(2):
        play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2)
        assert known[agent.language_model] == 0.0, "the first is slower than others"
        play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2)
        assert 0 < known[agent.language_model] < 0.05
        forked.clear()
        known[agent.language_model] = seconds
        play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2)
    assert bool(forked) is is_forked


@needs_forks
def test_a_large_model_is_cut_alike_and_not_forked(
    agent: ConversationAgent, trainer: Any, forked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.0)
    monkeypatch.setattr(executor, "SMALL_MODEL_PARAMETERS", 10)
    made = actors_here.install(monkeypatch)
    with using_processes(2):
        alone = told(play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2))
    assert not forked
    with using_actors(ActorOptions(2)):
        assert told(play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2)) == alone
        assert made[0].turn == 2


class Holding(GuessNumberEnvironment):
    """Holds a generator, from the first or once it is played."""

    is_late = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.held = None if self.is_late else (number for number in range(3))

    def reset(self) -> Sequence[Message]:
        self.held = (number for number in range(3))
        return super().reset()


class HoldingLater(Holding):
    is_late = True


@needs_forks
@pytest.mark.parametrize("kind", [Holding, HoldingLater])
def test_environments_that_cannot_be_sent_are_played_here(
    agent: ConversationAgent,
    trainer: Any,
    kind: type[Holding],
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def said(task: Task) -> list[Any]:
        rollout = play_task(agent, task, PROBLEMS, PLAN, num_parts=2)
        return [(one.messages, one.reward) for one in rollout.episodes]

    expected = said(trainer.task)
    task = RatedGuessing(trainer.task.parameters)

    def draw(generator: torch.Generator) -> GuessNumberEnvironment:
        one = GuessNumberEnvironment.draw(task.parameters, generator)
        return kind(one.hidden, one.start, one.most, one.max_turns)

    monkeypatch.setattr(task, "draw", draw)
    with using_processes(2):
        assert said(task) == expected
        monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.0)
        play_task(agent, task, PROBLEMS, PLAN)
        assert not caplog.records, "what is not cut is not sent"
        assert said(task) == said(task) == expected
        assert not forked
        assert caplog.text.count("cannot be pickled") == 1
        assert f" {kind.__name__} " in caplog.text
        said(trainer.task)
        assert forked


class Team:
    """Two processes of which this is both: what is told goes through a message."""

    size = 2
    can_request = True

    def __init__(self, agent: ConversationAgent, task: Task) -> None:
        self.agent, self.task = agent, task
        self.num_parts: list[int] = []

    def request(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        assert name == executor.RUN_PARTS
        self.num_parts = [len(requests) for requests in arguments]
        call_of = partial(requested_part, self.agent, self.task)
        told = [executor.run_requested(call_of, requests) for requests in arguments]
        return [told[0], *(unpack_state(pack_state(one)) for one in told[1:])]


def test_processes_of_a_run_play_the_same(agent: ConversationAgent, task: Task) -> None:
    expected = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    team: Any = Team(replace(agent), task)
    rows, said = told(play_task(agent, task, PROBLEMS, PLAN, num_parts=3, team=team))
    assert team.num_parts == [1, 2]
    assert rows == expected[0]
    if isinstance(task, RatedGuessing):
        assert said == expected[1], "environments are where they were, for they are asked"
    assert [one[:2] for one in said] == [one[:2] for one in expected[1]]


def test_an_environment_that_reacts_otherwise_the_second_time_is_refused(
    agent: ConversationAgent, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = RatedGuessing(trainer.task.parameters)
    team: Any = Team(replace(agent), task)
    numbers = iter(range(1000))

    def moody(self: Any) -> Any:
        return [message._replace(text=f"guess {next(numbers)}") for message in reset(self)]

    reset = Unrated.reset
    monkeypatch.setattr(Unrated, "reset", moody)
    with pytest.raises(WorkerProcessError, match="RatedGuessing"):
        play_task(agent, task, PROBLEMS, PLAN, num_parts=3, team=team)
