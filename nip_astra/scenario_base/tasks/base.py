"""What a task is: problems without end, each an environment that speaks in messages."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch

from nip_astra.errors import DataError, NipAstraError, TaskError
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.prompts import Columns
from nip_astra.scorers.base import Message, Role, Scorer
from nip_astra.utils.seeding import derive_seed, derived_generator

Value = TypeVar("Value")

Split = Literal["train", "dev", "test"]
"""Which problems: those learnt from, those that choose a checkpoint, those held out."""


class Reaction(NamedTuple):
    """What an environment does after a message of the policy.

    Attributes
    ----------
    messages : Sequence[Message]
        What it says, a tool's answer too; nothing where the episode is over.
    reward : float or None
        Of the whole episode, given when it is over; None where a scorer is to say it.
    is_over : bool
        Whether the episode ended.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    is_over: bool = True


class Environment(ABC):
    """One episode of one problem: it says something, the policy answers, until it is over.

    A tool is an environment too: `step` reads the call in the policy's message and answers it. What
    an environment says is never learnt.
    """

    solution: str | None = None
    """A right answer to the opening, where one is known: what supervised learning imitates."""
    columns: Columns = ()
    """Facts of the problem for scorers and records."""

    @abstractmethod
    def reset(self) -> Sequence[Message]:
        """Begin, and say what the policy answers first."""

    @abstractmethod
    def step(self, message: str) -> Reaction:
        """Take a message of the policy."""


class TaskParameters(PolymorphicParameters):
    """What parameters of every task inherit."""

    type_name: ClassVar[str] = ""


@dataclass
class Episode:
    """What was said in an environment, for records and scorers.

    Attributes
    ----------
    messages : list of Message
        All turns in order; those of the policy have the role "assistant".
    reward : float or None
        None where there is no verdict.
    """

    environment: Environment
    messages: list[Message] = field(default_factory=list)
    reward: float | None = None


class Task(ABC):
    """Problems of one kind, by split and number.

    A subclass gives `environment`, and registers under the name by which `_type` selects it.
    """

    scorers: Sequence[Scorer] = ()
    """Scorers that `rate` asks: their services are told what they may spend, and checkpoints keep
    what they have said."""

    class Parameters(TaskParameters):
        """Parameters of the task; a subclass adds its own."""

    def __init__(
        self, parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
    ) -> None:
        self.parameters = parameters
        self.seed, self.device, self.scenario_dir = seed, device, scenario_dir

    @abstractmethod
    def environment(self, split: Split, index: int) -> Environment:
        """The environment of a problem, new each time; the same number is the same problem."""

    def num_problems(self, split: Split) -> int | None:
        """Different problems of a split; None where they are generated without end."""
        return None

    def rate(self, episodes: Sequence[Episode]) -> None:
        """Fill in the rewards of episodes that ended without one; hook.

        Raises
        ------
        DataError
            When one has none and the task has nothing to say it with.
        """
        if any(episode.reward is None for episode in episodes):
            raise DataError(
                f"an episode of the task {type(self).__name__} ended without a reward, and the "
                "task has no scorer to say it. Let step give a reward when the episode is over, or "
                "override rate."
            )


# ---- what tasks and environments give, checked


def environment_of(task: Task, split: Split, index: int) -> Environment:
    """A task's environment of a problem.

    Raises
    ------
    TaskError
        When the task fails, or gives something else.
    """
    found = _called(task, "environment", lambda: task.environment(split, index))
    if not all(callable(getattr(found, name, None)) for name in ("reset", "step")):
        raise _wrong(task, "environment", found, "an Environment, which has reset and step")
    return found


def opening_of(environment: Environment) -> list[Message]:
    """What an environment says first.

    Raises
    ------
    TaskError
        When it fails, or gives something else than messages.
    """
    return _messages(environment, "reset", _called(environment, "reset", environment.reset))


