"""Tasks: streams of problems, each an environment that exchanges messages with the policy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import torch
from pydantic import Field

from nip_astra.deadlines import within_deadline
from nip_astra.errors import DataError, NipAstraError, TaskError, describe_error
from nip_astra.parameters.parameters_base import ComponentRegistry, PolymorphicParameters
from nip_astra.rollouts.messages import Role, Turn
from nip_astra.rollouts.prompts import Columns
from nip_astra.safe_text import valid_text
from nip_astra.scenario_base.tasks.tools import (
    NO_TOOLS,
    Outcome,
    Tool,
    Toolbox,
    ToolUseParameters,
)
from nip_astra.scorers.base import Exchange, Scorer
from nip_astra.utils.seeding import derive_seed, derived_generator

Value = TypeVar("Value")

Split = Literal["train", "dev", "test"]
"""Problems for training, for checkpoint selection, and held out."""


class Reaction(NamedTuple):
    """Response of an environment to a message of the policy."""

    messages: Sequence[Turn] = ()
    """Messages of the environment or a tool; empty at the end of the episode."""
    reward: float | None = None
    """Reward of the episode, at its end; None if a scorer decides it."""
    is_over: bool = True
    """Whether the episode has ended."""


class TaskParameters(PolymorphicParameters):
    """Base of the parameters of all tasks."""

    type_name: ClassVar[str] = ""


class Environment(ABC):
    """One episode of one problem: environment and policy alternate until it is over.

    Messages of the environment and results of tools are never trained on.
    """

    tools: Sequence[Tool | Callable[..., Any]] = ()
    """Tools of the policy; functions, for instance methods of the environment, are described by
    their docstrings and type hints. A message with calls gets their results and is no step."""
    concurrency: int = 1
    """Environments of this kind that may start or step at once, each in a thread."""
    is_stateless: bool = False
    """Whether `reset` and `step` depend on the problem and the message alone: then all runs of a
    problem share one environment, which is opened and closed once. A subclass states it anew."""
    max_open: int | None = None
    """Episodes of this kind that may be played at once; None for any number."""
    figures: Mapping[str, float] = {}
    """Figures of the episode; their means are logged as `environment/<name>`."""

    solution: str | None = None
    """A correct answer to the opening, if known; the target of supervised training."""
    columns: Columns = ()
    """Columns of the problem, for scorers and records."""
    begins_answer: bool = False
    """Whether the last of the first messages, of the role assistant, is the beginning of the
    policy's answer, which continues it."""

    class Parameters(TaskParameters):
        """Parameters of a registered environment; a subclass adds its own."""

    @classmethod
    def draw(cls, parameters: Any, generator: torch.Generator) -> Environment:
        """Hook of registered environments: return a random problem, equal ones with equal
        `columns`.
        """
        raise NotImplementedError(f"define the classmethod draw of {cls.__name__}")

    @abstractmethod
    def reset(self) -> Sequence[Turn]:
        """Start the episode and return its first messages."""

    @abstractmethod
    def step(self, message: str) -> Reaction:
        """Respond to a message of the policy."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Hook: release the episode's resources, whether or not it is over."""


@dataclass
class Episode:
    """Messages and reward of an episode, for records and scorers."""

    environment: Environment
    messages: list[Turn] = field(default_factory=list)
    """All turns in order; those of the policy have the role "assistant"."""
    reward: float | None = None
    """None without a verdict."""
    tool_counts: Counter[str] = field(default_factory=Counter)
    """Calls of tools, and errors by kind."""
    completion_ids: Sequence[int] = ()
    """Tokens of the policy's last message, with the token that ends it."""
    rewards: dict[str, float | None] = field(default_factory=dict)
    """Rewards by name, of a task with several."""
    logged: list[tuple[str, float]] = field(default_factory=list)
    """Metrics that reward functions logged."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of the episode's record."""
    figures: dict[str, float] = field(default_factory=dict)
    """Those of the environment at the end of the episode."""

    @property
    def decisive_reward(self) -> float | None:
        """The reward that decides whether an answer is right: the first of several."""
        if self.reward is None:
            return None
        return next(iter(self.rewards.values()), self.reward)

    def is_correct(self, success_reward: float | None) -> bool | None:
        """Return whether the decisive reward is large enough; None if that cannot be known.

        Without a `success_reward` it is 1, the most that a reward then may be.
        """
        decisive = self.decisive_reward
        if self.reward is None or (success_reward is None and (decisive or 0.0) > 1.0):
            return None
        return decisive is not None and decisive >= (
            1.0 if success_reward is None else success_reward
        )

    def exchange(self) -> Exchange:
        """Return the last message with its history, for scorers."""
        *history, last = self.messages
        return Exchange(
            last.text,
            tuple(history),
            "assistant",
            self.environment.columns,
            last.reasoning,
            last.calls,
        )


