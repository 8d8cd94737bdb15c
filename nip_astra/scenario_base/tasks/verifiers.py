"""Tasksets of the `verifiers` library (v1 interface), in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from types import MethodType, SimpleNamespace
from typing import Any

from pydantic import Field, JsonValue

from nip_astra.errors import (
    ConfigurationError,
    DataError,
    MissingDependencyError,
    NipAstraError,
    describe_error,
)
from nip_astra.lazy import import_extra
from nip_astra.parameters.types import TaskType
from nip_astra.plugins import load_plugin, module_of
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Episode,
    Reaction,
    Split,
    Task,
    TaskParameters,
    register_task,
)
from nip_astra.scenario_base.tasks.tools import Tool, tool_of
from nip_astra.utils.background_loop import BackgroundLoop

_TASKSETS = "verifiers.v1.tasksets"


class VerifiersEnvironment(Environment):
    """A task of a taskset, answered in one message after any tool calls."""

    def __init__(self, task: Any, shared: Sequence[Any], loop: BackgroundLoop) -> None:
        from verifiers.v1.state import state_cls

        self.task = task
        self._loop = loop
        self._toolsets = task.toolsets(task.config)
        name = task.data.name or task.data.idx
        self.columns = (("key", str(task.key)), ("name", str(name)))
        self.state = state_cls(type(task))()
        self._num_opening = 0
        tools = []
        for toolset in (*shared, *self._toolsets):
            for tool in find_tools(toolset.__class__):
                tools.append(replace(tool, function=partial(self._call, toolset, tool.function)))
        self.tools = tools

    def reset(self) -> Sequence[Turn]:
        """Return the prompt; a system prompt is prepended to its first message, as in verifiers."""

        async def set_up() -> None:
            for toolset in self._toolsets:
                await toolset.setup()
                await toolset.setup_task(self.task.data)

        self._loop.run(set_up())
        return self._read_opening(self.task.data.prompt)

    def _read_opening(self, prompt: Any) -> list[Turn]:
        system_texts: list[str] = []
        if self.task.data.system_prompt is not None:
            system_texts.append(self.task.data.system_prompt)
        turns: list[Turn] = []
        for role, text in _read_texts(prompt):
            if role == "system":
                system_texts.append(text)
            else:
                turns.append(Turn("assistant" if role == "assistant" else "user", text))
        if not turns or turns[-1].role == "assistant":
            raise DataError(
                f"the prompt of the task {self.task.key} does not end with a user message. Add one "
                "or leave the task out."
            )
        if system_texts:
            turns[0] = replace(turns[0], text="\n\n".join([*system_texts, turns[0].text]))
        self._num_opening = len(turns)
        return turns

    def _call(self, toolset: Any, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call a method of a toolset, which reads and writes this episode's state."""
        toolset._inert_state = self.state
        result = function(toolset, **arguments)
        return self._loop.run(result) if inspect.isawaitable(result) else result  # type: ignore[arg-type]

    def step(self, message: str) -> Reaction:
        return Reaction(reward=None)

    async def rate(self, episode: Episode) -> float:
        """Return the weighted sum of the task's own rewards and judges."""
        trace = new_trace(self.task, self.state)
        add_messages(trace, episode.messages, first_own=self._num_opening)
        await self.task.score(trace)
        return float(trace.reward)


class PlayedEnvironment(VerifiersEnvironment):
    """A task of a taskset with its own `Env`, whose `run` asks the policy for each turn."""

    concurrency = 16

    def __init__(self, task: Any, shared: Sequence[Any], loop: BackgroundLoop, env: Any) -> None:
        super().__init__(task, shared, loop)
        self._env = env
        self._player: _Player | None = None

    def reset(self) -> Sequence[Turn]:
        self._player = _Player(self.task, self.state)
        turn = self._loop.run(self._player.start(self._env))
        if turn is None:
            raise DataError(f"the environment of the task {self.task.key} ended before a turn.")
        return self._read_opening(self.task.data.prompt if turn is _BARE else turn)

    def step(self, message: str) -> Reaction:
        assert self._player is not None
        turn = self._loop.run(self._player.answer(message))
        if turn is None:
            return Reaction(reward=float(self._player.trace.reward))
        if turn is _BARE:
            raise DataError(f"the environment of the task {self.task.key} sent a turn without text")
        messages = [Turn("user", text) for _, text in _read_texts(turn)]
        return Reaction(messages, is_over=False)

    def close(self) -> None:
        player, self._player = self._player, None
        if player is not None:
            self._loop.run(player.close())


_BARE = object()
"""Turn without a message: the conversation opens with the task's prompt."""


