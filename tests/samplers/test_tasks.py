"""Episodes become trajectories of the policy's output, with all else masked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import ModelAbilityError, TaskError, WorkerProcessError
from nip_astra.language_models.base import Generation, SamplingOptions, pad_right
from nip_astra.language_models.message_format import MessageFormat, ThoughtMarkers
from nip_astra.language_models.tree_engine.sessions import CachedSession
from nip_astra.rollouts.messages import ToolCall
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.samplers import executor, tasks
from nip_astra.samplers.tasks import (
    PlayedEpisode,
    TaskPlan,
    TaskRollout,
    play_task,
    requested_part,
)
from nip_astra.scenario_base.agents import ConversationAgent
from nip_astra.scenario_base.conversation.tokens import ChatFormat
from nip_astra.scenario_base.tasks.base import Environment, Episode, GeneratedTask, Reaction, Task
from nip_astra.scenario_base.tasks.library import ArithmeticEnvironment, GuessNumberEnvironment
from nip_astra.scorers.base import Message
from nip_astra.utils.actors import ActorOptions, using_actors
from nip_astra.utils.forked import can_fork, using_processes
from tests.kit import actors_here
from tests.kit.experiments import task_trainer
from tests.kit.messages import says
from tests.kit.recording import record_calls
from tests.kit.tiny import load_backend, make_language_model, make_tokenizer

TOKENIZER = make_tokenizer(["guess", "to", "higher", "lower", "number?", *map(str, range(1, 17))])
END = TOKENIZER.eos_token_id
CPU = torch.device("cpu")


def guessing(index: int = 0) -> Environment:
    return GuessNumberEnvironment(7, 1, 16, 3)


def given(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


class Made(Task):
    """Environments by the number of the problem, and a reward of those that give none."""

    def __init__(self, make: Callable[[int], Any], reward: Any = None) -> None:
        super().__init__(None, seed=0, device=CPU, scenario_dir=None)
        self.make, self.reward = make, reward

    def environment(self, split: object, index: int) -> Any:
        return given(self.make(index))

    def rate(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            episode.reward = given(self.reward)


OPENING = guessing().reset()
MORE = Reaction(OPENING, is_over=False)


class Answering(Environment):
    """Returns its values, or raises them."""

    def __init__(self, opening: Any = OPENING, reaction: Any = MORE) -> None:
        self.opening, self.reaction = opening, reaction

    def reset(self) -> Any:
        return given(self.opening)

    def step(self, message: str) -> Any:
        return given(self.reaction)


class Scripted:
    """Generates scripted turns, each row its own list; `!` leaves out the end of a turn."""

    def __init__(self, *rows: list[str]) -> None:
        self.rows = [list(row) for row in rows]
        self.contexts: list[list[list[int]]] = []

    def __call__(
        self,
        contexts: Sequence[Sequence[int]],
        rows_per_context: int,
        uniforms_BT: Tensor,
        options: SamplingOptions,
    ) -> Generation:
        self.contexts.append([list(context) for context in contexts])
        assert len(uniforms_BT) == len(contexts) * rows_per_context
        texts = [row.pop(0) for row in self.rows if row][: len(uniforms_BT)]
        words = [TOKENIZER.encode(text.rstrip("!"), add_special_tokens=False) for text in texts]
        rows = [[*row, *[END] * (text[-1] != "!")] for row, text in zip(words, texts, strict=True)]
        ids, mask = pad_right(rows, CPU)
        return Generation(ids, mask, torch.where(mask, -0.5, 0.0))


def agent_of_scripts(window: int = 64) -> ConversationAgent:
    known = {"tokenizer": TOKENIZER, "context_window": window, "end_ids": (END,), "generate": None}
    model: Any = SimpleNamespace(**known)
    return ConversationAgent("policy", model, ChatFormat(TOKENIZER), SamplingOptions(3))


def play(
    script: Scripted,
    make: Callable[[int], Any] = guessing,
    reward: Any = None,
    *,
    window: int = 64,
    num_runs: int = 1,
) -> TaskRollout:
    plan = TaskPlan("train", num_runs=num_runs, max_turns=3, key=(0,))
    return play_task(agent_of_scripts(window), Made(make, reward), [3], plan, sample=script)


def play_one(environment: Any, reward: Any = None) -> TaskRollout:
    return play(Scripted(["3"]), lambda _: environment, reward)


def own_tokens(trajectory: Trajectory) -> list[str]:
    """The policy's own tokens, which are learnt."""
    return TOKENIZER.convert_ids_to_tokens(trajectory.tokens[trajectory.loss_mask])