class TrainingProgress(NamedTuple):
    """Iteration, counted from 0, and number of iterations of the run that rates."""

    iteration: int = 0
    num_iterations: int = 0


class Task(ABC):
    """Problems of one kind, by split and number.

    A subclass implements `environment`, and registers under the name that `_type` selects.
    """

    scorers: Sequence[Scorer] = ()
    """Scorers that `rate` calls; their services get the run's budget, and checkpoints keep their
    verdicts."""
    tools: Sequence[Tool] = ()
    """Tools of every environment, in addition to its own."""
    tool_use: ToolUseParameters = ToolUseParameters()
    """Limits of the use of tools."""
    reads_state: bool = True
    """Whether `rate` reads what an episode changed in its environment: then an episode from another
    process is repeated, with its tool calls, in the process that rates."""
    progress: TrainingProgress = TrainingProgress()
    """Set by the trainer before it plays problems."""

    class Parameters(TaskParameters):
        """Parameters of the task; a subclass adds its own."""

    def __init__(
        self, parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
    ) -> None:
        self.parameters = parameters
        self.seed = seed
        self.device = device
        self.scenario_dir = scenario_dir

    @abstractmethod
    def environment(self, split: Split, index: int) -> Environment:
        """Create an environment for a problem; equal indices give equal problems."""

    def num_problems(self, split: Split) -> int | None:
        """Return the number of problems in a split; None if they are generated."""
        return None

    def rate(self, episodes: Sequence[Episode]) -> None:
        """Hook: set the rewards of episodes that ended without one."""
        if any(episode.reward is None for episode in episodes):
            raise DataError(
                f"an episode of the task {type(self).__name__} ended without a reward. Return one "
                "from step at the end of the episode, or override rate."
            )


# ---- checked calls of tasks and environments


def environment_of(task: Task, split: Split, index: int) -> Environment:
    """Return a task's environment of a problem."""
    environment = _call_hook(task, "environment", lambda: task.environment(split, index))
    if not all(callable(getattr(environment, name, None)) for name in ("reset", "step")):
        raise wrong_result(task, "environment", environment, "an Environment with reset and step")
    columns = getattr(environment, "columns", ())
    are_pairs = isinstance(columns, tuple | list) and all(
        isinstance(column, tuple | list) and len(column) == 2 for column in columns
    )
    if not are_pairs:
        raise wrong_result(environment, "columns", columns, "a tuple of pairs (name, value)")
    return environment


def is_stateless(environment: Environment) -> bool:
    """Return whether runs may share an environment, as stated by its own class, not by a base."""
    return bool(vars(type(environment)).get("is_stateless", False))


def opening_of(environment: Environment) -> list[Turn]:
    """Return the first messages of an environment."""
    messages = _call_hook(environment, "reset", environment.reset)
    turns = _check_messages(environment, "reset", messages)
    if not turns:
        raise wrong_result(environment, "reset", turns, "at least one message")
    return turns


def figures_of(environment: Environment) -> dict[str, float]:
    """Return the figures of an episode."""
    has_instance_figures = "figures" in getattr(environment, "__dict__", ())
    class_figures = getattr(type(environment), "figures", None)
    if not has_instance_figures and class_figures is Environment.figures:
        # The environment has none, so no code of its own runs.
        return {}

    def read_figures() -> dict[str, float]:
        figures = getattr(environment, "figures", {})
        return {str(name): float(figure) for name, figure in figures.items()}

    return _call_hook(environment, "figures", read_figures)