class _Player:
    """The single agent of an `Env`, as used by its `run`; its turns are the policy's."""

    def __init__(self, task: Any, state: Any) -> None:
        self.task = task
        self.trace = new_trace(task, state)
        # The environment waits for a reply while the policy waits for its next turn.
        self._turns: asyncio.Queue[Any] = asyncio.Queue()
        self._replies: asyncio.Queue[str] = asyncio.Queue()
        self._running: asyncio.Task[None] | None = None

    # ---- of the environment

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[_Player]:
        """Open an exchange with the policy, which the task scores at its end."""
        yield self
        self.trace.is_completed = self.trace.ok = True
        await task.score(self.trace)

    async def turn(self, message: Any = None) -> Any:
        """Send a message to the policy and wait for its reply."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage

        is_bare = message is None
        content = self.task.data.prompt if is_bare else message
        messages = [Turn(role, text) for role, text in _read_texts(content)]  # type: ignore[arg-type]
        # None of them is the policy's own.
        add_messages(self.trace, messages, first_own=len(messages))
        self._turns.put_nowait(_BARE if is_bare else message)
        reply = await self._replies.get()
        add_messages(self.trace, [Turn("assistant", reply)])
        return Segment(messages=[AssistantMessage(content=reply)], root_reply=reply)

    # ---- of the policy

    async def start(self, env: Any) -> Any:
        """Start the environment and return its first turn, or None at its end."""
        (name,) = _agent_names(type(env))
        agents = SimpleNamespace(**{name: self})
        self._running = asyncio.create_task(env.run(self.task, agents))
        return await self._next()

    async def answer(self, text: str) -> Any:
        """Reply to the turn and return the next one, or None at the end."""
        self._replies.put_nowait(text)
        return await self._next()

    async def _next(self) -> Any:
        assert self._running is not None
        turn = asyncio.create_task(self._turns.get())
        # The environment may end, or fail, instead of sending a turn.
        await asyncio.wait({turn, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if turn.done():
            return turn.result()
        turn.cancel()
        return self._running.result()

    async def close(self) -> None:
        """End an exchange that is still running."""
        if self._running is not None and not self._running.done():
            self._running.cancel()
            await asyncio.wait({self._running})


def new_trace(task: Any, state: Any) -> Any:
    """Return an empty trace of a task."""
    from verifiers import v1

    trace_task = v1.TraceTask(
        type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
    )
    return v1.Trace(
        task=trace_task,
        agent=v1.AgentInfo(config=v1.AgentConfig()),
        state=state,
        is_completed=True,
        ok=True,
        stop_condition="agent_completed",
    )


def add_messages(trace: Any, messages: Sequence[Turn], *, first_own: int = 0) -> None:
    """Append messages to a trace, and mark those of the policy as sampled."""
    from verifiers import v1

    message_classes = {"user": v1.UserMessage, "system": v1.SystemMessage}
    # Identities of calls whose results have not come.
    open_calls: list[str] = []
    for index, turn in enumerate(messages):
        node_number = len(trace.nodes)
        message: Any
        if turn.role == "assistant":
            open_calls = []
            parts = []
            for call_index, call in enumerate(turn.calls):
                identity = f"call_{node_number}_{call_index}"
                arguments = json.dumps(call.arguments)
                parts.append(v1.ToolCall(id=identity, name=call.name, arguments=arguments))
                open_calls.append(identity)
            message = v1.AssistantMessage(
                content=turn.text, reasoning_content=turn.reasoning, tool_calls=parts or None
            )
        elif turn.role == "tool":
            # A wrong call has a result, too, although it is none of the calls.
            identity = open_calls.pop(0) if open_calls else f"call_{node_number}"
            message = v1.ToolMessage(tool_call_id=identity, content=turn.text)
        else:
            message = message_classes[turn.role](content=turn.text)
        is_sampled = turn.role == "assistant" and index >= first_own
        parent = node_number - 1 if node_number else None
        trace.nodes.append(v1.MessageNode(parent=parent, message=message, sampled=is_sampled))


@cache
def find_tools(toolset_class: type) -> list[Tool]:
    """Return the tools of a toolset, as functions of it."""
    from verifiers.v1.utils.decorators import discover_decorated

    # Without its constructor, which may start what the tools need.
    blank: Any = object.__new__(toolset_class)
    prefix = f"{blank.server_name}_" if blank.server_name else ""
    tools = []
    for method in discover_decorated(blank, "tool"):
        function = method.__func__

        @wraps(function)
        def call(*positional: Any, _function: Any = function, **arguments: Any) -> Any:
            return _function(*positional, **arguments)

        name = prefix + (getattr(method, "tool_name", None) or function.__name__)
        tool = tool_of(MethodType(call, blank), name)
        description = inspect.getdoc(function) or ""
        tools.append(replace(tool, description=description, function=function))
    return tools


@register_task(TaskType.VERIFIERS)
class VerifiersTask(Task):
    """Tasks of a v1 taskset of `verifiers`, with their own prompts and rewards.

    The policy answers as in verifiers' `null` harness, after calls of the taskset's tools, which
    run in this process. An `Env` of the taskset with one agent plays against the policy turn by
    turn. Containers, runtimes, several agents and images are refused. The first tasks are held out.
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

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        taskset_class, env_class = _find_taskset(parameters.taskset)
        config = _build_config(taskset_class, parameters)
        self._loop = BackgroundLoop()
        try:
            taskset = taskset_class(config)
            _check_support(taskset_class, env_class, taskset, parameters.taskset)
            # One server for all episodes, as in verifiers.
            self._shared = list(taskset_class.toolsets(config))
            for toolset in self._shared:
                self._loop.run(toolset.setup())
            self._env = None if env_class is None else _build_env(env_class, taskset)
            self._tasks = self._split(taskset)
        except NipAstraError:
            raise
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip(" *")]
            raise DataError(
                f"the taskset {parameters.taskset!r} cannot be loaded: {type(error).__name__}: "
                f"{' '.join(lines)[:200]}. Provide what it needs."
            ) from error

    def _split(self, taskset: Any) -> dict[Split, list[Any]]:
        options = self.parameters
        if options.num_train is None and not taskset.bounded:
            raise ConfigurationError(
                f"the taskset {options.taskset!r} is infinite. Set task.task.num_train."
            )
        # Held-out tasks are the first ones, so that a larger num_train leaves them as they are.
        tasks = iter(taskset)
        by_split: dict[Split, list[Any]] = {
            "test": list(itertools.islice(tasks, options.num_test)),
            "dev": list(itertools.islice(tasks, options.num_dev)),
            "train": list(itertools.islice(tasks, options.num_train)),
        }
        if not all(by_split.values()):
            num_tasks = sum(map(len, by_split.values()))
            raise DataError(
                f"the taskset {options.taskset!r} has only {num_tasks} tasks, too few for "
                f"num_test={options.num_test}, num_dev={options.num_dev} and "
                "training. Lower task.task.num_test and num_dev."
            )
        return by_split

    def num_problems(self, split: Split) -> int:
        return len(self._tasks[split])

    def environment(self, split: Split, index: int) -> VerifiersEnvironment:
        tasks = self._tasks[split]
        task = tasks[index % len(tasks)]
        if self._env is None:
            return VerifiersEnvironment(task, self._shared, self._loop)
        return PlayedEnvironment(task, self._shared, self._loop, self._env)

    def rate(self, episodes: Sequence[Episode]) -> None:
        """Score all episodes concurrently."""

        async def score_all() -> list[float]:
            scores = []
            for episode in episodes:
                environment = episode.environment
                assert isinstance(environment, VerifiersEnvironment)
                scores.append(environment.rate(episode))
            return list(await asyncio.gather(*scores))

        try:
            rewards = self._loop.run(score_all())
        except Exception as error:
            raise DataError(
                f"scoring of the taskset {self.parameters.taskset!r} failed: "
                f"{describe_error(error)}. Fix the taskset."
            ) from error
        for episode, reward in zip(episodes, rewards, strict=True):
            episode.reward = reward