def test_turns_of_the_environment_are_masked_and_those_of_the_policy_are_not() -> None:
    script = Scripted(["3", "7"], ["7"])
    first, second = play(script, num_runs=2).trajectories
    assert "".join(TOKENIZER.convert_ids_to_tokens(first.tokens)) == (
        "<bos><user>guess1to16<end><assistant>3<end><user>higher<end><assistant>7<end>"
    )
    assert own_tokens(first) == ["3", "<end>", "7", "<end>"]
    assert torch.equal(first.logprobs != 0, first.loss_mask)
    assert (first.reward, second.reward) == (1 - 1 / 6, 1.0)
    assert first.num_turns == 2
    # Runs are numbered within their problem, as in NexRL.
    assert (first.group_id, first.run_id) == ("train-3", 0)
    assert (second.group_id, second.run_id) == ("train-3", 1)
    # The opening is read once for all runs of a problem.
    assert [len(contexts) for contexts in script.contexts] == [1, 1]


def test_a_turn_without_room_to_end_is_marked_and_its_end_is_not_learnt() -> None:
    (trajectory,) = play(Scripted(["3!", "7"])).trajectories
    assert own_tokens(trajectory) == ["3", "7", "<end>"]
    assert trajectory.is_cut == 1


def test_an_episode_that_does_not_end_has_no_reward_to_show() -> None:
    rollout = play(Scripted(["1", "1", "1"]), lambda _: Answering())
    assert rollout.trajectories[0].reward == 0.0


def test_an_answer_that_exceeds_the_window_ends_its_episode_alone() -> None:
    long = Reaction([Message("user", " ".join(["16"] * 16))], is_over=False)
    environments = iter([Answering(reaction=long), guessing()])
    rollout = play(Scripted(["1"], ["3", "7"]), lambda _: next(environments), window=20, num_runs=2)
    cut, whole = rollout.trajectories
    assert (cut.num_turns, cut.is_cut, cut.reward) == (1, 1, 0.0)
    assert (whole.num_turns, whole.is_cut, whole.reward) == (2, 0, 1 - 1 / 6)


def test_a_context_that_lost_turns_begins_a_trajectory_of_the_same_run() -> None:
    rollout = play(Scripted(["1", "2", "3"]), window=20)
    assert len(rollout.trajectories) > 1
    assert {part.run_id for part in rollout.trajectories} == {0}
    assert sum(part.num_response_tokens for part in rollout.trajectories) == 6


def test_log_probabilities_are_those_that_the_session_settles_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_language_model(tmp_path, tokenizer=TOKENIZER)
    speaker = replace(agent_of_scripts(), language_model=load_backend(folder))
    task = Made(lambda _: Answering())
    plan = TaskPlan("train", num_runs=2, max_turns=3, key=(0,))
    before = play_task(speaker, task, [3, 4], plan).trajectories

    def settle(session: Any, generations: Sequence[Generation]) -> list[Generation]:
        assert len(generations) == 3
        return [replace(item, logprobs_BT=item.logprobs_BT - 1) for item in generations]

    monkeypatch.setattr(CachedSession, "settle", settle)
    after = play_task(speaker, task, [3, 4], plan).trajectories
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new.tokens, old.tokens)
        assert torch.allclose(new.logprobs, old.logprobs - old.loss_mask.float(), atol=1e-6)


@pytest.mark.parametrize(("allows_it", "num_made"), [(True, 2), (False, 6)])
def test_runs_share_an_environment_only_of_a_class_that_allows_it(
    allows_it: bool, num_made: int
) -> None:
    made: list[Environment] = []
    opened: list[Environment] = []

    class Sum(ArithmeticEnvironment):
        is_stateless = allows_it

        def reset(self) -> Sequence[Message]:
            opened.append(self)
            return super().reset()

    def make(index: int) -> Environment:
        made.append(Sum(f"{index}+1", index + 1))
        return made[-1]

    plan = TaskPlan("train", num_runs=3, max_turns=1, key=(0,))
    script = Scripted(*[["1"]] * 6)
    rollout = play_task(agent_of_scripts(), Made(make), [0, 1], plan, sample=script)
    assert [item.reward for item in rollout.trajectories] == [1.0] * 3 + [0.0] * 3
    assert len(script.contexts[0]) == 2
    assert len(made) == len(opened) == num_made


def with_attributes(**attributes: Any) -> Answering:
    environment = Answering(reaction=Reaction(reward=1.0))
    vars(environment).update(attributes)
    return environment