def reaction_of(environment: Environment, message: str) -> Reaction:
    """Return an environment's response to a message; the reward is a finite float, or None."""
    reaction = _call_hook(environment, "step", lambda: environment.step(message))
    return checked_reaction(environment, "step", reaction)


def close_environment(environment: Environment) -> None:
    """Release the resources of an episode."""
    close = getattr(environment, "close", None)
    if close is not None:
        _call_hook(environment, "close", close)


def checked_reaction(owner: object, hook: str, reaction: Any) -> Reaction:
    """Return a reaction with a list of messages and a finite reward, or None."""
    if not isinstance(reaction, Reaction):
        raise wrong_result(owner, hook, reaction, "a Reaction")
    if not isinstance(reaction.is_over, bool):
        raise wrong_result(owner, hook, reaction.is_over, "True or False as is_over")
    messages = _check_messages(owner, hook, reaction.messages)
    reward = _check_reward(owner, hook, reaction.reward)
    return Reaction(messages, reward, reaction.is_over)


def toolbox_of(task: Task, environment: Environment) -> Toolbox:
    """Return an episode's tools: those of the task and of the environment."""
    environment_tools = getattr(environment, "tools", ())
    if not task.tools and not environment_tools:
        return NO_TOOLS
    return Toolbox.of([*task.tools, *environment_tools], task.tool_use)


def reaction_to_calls(
    environment: Environment, toolbox: Toolbox, outcomes: Sequence[Outcome], agent: Any
) -> tuple[Reaction, Counter[str]]:
    """Return results of calls as messages, with counts; a tool that ends the episode has no result.

    `agent`, a `ConversationAgent`, counts tokens.
    """
    plain_outcomes: list[Outcome] = []
    for outcome in outcomes:
        content = outcome.value
        if isinstance(content, Reaction):
            reaction = checked_reaction(environment, "a tool", content)
            if reaction.is_over:
                return reaction, Counter(calls=len(outcomes))
            content = "\n".join(message.text for message in reaction.messages)
        plain_outcomes.append(Outcome(content, outcome.error))
    texts, counts = toolbox.texts(plain_outcomes, agent.num_tokens, agent.room)
    return Reaction([Turn("tool", text) for text in texts], is_over=False), counts


def rate_episodes(task: Task, episodes: Sequence[Episode]) -> None:
    """Rate episodes by a task; rewards are finite floats, or None."""
    if type(task).rate.__module__.startswith("nip_astra."):
        # Its functions and scorers have limits of their own.
        task.rate(episodes)
    else:
        _call_hook(task, "rate", lambda: task.rate(episodes))
    for episode in episodes:
        episode.reward = _check_reward(task, "rate", episode.reward)


def _call_hook(owner: object, hook: str, call: Callable[[], Value]) -> Value:
    """Return the result of a hook, which may be a user's code, within its deadline."""
    try:
        with within_deadline(f"{hook} of {type(owner).__name__}"):
            return call()
    except NipAstraError:
        raise
    except Exception as error:
        raise TaskError(
            f"{hook} of {type(owner).__name__} failed: {describe_error(error)}. Fix it, "
            "then resume the run."
        ) from error


def _check_messages(owner: object, hook: str, messages: Any) -> list[Turn]:
    expected = "a list of Turn(role, text), with the role 'user' or 'assistant'"
    # A text is a sequence, too.
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not is_list:
        raise wrong_result(owner, hook, messages, expected)
    for message in messages:
        is_message = isinstance(message, Turn) and isinstance(message.text, str)
        if not is_message or message.role not in get_args(Role):
            raise wrong_result(owner, hook, message, expected)
    return [Turn(message.role, valid_text(message.text)) for message in messages]


