"""Tasksets of the `verifiers` library (v1 interface), in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, JsonValue

from nip_astra.errors import ConfigurationError, DataError, MissingDependencyError
from nip_astra.parameters.types import TaskType
from nip_astra.plugins import load_plugin, module_of
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    TaskParameters,
    register_task,
)
from nip_astra.scorers.base import Message

_TASKSETS = "verifiers.v1.tasksets"


class VerifiersEnvironment(Environment):
    """One task of a taskset, answered in one message."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.columns = (("key", str(task.key)), ("name", str(task.data.name or task.data.idx)))

    def reset(self) -> Sequence[Message]:
        """The prompt; a system prompt is prepended to its first message, as verifiers does."""
        data = self.task.data
        prompt = [("user", data.prompt)] if isinstance(data.prompt, str) else _plain(data.prompt)
        system = [text for role, text in prompt if role == "system"]
        if data.system_prompt is not None:
            system.insert(0, data.system_prompt)
        turns = [[role, text] for role, text in prompt if role != "system"]
        if not turns or turns[-1][0] == "assistant":
            raise DataError(
                f"the prompt of the task {self.task.key} does not end with a user message. Add one "
                "or leave the task out."
            )
        if system:
            turns[0][1] = "\n\n".join([*system, turns[0][1]])
        return [Message("assistant" if r == "assistant" else "user", text) for r, text in turns]

    def step(self, message: str) -> Reaction:
        return Reaction(reward=None)

    async def rate(self, episode: Episode) -> float:
        """Weighted sum of the task's own rewards and judges."""
        trace = self._trace(episode)
        await self.task.score(trace)
        return float(trace.reward)

    def _trace(self, episode: Episode) -> Any:
        """The episode as a trace of verifiers, with the policy's message marked as sampled."""
        from verifiers import v1
        from verifiers.v1.state import state_cls

        task, kinds = self.task, {"user": v1.UserMessage, "assistant": v1.AssistantMessage}
        nodes = [
            v1.MessageNode(
                parent=number - 1 if number else None,
                message=kinds[message.role](content=message.text),
                sampled=number == len(episode.messages) - 1,
            )
            for number, message in enumerate(episode.messages)
        ]
        return v1.Trace(
            task=v1.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            agent=v1.AgentInfo(config=v1.AgentConfig()),
            state=state_cls(type(task))(),
            nodes=nodes,
            is_completed=True,
            ok=True,
            stop_condition="agent_completed",
        )


@register_task(TaskType.VERIFIERS)
class VerifiersTask(Task):
    """Tasks of a v1 taskset of `verifiers`, with their own prompts and rewards.

    The policy answers each in one message, as in verifiers' `null` harness; tasksets with tools, a
    container or a simulated user are refused. The first tasks of the taskset are held out.
    """

    class Parameters(TaskParameters):
        """Taskset and sizes of the splits."""

        taskset: str
        """Id of an installed taskset, or a Python file. The module is imported, which executes
        it."""
        options: dict[str, JsonValue] = {}
        """Fields of the taskset's configuration."""
        num_test: int = Field(default=100, ge=1, le=100_000_000)
        """Held-out tasks, the first ones."""
        num_dev: int = Field(default=20, ge=1)
        """Tasks for checkpoint selection, the next ones."""
        num_train: int | None = Field(default=None, ge=1, le=100_000_000)
        """Training tasks, the next ones; null for all others of a finite taskset."""

    def __init__(
        self, parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
    ) -> None:
        super().__init__(parameters, seed=seed, device=device, scenario_dir=scenario_dir)
        taskset_class = _find_taskset(parameters.taskset)
        taskset = taskset_class(_config_of(taskset_class, parameters))
        _check_is_single_turn(taskset_class, taskset, parameters.taskset)
        self._tasks = self._split(taskset)

    def _split(self, taskset: Any) -> dict[Split, list[Any]]:
        options = self.parameters
        if options.num_train is None and not taskset.bounded:
            raise ConfigurationError(
                f"the taskset {options.taskset!r} is infinite. Set task.task.num_train."
            )
        tasks = iter(taskset)
        sizes: tuple[tuple[Split, int | None], ...] = (
            ("test", options.num_test),
            ("dev", options.num_dev),
            ("train", options.num_train),
        )
        by_split: dict[Split, list[Any]] = {
            split: list(itertools.islice(tasks, size)) for split, size in sizes
        }
        if not all(by_split.values()):
            raise DataError(
                f"the taskset {options.taskset!r} has only {sum(map(len, by_split.values()))} "
                f"tasks, too few for num_test={options.num_test}, num_dev={options.num_dev} and "
                "training. Lower task.task.num_test and num_dev."
            )
        return by_split

    def num_problems(self, split: Split) -> int:
        return len(self._tasks[split])

    def environment(self, split: Split, index: int) -> VerifiersEnvironment:
        tasks = self._tasks[split]
        return VerifiersEnvironment(tasks[index % len(tasks)])

    def rate(self, episodes: Sequence[Episode]) -> None:
        """Score all episodes concurrently."""

        async def score_all() -> list[float]:
            environments = [episode.environment for episode in episodes]
            assert all(isinstance(one, VerifiersEnvironment) for one in environments)
            rated = (e.environment.rate(e) for e in episodes)  # type: ignore[attr-defined]
            return list(await asyncio.gather(*rated))

        try:
            rewards = asyncio.run(score_all())
        except Exception as error:
            raise DataError(
                f"scoring of the taskset {self.parameters.taskset!r} failed: "
                f"{type(error).__name__}: {error}. Fix the taskset."
            ) from error
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.reward = reward


