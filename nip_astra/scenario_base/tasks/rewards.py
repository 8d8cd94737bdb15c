"""Weighted reward functions in TRL's calling convention, and scorers as rewards.

A reward function is `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, as
`trl.GRPOTrainer` calls it, plain or `async`. Completions are without reasoning, which is in
`reasonings`, with None for an answer without a thought. `@register_reward` gives a function a name
for parameter files.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch

from nip_astra.deadlines import within_deadline
from nip_astra.errors import ConfigurationError, NipAstraError, TaskError, counted, describe_error
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import CheckedName, SubParameters
from nip_astra.registry import Registry
from nip_astra.rollouts.messages import Turn
from nip_astra.scenario_base.tasks.base import Episode, TrainingProgress
from nip_astra.scenario_base.tasks.tools import tool_figures
from nip_astra.scorers.base import Scorer, ScorerParameters, build_scorer
from nip_astra.scorers.python import UserFunction
from nip_astra.utils.background_loop import BackgroundLoop
from nip_astra.utils.user_code import process_state_kept

logger = logging.getLogger(__name__)

REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward",
    package="nip_astra.scenario_base.tasks",
    members=("exact", "contains"),
    modules={"exact": "rewards", "contains": "rewards"},
)
_ARGUMENTS = ("prompts", "completions", "completion_ids", "reasonings", "trainer_state")
_LOGGERS = ("log_metric", "log_extra")


def register_reward(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reward function under the name that parameter files use; a decorator."""
    return REWARDS.register(name)


def is_correct(completion: str, answer: str, *, contains: bool = False) -> bool:
    """Return whether a completion equals, or contains, an answer, up to whitespace."""
    text, expected = " ".join(completion.split()), " ".join(answer.split())
    return expected in text if contains else expected == text