def _read_texts(messages: Any) -> list[tuple[str, str]]:
    """Return roles and texts of a text or of messages."""
    from verifiers.v1.types import content_text

    if isinstance(messages, str):
        return [("user", messages)]
    texts = []
    for message in messages or []:
        if message.role == "tool" or getattr(message, "tool_calls", None):
            raise DataError("a prompt has calls of tools, which is not supported. Leave it out.")
        # The content is a text, or a list of parts.
        parts = [part for part in message.content if not isinstance(part, str)]
        if any(part.type != "text" for part in parts):
            raise DataError("a message has an image, which is not supported. Choose a text task.")
        texts.append((message.role, content_text(message.content)))
    return texts


def _find_taskset(name: str) -> tuple[Any, Any]:
    """Return the taskset's class and that of its environment, if any."""
    v1 = import_extra("verifiers.v1", f"the taskset {name!r}", "verifiers")
    if name.endswith(".py"):
        module = module_of(load_plugin(name))
    else:
        # As verifiers finds them: owner/name@version is installed as name.
        module_name = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
        shipped_name = f"{_TASKSETS}.{module_name}"
        if importlib.util.find_spec(shipped_name) is not None:
            module_name = shipped_name
        try:
            module = module_of(load_plugin(module_name))
        except ImportError as error:
            raise MissingDependencyError(
                f"the taskset {name!r} cannot be imported: {error}. Install what it needs."
            ) from error
    has_exports = hasattr(module, "__all__")
    exported_names = module.__all__ if has_exports else list(vars(module))
    tasksets, envs = [], []
    for exported_name in exported_names:
        exported = getattr(module, exported_name, None)
        if not isinstance(exported, type):
            continue
        if issubclass(exported, v1.Env):
            envs.append(exported)
        # Without `__all__`, classes that the module has only imported do not count.
        is_offered = has_exports or exported.__module__ == module.__name__
        if issubclass(exported, v1.Taskset) and exported is not v1.Taskset and is_offered:
            tasksets.append(exported)
    if len(tasksets) != 1:
        raise ConfigurationError(
            f"the module of the taskset {name!r} exports {len(tasksets)} subclasses of "
            "verifiers.v1.Taskset. Name exactly one in its __all__."
        )
    if len(envs) > 1:
        _refuse(name, f"has {len(envs)} environments (Env)")
    return tasksets[0], envs[0] if envs else None