def reaction_of(environment: Environment, message: str) -> Reaction:
    """What an environment does after a message; its reward is a finite float, or None.

    Raises
    ------
    TaskError
        When it fails, or gives something else than a reaction.
    """
    found = _called(environment, "step", lambda: environment.step(message))
    if not isinstance(found, Reaction):
        raise _wrong(environment, "step", found, "a Reaction")
    if not isinstance(found.is_over, bool):
        raise _wrong(environment, "step", found.is_over, "True or False as is_over")
    messages = _messages(environment, "step", found.messages)
    return Reaction(messages, _reward(environment, "step", found.reward), found.is_over)


def rate_episodes(task: Task, episodes: Sequence[Episode]) -> None:
    """Have a task rate episodes; their rewards are finite floats, or None.

    Raises
    ------
    TaskError
        When it fails, or a reward is something else.
    """
    _called(task, "rate", lambda: task.rate(episodes))
    for episode in episodes:
        episode.reward = _reward(task, "rate", episode.reward)


def _called(owner: object, hook: str, call: Callable[[], Value]) -> Value:
    try:
        return call()
    except NipAstraError:
        raise
    except Exception as error:
        raise TaskError(
            f"{hook} of {type(owner).__name__} failed: {type(error).__name__}: {error}. Correct "
            "it, then resume the run."
        ) from error


def _messages(owner: object, hook: str, found: Any) -> list[Message]:
    wanted = "a list of Message(role, text), with the role 'user' or 'assistant'"
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise _wrong(owner, hook, found, wanted)
    for one in found:
        is_message = isinstance(one, Message) and isinstance(one.text, str)
        if not is_message or one.role not in get_args(Role):
            raise _wrong(owner, hook, one, wanted)
    return list(found)


def _reward(owner: object, hook: str, found: Any) -> float | None:
    wanted = "a finite number as reward, or None where there is no verdict"
    if found is None:
        return None
    try:
        reward = math.nan if isinstance(found, str | bytes) else float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        reward = math.nan
    if not math.isfinite(reward):
        raise _wrong(owner, hook, found, wanted)
    return reward


def _wrong(owner: object, hook: str, found: object, wanted: str) -> TaskError:
    return TaskError(
        f"{hook} of {type(owner).__name__} returned {str(found)[:80]!r} ({type(found).__name__}). "
        f"It must give {wanted}."
    )


class GeneratedTask(Task):
    """A task whose problems are drawn, by a generator of their own, from those of their split.

    Which split a problem belongs to depends on the problem alone, so no two share one. A subclass
    gives `draw`.
    """

    MAX_DRAWS = 1000

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Environment:
        """A problem; equal problems have equal `columns`."""

    def environment(self, split: Split, index: int) -> Environment:
        name = str(self.parameters.type_name)
        # Held-out problems are the same for every seed, so that runs can be compared.
        seed = self.seed if split == "train" else 0
        generator = derived_generator(seed, "task", name, split, index)
        for _ in range(self.MAX_DRAWS):
            found = self.draw(generator)
            if split_of(found.columns) == split:
                return found
        raise DataError(
            f"a problem {index} of the split {split} of the task {name!r} was to be drawn, but "
            f"{self.MAX_DRAWS} drawn ones belong to other splits. Widen the task's range."
        )


def split_of(columns: Columns) -> Split:
    """The split of a problem: of 20 problems about 3 are for testing and 1 for development."""
    place = derive_seed("split", repr(columns)) % 20
    return "test" if place < 3 else "dev" if place == 3 else "train"


def pick(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


TASKS: ComponentRegistry[type[Task]] = ComponentRegistry(
    "task", package="nip_astra.scenario_base.tasks", members=TaskType
)


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Register a `Task` subclass under the `_type` by which parameter files name it."""
    return TASKS.register(name)


def build_task(
    parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
) -> Task:
    """The task that the parameters describe."""
    return TASKS.get(parameters.type_name)(
        parameters, seed=seed, device=device, scenario_dir=scenario_dir
    )