@register_reward("exact")
def exact(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 if the completion equals the column `answer` up to whitespace, else 0.

    None for a row without an answer.
    """
    return _compared(completions, answer, contains=False)


@register_reward("contains")
def contains(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 if the completion contains the column `answer` up to whitespace, else 0.

    None for a row without an answer.
    """
    return _compared(completions, answer, contains=True)


def _compared(
    completions: Sequence[Any], answers: Sequence[Any], *, contains: bool
) -> list[float | None]:
    return [
        None if answer is None else float(is_correct(text_of(one), str(answer), contains=contains))
        for one, answer in zip(completions, answers, strict=True)
    ]


def text_of(completion: Any) -> str:
    """Return the text of a completion, plain or conversational."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


class RewardParameters(SubParameters):
    """A reward: a function or a scorer, and its weight."""

    function: CheckedName | None = None
    """`path/to/file.py:function`, `package.module:function`, or a registered name: exact, contains.
    The module is imported, which executes it."""
    scorer: Annotated[ScorerParameters | None, where("function", None)] = None  # type: ignore[valid-type]
    """A scorer in place of a function; the reward is its score, 0 to 1."""
    weight: float = 1.0
    """Factor of this reward in the sum."""


class WeightedRewards:
    """Weighted sum of several rewards.

    A reward that is None does not apply to a sample: the others count. A sample to which none
    applies has no reward.
    """

    def __init__(
        self,
        parameters: Mapping[str, RewardParameters],
        column_names: Sequence[str],
        *,
        device: torch.device,
        scenario_dir: Path | None,
    ) -> None:
        self.weights = {name: one.weight for name, one in parameters.items()}
        self.scorers: dict[str, Scorer] = {}
        self._functions: dict[str, UserFunction] = {}
        self._columns = tuple(column_names)
        # Clients that a function keeps belong to the loop of their first use.
        self._loop = BackgroundLoop()
        for name, one in parameters.items():
            if (one.function is None) is (one.scorer is None):
                raise ConfigurationError(
                    f"the reward {name!r} needs either a function or a scorer. Set "
                    f"task.task.functions.{name}.function to file.py:function, or .scorer."
                )
            if one.scorer is not None:
                self.scorers[name] = build_scorer(
                    one.scorer, device=device, scenario_dir=scenario_dir
                )
            else:
                assert one.function is not None
                self._functions[name] = self._checked(one.function, scenario_dir)

    def _checked(self, reference: str, scenario_dir: Path | None) -> UserFunction:
        is_name = ":" not in reference
        function = UserFunction(
            reference, scenario_dir, REWARDS.get(reference) if is_name else None
        )
        hidden = [
            name
            for name in self._columns
            if name in (*_ARGUMENTS, *_LOGGERS) and function.takes(name)
        ]
        if hidden and not is_name:
            logger.warning(
                "the columns %s of the data do not reach the reward function %r: arguments of "
                "these names are the framework's own. Rename the columns to read them.",
                ", ".join(hidden),
                reference,
            )
        known = {*_ARGUMENTS, *_LOGGERS, *self._columns}
        unknown = [name for name in function.required if name not in known]
        if unknown:
            raise ConfigurationError(
                f"the reward function {reference!r} needs {', '.join(unknown)}. It may take "
                f"{', '.join((*_ARGUMENTS, *_LOGGERS, *self._columns))}."
            )
        return function

    def rate(self, episodes: Sequence[Episode], progress: TrainingProgress) -> None:
        """Set `reward` and `rewards` of episodes, and keep what functions log.

        Raises
        ------
        TaskError
            If a function fails, or returns another number of values, or one that is not finite.
        """
        if not episodes:
            return
        arguments = self._arguments(episodes, progress)
        started: dict[str, Any] = {}
        for name, function in self._functions.items():
            with _naming(name), within_deadline(f"the reward function {name!r}"):
                started[name] = function.call(arguments)
        waiting = {name: result for name, result in started.items() if inspect.isawaitable(result)}
        if waiting:
            names = f"a reward function of {', '.join(waiting)}"
            with process_state_kept(names), within_deadline(names):
                results = self._loop.run(_all_of([_named(*item) for item in waiting.items()]))
            started |= zip(waiting, results, strict=True)
        values = {name: _checked_values(name, one, len(episodes)) for name, one in started.items()}
        exchanges = [one.exchange() for one in episodes] if self.scorers else []
        for name, scorer in self.scorers.items():
            scores = scorer.rate(exchanges).scores_N.tolist()
            values[name] = [None if math.isnan(score) else score for score in scores]
        for index, episode in enumerate(episodes):
            episode.rewards = {name: values[name][index] for name in self.weights}
            known = [(self.weights[n], v) for n, v in episode.rewards.items() if v is not None]
            episode.reward = sum(weight * value for weight, value in known) if known else None

    def _arguments(self, episodes: Sequence[Episode], progress: TrainingProgress) -> dict[str, Any]:
        prompts: list[Any] = []
        completions: list[Any] = []
        for one in episodes:
            *opening, answer = one.messages
            given = getattr(one.environment, "prompt", opening[-1].text if opening else "")
            messages = getattr(given, "messages", ())
            plain = [_message_of(message) for message in messages]
            prompts.append(plain or str(given))
            completions.append([_message_of(answer)] if plain else answer.text)
        rows = [getattr(one.environment, "row", dict(one.environment.columns)) for one in episodes]

        def log_metric(name: str, value: float) -> None:
            episodes[0].logged.append((str(name), float(value)))

        def log_extra(name: str, values: Sequence[Any]) -> None:
            for one, value in zip(episodes, values, strict=True):
                one.extra[str(name)] = json.loads(json.dumps(value, default=_plain))

        return {
            **{name: [row.get(name) for row in rows] for name in self._columns},
            "prompts": prompts,
            "completions": completions,
            "reasonings": [one.messages[-1].reasoning for one in episodes],
            "completion_ids": [list(one.completion_ids) for one in episodes],
            "trainer_state": _trainer_state(progress),
            "log_metric": log_metric,
            "log_extra": log_extra,
        }


def _message_of(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message in OpenAI's form, with reasoning and calls if it has them."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        calls = enumerate(turn.calls)
        message["tool_calls"] = [call.as_message_part(f"call_{place}") for place, call in calls]
    return message


def _plain(value: Any) -> Any:
    """Return a number or array of NumPy or torch as plain values, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _trainer_state(progress: TrainingProgress) -> Any:
    from transformers import TrainerState

    return TrainerState(global_step=progress.iteration, max_steps=progress.num_iterations)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the reward function to an error."""
    try:
        yield
    except NipAstraError:
        raise
    except Exception as error:
        raise TaskError(
            f"the reward function {name!r} failed: {describe_error(error)}. Correct it, "
            "then resume the run."
        ) from error


async def _named(name: str, result: Awaitable[Any]) -> Any:
    with _naming(name):
        return await result


async def _all_of(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*results))


def _checked_values(name: str, values: Any, count: int) -> list[float | None]:
    with _naming(name):
        found = list(values)
    if len(found) != count:
        raise TaskError(
            f"the reward function {name!r} returned {counted(len(found), 'value')} for "
            f"{counted(count, 'completion')}. Return one for each."
        )
    return [None if value is None else _checked_value(name, value) for value in found]


def _checked_value(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise TaskError(
            f"the reward function {name!r} returned {str(value)[:80]!r}. Return finite numbers, or "
            "None where it does not apply."
        )
    return number


def episode_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over episodes: each reward by name, what reward functions log, use of tools.

    `rewards/<name>/mean` and `/std` over the episodes to which the reward applies, the means of
    logged metrics under their own names, `environment/<name>` of environments, and `tool_figures`.
    """
    values: dict[str, list[float]] = {}
    logged: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.rewards.items():
            if value is not None:
                values.setdefault(name, []).append(value)
        named = [(f"environment/{name}", value) for name, value in episode.figures.items()]
        for name, value in (*episode.logged, *named):
            logged.setdefault(name, []).append(value)
    figures = {name: fmean(some) for name, some in logged.items()}
    for name, some in values.items():
        figures[f"rewards/{name}/mean"] = fmean(some)
        figures[f"rewards/{name}/std"] = stdev(some) if len(some) > 1 else 0.0
    return figures | tool_figures([episode.tool_counts for episode in episodes])
