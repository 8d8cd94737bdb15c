"""Text environments with Gymnasium's interface, by class or by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from nip_astra.errors import ConfigurationError, MissingDependencyError, TaskError
from nip_astra.parameters.parameters_base import CheckedName
from nip_astra.parameters.types import TaskType
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Reaction,
    SeededTask,
    Split,
    register_task,
)
from nip_astra.scorers.base import Message
from nip_astra.scorers.python import find_function


class GymnasiumEnvironment(Environment):
    """One episode of an environment, started with one seed; the reward is the return."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self._environment, self._seed = make(), seed
        self._return = 0.0
        self.columns = (("seed", seed),)

    def reset(self) -> Sequence[Message]:
        self._return = 0.0
        found = self._environment.reset(seed=self._seed)
        if not isinstance(found, tuple) or len(found) != 2:
            raise self._wrong("reset", found, "an observation and a dict")
        return [Message("user", self._text("reset", found[0]))]

    def step(self, message: str) -> Reaction:
        found = self._environment.step(message)
        if not isinstance(found, tuple) or len(found) != 5:
            raise self._wrong(
                "step", found, "observation, reward, terminated, truncated and a dict"
            )
        observation, reward, is_terminated, is_truncated, _ = found
        self._return += float(reward)
        if is_terminated or is_truncated:
            return Reaction(reward=self._return)
        return Reaction([Message("user", self._text("step", observation))], is_over=False)

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    def _text(self, hook: str, observation: Any) -> str:
        if not isinstance(observation, str):
            raise self._wrong(hook, observation, "a text as observation")
        return observation

    def _wrong(self, hook: str, value: object, expected: str) -> TaskError:
        name = type(self._environment).__name__
        return TaskError(f"{hook} of {name} returned {str(value)[:80]!r}. Return {expected}.")


@register_task(TaskType.GYMNASIUM)
class GymnasiumTask(SeededTask):
    """Episodes of a text environment with Gymnasium's `reset(seed=...)` and `step(action)`.

    The policy's message is the action, and observations are texts. Each problem is a seed; the
    splits have different ones.
    """

    class Parameters(SeededTask.Parameters):
        """Environment."""

        environment: CheckedName
        """`path/to/file.py:Class`, `package.module:Class`, or the id of a registered environment of
        the package gymnasium. The module is imported, which executes it."""
        arguments: dict[str, JsonValue] = {}
        """Keyword arguments of the class."""

    def __init__(self, parameters: Any, **given: Any) -> None:
        super().__init__(parameters, **given)
        self._maker = _maker(parameters.environment, self.scenario_dir)
        try:
            first = self._make()
        except TypeError as error:
            raise ConfigurationError(
                f"{parameters.environment} cannot be built: {error}. Set task.task.arguments."
            ) from error
        for name in ("observation_space", "action_space"):
            space = type(getattr(first, name, None)).__name__
            if space not in ("Text", "NoneType"):
                raise ConfigurationError(
                    f"the {name} of {parameters.environment} is {space}. A language model needs "
                    "texts: use gymnasium.spaces.Text, or wrap the environment."
                )

    def environment(self, split: Split, index: int) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(self._make, self.seed_of(split, index))

    def _make(self) -> Any:
        return self._maker(**self.parameters.arguments)


def _maker(name: str, scenario_dir: Path | None) -> Callable[..., Any]:
    if ":" in name:
        return find_function(name, scenario_dir)[1]
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependencyError(
            f"the environment {name!r} needs the package gymnasium: {error}. Install it with: pip "
            "install 'nip_astra[gymnasium]', or give file.py:Class."
        ) from error

    def make(**arguments: Any) -> Any:
        try:
            # Its checks are for arrays.
            return gymnasium.make(name, disable_env_checker=True, **arguments).unwrapped
        except gymnasium.error.Error as error:
            raise ConfigurationError(f"gymnasium cannot make {name!r}: {error}") from error

    return make