def _find_env_config(env_class: Any) -> Any:
    """Return the class of an environment's configuration."""
    from verifiers import v1
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(env_class, v1.EnvConfig, origin=v1.Env) or v1.EnvConfig


def _build_env(env_class: Any, taskset: Any) -> Any:
    """Create an environment without the harness, servers and runtimes of an evaluation."""
    env = object.__new__(env_class)
    env.config = _find_env_config(env_class)()
    env.taskset = taskset
    return env


def _agent_names(env_class: Any) -> list[str]:
    from verifiers import v1

    fields = _find_env_config(env_class).model_fields
    return [name for name, field in fields.items() if isinstance(field.default, v1.AgentConfig)]


def _build_config(taskset_class: Any, parameters: Any) -> Any:
    from verifiers.v1 import Taskset, TasksetConfig
    from verifiers.v1.utils.generic import concrete_type

    config_class = concrete_type(taskset_class, TasksetConfig, origin=Taskset) or TasksetConfig
    try:
        return config_class.model_validate({**parameters.options, "id": parameters.taskset})
    except ValueError as error:
        raise ConfigurationError(
            f"the taskset {parameters.taskset!r} rejects task.task.options="
            f"{parameters.options}: {error}."
        ) from error


def _check_support(taskset_class: Any, env_class: Any, taskset: Any, name: str) -> None:
    """Check that a taskset needs nothing that this process does not offer."""
    from verifiers import v1

    task_class = taskset_class.task_type()
    if task_class.NEEDS_CONTAINER:
        _refuse(name, "needs a container")
    if env_class is not None:
        agents = _agent_names(env_class)
        if len(agents) != 1:
            _refuse(name, f"has {len(agents)} agents ({', '.join(agents)})")
        for hook in ("setup", "finalize", "start", "stop"):
            if getattr(env_class, hook) is not getattr(v1.Env, hook):
                _refuse(name, f"has an environment with {hook}")
    shared_toolsets = taskset_class.toolsets(taskset.config)
    for toolset in [*shared_toolsets, *task_class.toolsets(taskset.config.task)]:
        class_name = type(toolset).__name__
        if not isinstance(toolset, v1.Toolset) or type(toolset).register is not v1.Toolset.register:
            _refuse(name, f"has tools of its own protocol ({class_name})")
        has_server = bool(getattr(toolset.config, "url", None))
        is_colocated = bool(getattr(toolset.config, "colocated", False))
        runtime = getattr(toolset.config, "runtime", None)
        has_other_runtime = runtime is not None and runtime.type != "subprocess"
        if has_server or is_colocated or has_other_runtime:
            _refuse(name, f"has tools that run elsewhere ({class_name})")
    for hook in ("setup", "finalize"):
        if getattr(task_class, hook) is not getattr(v1.Task, hook):
            _refuse(name, f"prepares a runtime ({hook})")
    task = next(iter(taskset.take(1)), None)
    hooks = [] if task is None else [*task.hooks("reward"), *task.hooks("metric")]
    for function in hooks:
        runtime = inspect.signature(function).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            _refuse(name, f"scores within a runtime ({function.__name__})")


def _refuse(name: str, reason: str) -> None:
    raise ConfigurationError(
        f"the taskset {name!r} {reason}, which is not supported. Choose another taskset, or write "
        "the environment as a task."
    )