def _check_reward(owner: object, hook: str, reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        # Python would read a text as a number.
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise wrong_result(owner, hook, reward, "a finite reward, or None for no verdict")
    return number


def wrong_result(owner: object, hook: str, value: object, expected: str) -> TaskError:
    """Return the error of a hook that returned something else than expected."""
    return TaskError(
        f"{hook} of {type(owner).__name__} returned {str(value)[:80]!r} ({type(value).__name__}). "
        f"Return {expected}."
    )


class SeededTask(Task):
    """A task whose problems are seeds; the splits have different ones."""

    SPLITS: tuple[Split, ...] = ("train", "dev", "test")

    class Parameters(TaskParameters):
        """Number of problems; a subclass adds its own."""

        num_train: int | None = Field(default=None, ge=1)
        """Training problems; null for new ones without end."""
        num_test: int = Field(default=100, ge=1)
        """Held-out problems."""
        num_dev: int = Field(default=20, ge=1)
        """Problems for selecting the best checkpoint."""

    def num_problems(self, split: Split) -> int | None:
        num_problems: int | None = getattr(self.parameters, f"num_{split}")
        return num_problems

    def seed_of(self, split: Split, index: int) -> int:
        """Return the seed of a problem."""
        # Held-out problems do not depend on the run's seed, so that runs are comparable.
        root = self.seed if split == "train" else 0
        seed = derive_seed(root, self.parameters.type_name, split, index) % 2**30
        # Different remainders make the splits disjoint.
        return len(self.SPLITS) * seed + self.SPLITS.index(split)


class GeneratedTask(Task):
    """A task with random problems.

    The split of a problem depends on the problem alone, so splits are disjoint. A subclass
    implements `draw`.
    """

    MAX_DRAWS = 1000

    @abstractmethod
    def draw(self, generator: torch.Generator) -> Environment:
        """Return a random problem; equal problems have equal `columns`."""

    def environment(self, split: Split, index: int) -> Environment:
        name = str(self.parameters.type_name)
        # Held-out problems do not depend on the seed, so that runs are comparable.
        seed = self.seed if split == "train" else 0
        generator = derived_generator(seed, "task", name, split, index)
        for _ in range(self.MAX_DRAWS):
            environment = self.draw(generator)
            if split_of(environment.columns) == split:
                return environment
        raise DataError(
            f"no problem {index} of the split {split!r} of the task {name!r} in {self.MAX_DRAWS} "
            "draws. Widen the task's range."
        )


class EnvironmentTask(GeneratedTask):
    """Random problems of a registered environment."""

    def __init__(
        self, environment_class: type[Environment], parameters: Any, **options: Any
    ) -> None:
        super().__init__(parameters, **options)
        self.environment_class = environment_class

    def draw(self, generator: torch.Generator) -> Environment:
        return self.environment_class.draw(self.parameters, generator)


def split_of(columns: Columns) -> Split:
    """Return the split of a problem: test 15 %, dev 5 %, train 80 %."""
    twentieth = derive_seed("split", repr(columns)) % 20
    if twentieth < 3:
        return "test"
    return "dev" if twentieth == 3 else "train"


def pick(generator: torch.Generator, low: int, high: int) -> int:
    """Return a random integer from low to high, inclusive."""
    return int(torch.randint(low, high + 1, (), generator=generator))


TASKS: ComponentRegistry[type[Task] | type[Environment]] = ComponentRegistry("task")


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Register a `Task` subclass under the `_type` by which parameter files name it."""
    return TASKS.register(name)  # type: ignore[return-value]  # returns its argument


def register_environment(name: str) -> Callable[[type[Environment]], type[Environment]]:
    """Register an `Environment` with `draw` as the task of this `_type`, with random problems."""
    return TASKS.register(name)  # type: ignore[return-value]  # returns its argument


def build_task(
    parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
) -> Task:
    """Build the task given by the parameters."""
    cls = TASKS.get(parameters.type_name)
    if issubclass(cls, Environment):
        return EnvironmentTask(cls, parameters, seed=seed, device=device, scenario_dir=scenario_dir)
    return cls(parameters, seed=seed, device=device, scenario_dir=scenario_dir)