@pytest.mark.parametrize(
    ("environment", "hook", "value"),
    [
        (Answering("guess"), "reset of Answering", "guess"),
        (Answering(["guess"]), "reset of Answering", "guess"),
        (Answering([]), "reset of Answering", "at least one message"),
        (Answering([Message("user", 3)]), "reset of Answering", "3"),
        (Answering([Message("robot", "x")]), "reset of Answering", "robot"),
        (Answering(OSError("no file")), "reset of Answering", "OSError: no file"),
        (Answering(reaction=None), "step of Answering", "None"),
        (Answering(reaction=((), 1.0, True)), "step of Answering", "1.0"),
        (Answering(reaction=Reaction("more", is_over=False)), "step of Answering", "more"),
        (Answering(reaction=Reaction(is_over="no")), "step of Answering", "no"),
        (Answering(reaction=Reaction(reward=float("nan"))), "step of Answering", "nan"),
        (Answering(reaction=Reaction(reward="1")), "step of Answering", "1"),
        (Answering(reaction=Reaction(reward=torch.ones(2))), "step of Answering", "tensor"),
        (Answering(reaction=OverflowError("!")), "step of Answering", "OverflowError"),
        (with_attributes(columns={"n": 1}), "columns of Answering", "{'n': 1}"),
        (with_attributes(columns=("n", 1)), "columns of Answering", "('n', 1)"),
        (with_attributes(figures={"n": "many"}), "figures of Answering", "many"),
        (None, "environment of Made", "None"),
        (KeyError("train"), "environment of Made", "KeyError"),
    ],
)
def test_an_environment_that_gives_something_else_is_named(
    environment: Any, hook: str, value: str
) -> None:
    with pytest.raises(TaskError) as caught:
        play_one(environment)
    assert says(caught.value, hook, value)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "good", ValueError("no judge")])
def test_a_task_that_rates_with_something_else_is_named(rate: Any) -> None:
    with pytest.raises(TaskError, match="rate of Made"):
        play_one(Answering(reaction=Reaction(reward=None)), rate)


def test_rewards_are_plain_numbers_or_missing() -> None:
    for reward, expected in ((1, 1.0), (True, 1.0), (torch.tensor(0.5), 0.5)):
        (episode,) = play_one(Answering(reaction=Reaction(reward=reward))).episodes
        assert (episode.reward, type(episode.reward)) == (expected, float)
    (episode,) = play_one(Answering(reaction=Reaction(reward=None))).episodes
    assert episode.reward is None


# ---- rollouts in parts, by any number of processes

PLAN = TaskPlan("train", num_runs=2, max_turns=4, key=(0, "parts"))
PROBLEMS = [4, 0, 7, 2, 9]
needs_forks = pytest.mark.skipif(not can_fork(), reason="needs Linux without a GPU")


class Unrated(GuessNumberEnvironment):
    num_open = num_resets = 0

    @property
    def figures(self) -> dict[str, int]:  # type: ignore[override]
        return {"turns": self.num_turns}

    def reset(self) -> Sequence[Message]:
        Unrated.num_resets += 1
        Unrated.num_open += 1
        return super().reset()

    def step(self, message: str) -> Reaction:
        return super().step(message)._replace(reward=None)

    def close(self) -> None:
        Unrated.num_open -= 1


class RatedGuessing(GeneratedTask):
    """Draws environments of a kind, and rates by their state."""

    kind: type[GuessNumberEnvironment] = Unrated

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, seed=0, device=CPU, scenario_dir=None)
        self.num_rated: list[int] = []
        # Cannot be pickled: the task stays in this process.
        self.connection = (number for number in range(3))

    def draw(self, generator: torch.Generator) -> GuessNumberEnvironment:
        drawn = GuessNumberEnvironment.draw(self.parameters, generator)
        return self.kind(drawn.hidden, drawn.start, drawn.range_size, drawn.max_turns)

    def rate(self, episodes: Sequence[Episode]) -> None:
        self.num_rated.append(len(episodes))
        for episode in episodes:
            environment: Any = episode.environment
            episode.reward = environment.num_turns + environment.hidden / 100


@pytest.fixture
def trainer() -> Any:
    return task_trainer("self_hosted_grpo", scenario="guess_number")


@pytest.fixture
def agent(trainer: Any) -> ConversationAgent:
    agent: ConversationAgent = trainer.agent
    return agent


@pytest.fixture(params=["reward", "rated"])
def task(trainer: Any, request: pytest.FixtureRequest) -> Task:
    """A task whose environments reward, and a task that rates by their state."""
    own: Task = trainer.task
    return own if request.param == "reward" else RatedGuessing(own.parameters)


