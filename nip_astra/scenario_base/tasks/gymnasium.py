"""Text environments with Gymnasium's interface, by class or by id, and games of TextArena."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import JsonValue

from nip_astra.errors import ConfigurationError, NipAstraError, describe_error
from nip_astra.lazy import import_extra
from nip_astra.parameters.parameters_base import CheckedName
from nip_astra.parameters.types import TaskType
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import (
    Environment,
    Reaction,
    SeededTask,
    Split,
    close_environment,
    register_task,
    wrong_result,
)
from nip_astra.scorers.python import find_function

TEXTARENA = "textarena:"


class GymnasiumEnvironment(Environment):
    """One episode of an environment, started with one seed; the reward is the return."""

    def __init__(self, make: Callable[[], Any], seed: int) -> None:
        self._environment = make()
        self._seed = seed
        self._return = 0.0
        self.columns = (("seed", seed),)

    def reset(self) -> Sequence[Turn]:
        self._return = 0.0
        result = self._environment.reset(seed=self._seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise wrong_result(self._environment, "reset", result, "an observation and a dict")
        observation, _ = result
        return [Turn("user", self._require_text("reset", observation))]

    def step(self, message: str) -> Reaction:
        result = self._environment.step(message)
        if not isinstance(result, tuple) or len(result) != 5:
            expected = "observation, reward, terminated, truncated and a dict"
            raise wrong_result(self._environment, "step", result, expected)
        observation, reward, is_terminated, is_truncated, _ = result
        self._return += float(reward)
        if is_terminated or is_truncated:
            return Reaction(reward=self._return)
        text = self._require_text("step", observation)
        return Reaction([Turn("user", text)], is_over=False)

    def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            close()

    def _require_text(self, hook: str, observation: Any) -> str:
        if not isinstance(observation, str):
            raise wrong_result(self._environment, hook, observation, "a text as observation")
        return observation


class TextArenaGame:
    """A game of the package textarena for one player, with Gymnasium's interface.

    Games draw from the global generators of Python and NumPy, so each has states of its own.
    """

    _lock = threading.Lock()

    def __init__(self, name: str, **arguments: Any) -> None:
        textarena = import_extra("textarena", f"the game {name!r}", "textarena")
        self._name, self._seen = name, ""
        self._states = _seed_states(0)
        with self._own_draws(), self._refusing():
            self._game = textarena.make(name, **arguments)

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        self._seen, seed = "", seed % 2**32
        self._states = _seed_states(seed)
        with self._own_draws(), self._refusing():
            self._game.reset(num_players=1, seed=seed)
            return self._news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        with self._own_draws():
            is_over, _ = self._game.step(action)
            if is_over:
                rewards, _ = self._game.close()
                return "", float(rewards[0]), True, False, {}
            return self._news(), 0.0, False, False, {}

    def _news(self) -> str:
        """Return what the observation adds to the last one, which it may repeat."""
        before, (_, self._seen) = self._seen, self._game.get_observation()
        return self._seen.removeprefix(before).strip()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TypeError:
            raise
        # Games raise errors of any type, also for files and services that they lack.
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigurationError(
                f"textarena cannot start {self._name!r} for one player: {reason}"
            ) from error

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Let the block draw from this game's states of the global generators."""
        # The generators are the process's, so one game draws at a time.
        with self._lock:
            process_states = _read_states()
            _set_states(self._states)
            try:
                yield
            finally:
                self._states = _read_states()
                _set_states(process_states)


class _GeneratorStates(NamedTuple):
    """States of the global generators of Python and NumPy."""

    python: Any
    numpy: Any


def _seed_states(seed: int) -> _GeneratorStates:
    python = random.Random(seed).getstate()
    numpy = np.random.RandomState(seed).get_state()
    return _GeneratorStates(python, numpy)


def _read_states() -> _GeneratorStates:
    return _GeneratorStates(random.getstate(), np.random.get_state())


def _set_states(states: _GeneratorStates) -> None:
    random.setstate(states.python)
    np.random.set_state(states.numpy)


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
        the package gymnasium; `textarena:ID` for a game of textarena for one player. The module is
        imported, which executes it."""
        arguments: dict[str, JsonValue] = {}
        """Keyword arguments of the class."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self._maker = _find_maker(parameters.environment, self.scenario_dir)
        try:
            # One is made at once, so that faults are reported before the run.
            example = self._make()
            if isinstance(example, TextArenaGame):
                example.reset(seed=0)
        except NipAstraError:
            raise
        except Exception as error:  # of the environment's own code
            raise ConfigurationError(
                f"{parameters.environment} cannot be built: {describe_error(error)}. Set "
                "task.task.arguments, or fix its class."
            ) from error
        for name in ("observation_space", "action_space"):
            space = type(getattr(example, name, None)).__name__
            if space not in ("Text", "NoneType"):
                raise ConfigurationError(
                    f"the {name} of {parameters.environment} is {space}. A language model needs "
                    "texts: use gymnasium.spaces.Text, or wrap the environment."
                )
        close_environment(example)

    def environment(self, split: Split, index: int) -> GymnasiumEnvironment:
        return GymnasiumEnvironment(self._make, self.seed_of(split, index))

    def _make(self) -> Any:
        return self._maker(**self.parameters.arguments)


def _find_maker(name: str, scenario_dir: Path | None) -> Callable[..., Any]:
    """Return the function that makes environments of a name, from keyword arguments."""
    if name.startswith(TEXTARENA):
        return partial(TextArenaGame, name.removeprefix(TEXTARENA))
    if ":" in name:
        _, environment_class = find_function(name, scenario_dir)
        return environment_class
    gymnasium = import_extra("gymnasium", f"the environment {name!r}", "gymnasium")

    def make(**arguments: Any) -> Any:
        try:
            # Its checks are for arrays.
            return gymnasium.make(name, disable_env_checker=True, **arguments).unwrapped
        except gymnasium.error.Error as error:
            raise ConfigurationError(f"gymnasium cannot make {name!r}: {error}") from error

    return make