def _plain(messages: Any) -> list[tuple[str, str]]:
    from verifiers.v1.types import content_text

    return [(message.role, content_text(message.content)) for message in messages or []]


def _find_taskset(name: str) -> Any:
    """The taskset's class."""
    try:
        from verifiers import v1
    except ImportError as error:
        raise MissingDependencyError(
            f"the taskset {name!r} needs the package verifiers ({error}). Run: pip install "
            "'nip-astra[verifiers]'"
        ) from error
    if name.endswith(".py"):
        module = module_of(load_plugin(name))
    else:
        # As verifiers finds them: owner/name@version is installed as name.
        plain = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        is_shipped = importlib.util.find_spec(f"{_TASKSETS}.{plain}") is not None
        module = module_of(load_plugin(f"{_TASKSETS}.{plain}" if is_shipped else plain))
    names = getattr(module, "__all__", list(vars(module)))
    values = [getattr(module, one, None) for one in names]
    tasksets = [
        one
        for one in values
        if isinstance(one, type)
        and issubclass(one, v1.Taskset)
        and one is not v1.Taskset
        and (one.__module__ == module.__name__ or hasattr(module, "__all__"))
    ]
    if len(tasksets) != 1:
        raise ConfigurationError(
            f"the module of the taskset {name!r} exports {len(tasksets)} subclasses of "
            "verifiers.v1.Taskset. Name exactly one in its __all__."
        )
    if any(isinstance(one, type) and issubclass(one, v1.Env) for one in values):
        _refuse(name, "defines its own environment (Env)")
    return tasksets[0]


def _config_of(taskset_class: Any, parameters: Any) -> Any:
    from verifiers.v1 import Taskset, TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    config = concrete_type(taskset_class, TasksetConfig, origin=Taskset) or TasksetConfig
    try:
        return config.model_validate({**parameters.options, "id": parameters.taskset})
    except ValueError as error:
        raise ConfigurationError(
            f"the taskset {parameters.taskset!r} rejects task.task.options="
            f"{parameters.options}: {error}."
        ) from error


def _check_is_single_turn(taskset_class: Any, taskset: Any, name: str) -> None:
    """Refuse a taskset that needs more than one message in this process."""
    from verifiers import v1

    task_class = taskset_class.task_type()
    if taskset_class.toolsets(taskset.config) or task_class.toolsets(taskset.config.task):
        _refuse(name, "has tools (toolsets)")
    if task_class.NEEDS_CONTAINER:
        _refuse(name, "needs a container")
    for hook in ("setup", "finalize"):
        if getattr(task_class, hook) is not getattr(v1.Task, hook):
            _refuse(name, f"prepares a runtime ({hook})")
    task = next(iter(taskset.take(1)), None)
    hooks = [] if task is None else [*task.hooks("reward"), *task.hooks("metric")]
    for function in hooks:
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            _refuse(name, f"scores within a runtime ({function.__name__})")


def _refuse(name: str, why: str) -> None:
    raise ConfigurationError(
        f"the taskset {name!r} {why}, which is not supported: a policy answers in one message. "
        "Choose another taskset, or write the environment as a task."
    )