def plain(rollout: TaskRollout) -> tuple[list[Any], list[Any]]:
    """Trajectories, and messages, rewards, figures and environments of episodes, to compare."""
    rows = [
        {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in item.to_plain().items()}
        for item in rollout.trajectories
    ]
    episodes = [
        (item.messages, item.reward, item.figures, vars(item.environment))
        for item in rollout.episodes
    ]
    return rows, episodes


@pytest.mark.parametrize(
    ("executor", "num_forked", "num_sent"),
    [
        *(
            pytest.param(partial(using_processes, count), num_forked, 0, marks=needs_forks)
            for count, num_forked in ((2, 1), (9, 2))
        ),
        *((partial(using_actors, ActorOptions(count)), 0, 3) for count in (1, 2, 4)),
    ],
    ids=["2 processes", "9 processes", "1 actor", "2 actors", "4 actors"],
)
def test_any_number_of_forked_processes_or_actors_plays_the_same(
    agent: ConversationAgent,
    task: Task,
    executor: Callable[[], AbstractContextManager[None]],
    num_forked: int,
    num_sent: int,
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.0)
    opened = actors_here.install(monkeypatch)
    model = agent.language_model
    with model.counting() as alone:
        expected = plain(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    assert not forked
    with executor(), model.counting() as spent:
        result = plain(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    assert result == expected
    assert spent == alone
    if isinstance(task, RatedGuessing):
        assert task.num_rated == [len(PROBLEMS) * PLAN.num_runs] * 2, "once a rollout"
    assert (len(forked), sum(actors.turn for actors in opened)) == (num_forked, num_sent)
    assert len({len(messages) for messages, *_ in result[1]}) > 1, "episodes of several lengths"


def test_a_problem_that_comes_again_is_another_group_with_other_random_numbers(
    agent: ConversationAgent, task: Task
) -> None:
    def sampled(problems: list[int], *earlier: int, **how: Any) -> list[tuple[Any, ...]]:
        rollout = play_task(agent, task, problems, PLAN.after(earlier), **how)
        return [(one.group_id, one.run_id, *one.tokens.tolist()) for one in rollout.trajectories]

    alone, both = sampled([4]), sampled([4, 0, 4])
    assert both[:2] == alone
    assert [one[:2] for one in both[4:]] == [("train-4-1", 2), ("train-4-1", 3)]
    assert {one[2:] for one in both[4:]} - {one[2:] for one in alone}
    assert sampled([4], 4, 0) == both[4:], "in a later round of resampling"
    team: Any = Team(replace(agent), task)
    assert sampled([4, 0, 4], num_parts=3) == both
    assert sampled([4, 0, 4], num_parts=3, team=team) == both


def test_a_single_part_equals_an_undivided_rollout(
    agent: ConversationAgent, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_calls(monkeypatch, CachedSession, "generate")
    whole = plain(play_task(agent, task, PROBLEMS, PLAN))
    assert len(calls[0].arguments[1]) == len(PROBLEMS)
    by_service = play_task(
        agent, task, PROBLEMS, PLAN, num_parts=3, sample=agent.token_sampler.generate
    )
    assert plain(by_service)[1] == whole[1], "what a service draws is not cut"
    calls.clear()
    play_task(agent, task, PROBLEMS, PLAN, num_parts=64)
    sizes = [len(call.arguments[1]) for call in calls]
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
        alone = plain(play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2))
    assert not forked
    with using_actors(ActorOptions(2)):
        assert plain(play_task(agent, trainer.task, PROBLEMS, PLAN, num_parts=2)) == alone
        assert made[0].turn == 2


class Holding(GuessNumberEnvironment):
    """Holds a generator, after its first step."""

    def reset(self) -> Sequence[Message]:
        self.held = (number for number in range(3))
        return super().reset()


class HoldingAtOnce(Holding):
    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self.held = (number for number in range(3))


@needs_forks
@pytest.mark.parametrize("kind", [Holding, HoldingAtOnce])
def test_environments_that_cannot_be_sent_are_played_here(
    agent: ConversationAgent,
    trainer: Any,
    kind: type[Holding],
    forked: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def played(task: Task) -> list[Any]:
        rollout = play_task(agent, task, PROBLEMS, PLAN, num_parts=2)
        return [(episode.messages, episode.reward) for episode in rollout.episodes]

    expected = played(trainer.task)
    task = RatedGuessing(trainer.task.parameters)
    task.kind = kind
    with using_processes(2):
        assert played(task) == expected
        monkeypatch.setattr(tasks, "WORTH_A_FORK", 0.0)
        play_task(agent, task, PROBLEMS, PLAN)
        assert not caplog.records, "an undivided rollout is not sent"
        assert played(task) == played(task) == expected
        assert not forked
        assert caplog.text.count("cannot be pickled") == 1
        assert f" {kind.__name__} " in caplog.text
        played(trainer.task)
        assert forked


class Team:
    """Two processes, both simulated by this process: exchanged values are pickled."""

    size = 2
    can_request = True

    def __init__(self, agent: ConversationAgent, task: Task) -> None:
        self.agent, self.task = agent, task
        self.num_parts: list[int] = []

    def request(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        assert name == executor.RUN_PARTS
        self.num_parts = [len(requests) for requests in arguments]
        call_of = partial(requested_part, self.agent, self.task)
        own, *others = [executor.run_requested(call_of, requests) for requests in arguments]
        return [own, *(unpack_state(pack_state(reply)) for reply in others)]


def test_processes_of_a_run_play_the_same(agent: ConversationAgent, task: Task) -> None:
    expected = plain(play_task(agent, task, PROBLEMS, PLAN, num_parts=3))
    team: Any = Team(replace(agent), task)
    rows, episodes = plain(play_task(agent, task, PROBLEMS, PLAN, num_parts=3, team=team))
    assert team.num_parts == [1, 2]
    assert rows == expected[0]
    # Environments of the other process have their state only where the task rates by it.
    end = 4 if isinstance(task, RatedGuessing) else 3
    assert [item[:end] for item in episodes] == [item[:end] for item in expected[1]]
    assert Unrated.num_open == 0


def test_an_episode_is_repeated_only_if_the_task_reads_its_state(
    agent: ConversationAgent, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RatedGuessing, "reads_state", False)
    task = RatedGuessing(trainer.task.parameters)
    team: Any = Team(replace(agent), task)
    before = Unrated.num_resets
    rollout = play_task(agent, task, PROBLEMS, PLAN, num_parts=3, team=team)
    assert Unrated.num_resets - before == len(rollout.episodes)


def test_an_environment_that_reacts_otherwise_the_second_time_is_refused(
    agent: ConversationAgent, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = RatedGuessing(trainer.task.parameters)
    team: Any = Team(replace(agent), task)
    numbers = iter(range(1000))
    monkeypatch.setattr(Unrated, "reset", lambda _: [Message("user", f"guess {next(numbers)}")])
    with pytest.raises(WorkerProcessError, match="RatedGuessing"):
        play_task(agent, task, PROBLEMS, PLAN, num_parts=3, team=team)


class Begun(Answering):
    """Begins the policy's first answer, and asks once more."""

    begins_answer = True

    def __init__(self) -> None:
        super().__init__([*OPENING, Message("assistant", "higher")])
        self.heard: list[str] = []

    def step(self, message: str) -> Reaction:
        self.heard.append(message)
        return Reaction([Message("user", "lower")], is_over=len(self.heard) == 2, reward=1.0)


def test_an_answer_whose_beginning_is_given_is_continued() -> None:
    agent = agent_of_scripts()
    environment = Begun()
    script = Scripted(["7", "8"])
    plan = TaskPlan("train", 1, 2, key=(0, "begun"))
    rollout = play_task(agent, Made(lambda _: environment), [0], plan, sample=script)
    beginning = TOKENIZER.encode("higher", add_special_tokens=False)
    first, second = (contexts[0] for contexts in script.contexts)
    assert first[-len(beginning) :] == beginning
    assert environment.heard == ["7", "8"]
    # The later context has one answer, of both parts.
    assert second[: len(first)] == first
    (trajectory,) = rollout.trajectories
    assert trajectory.tokens[: len(first)].tolist() == first
    assert not trajectory.loss_mask[: len(first)].any()
    (episode,) = rollout.episodes
    assert [message.role for message in episode.messages] == [
        *[message.role for message in OPENING],
        *("assistant", "assistant", "user", "assistant", "user"),
    ]


def test_a_model_that_begins_with_a_thought_continues_no_answer() -> None:
    agent = agent_of_scripts()
    thinking = MessageFormat(ThoughtMarkers("<think>", "</think>"), opens_thought=True)
    agent.conversation_format.__dict__["message_format"] = thinking
    turns = agent.tokenize([*OPENING, Message("assistant", "higher")])
    with pytest.raises(ModelAbilityError, match="thought"):
        agent.contexts([turns], continued=[True])


def test_calls_of_given_messages_reach_the_policy() -> None:
    played = PlayedEpisode(0, "group", 0, Episode(guessing()))
    given_turns = [*OPENING, Message("assistant", calls=(ToolCall("add", {"a": 1}),))]
    assert played.observe(given_turns, has_template=True) == given_turns
