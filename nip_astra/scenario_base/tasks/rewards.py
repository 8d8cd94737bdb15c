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

REWARDS: Registry[Callable[..., Any]] = Registry("reward")
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
    return _compare_answers(completions, answer, contains=False)


@register_reward("contains")
def contains(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 1 if the completion contains the column `answer` up to whitespace, else 0.

    None for a row without an answer.
    """
    return _compare_answers(completions, answer, contains=True)


def _compare_answers(
    completions: Sequence[Any], answers: Sequence[Any], *, contains: bool
) -> list[float | None]:
    rewards: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        if answer is None:
            rewards.append(None)
        else:
            text = read_text(completion)
            rewards.append(float(is_correct(text, str(answer), contains=contains)))
    return rewards


def read_text(completion: Any) -> str:
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
        self.weights = {name: reward.weight for name, reward in parameters.items()}
        self.scorers: dict[str, Scorer] = {}
        self._functions: dict[str, UserFunction] = {}
        self._columns = tuple(column_names)
        # Clients that a function keeps belong to the loop of their first use.
        self._loop = BackgroundLoop()
        for name, reward in parameters.items():
            if (reward.function is None) is (reward.scorer is None):
                raise ConfigurationError(
                    f"the reward {name!r} needs either a function or a scorer. Set "
                    f"task.task.functions.{name}.function to file.py:function, or .scorer."
                )
            if reward.scorer is not None:
                self.scorers[name] = build_scorer(
                    reward.scorer, device=device, scenario_dir=scenario_dir
                )
            else:
                assert reward.function is not None
                self._functions[name] = self._load_function(reward.function, scenario_dir)

    def _load_function(self, reference: str, scenario_dir: Path | None) -> UserFunction:
        """Load a reward function, and check that it gets every argument that it requires."""
        is_registered = ":" not in reference
        registered = REWARDS.get(reference) if is_registered else None
        function = UserFunction(reference, scenario_dir, registered)
        reserved = (*_ARGUMENTS, *_LOGGERS)
        hidden = [name for name in self._columns if name in reserved and function.takes(name)]
        if hidden and not is_registered:
            logger.warning(
                "the columns %s of the data do not reach the reward function %r: arguments of "
                "these names are the framework's own. Rename the columns to read them.",
                ", ".join(hidden),
                reference,
            )
        available = (*reserved, *self._columns)
        unknown = [name for name in function.required if name not in available]
        if unknown:
            raise ConfigurationError(
                f"the reward function {reference!r} needs {', '.join(unknown)}. It may take "
                f"{', '.join(available)}."
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
        rewards = self._call_functions(episodes, progress)
        if self.scorers:
            exchanges = [episode.exchange() for episode in episodes]
            for name, scorer in self.scorers.items():
                scores = scorer.rate(exchanges).scores_N.tolist()
                rewards[name] = [None if math.isnan(score) else score for score in scores]
        for index, episode in enumerate(episodes):
            episode.rewards = {name: rewards[name][index] for name in self.weights}
            weighted = [
                self.weights[name] * reward
                for name, reward in episode.rewards.items()
                if reward is not None
            ]
            episode.reward = sum(weighted) if weighted else None

    def _call_functions(
        self, episodes: Sequence[Episode], progress: TrainingProgress
    ) -> dict[str, list[float | None]]:
        """Return the results of each reward function, one per episode."""
        arguments = self._build_arguments(episodes, progress)
        results: dict[str, Any] = {}
        for name, function in self._functions.items():
            with _naming(name), within_deadline(f"the reward function {name!r}"):
                results[name] = function.call(arguments)
        # Asynchronous functions run together.
        pending = {name: result for name, result in results.items() if inspect.isawaitable(result)}
        if pending:
            names = f"a reward function of {', '.join(pending)}"
            with process_state_kept(names), within_deadline(names):
                results |= self._loop.run(_await_all(pending))
        return {
            name: _check_rewards(name, result, len(episodes)) for name, result in results.items()
        }

    def _build_arguments(
        self, episodes: Sequence[Episode], progress: TrainingProgress
    ) -> dict[str, Any]:
        """Return the arguments by name, as TRL passes them."""
        prompts: list[Any] = []
        completions: list[Any] = []
        rows: list[Mapping[str, Any]] = []
        for episode in episodes:
            *opening, answer = episode.messages
            environment = episode.environment
            prompt = getattr(environment, "prompt", opening[-1].text if opening else "")
            messages = [_to_openai(message) for message in getattr(prompt, "messages", ())]
            if messages:
                prompts.append(messages)
                completions.append([_to_openai(answer)])
            else:
                prompts.append(str(prompt))
                completions.append(answer.text)
            rows.append(getattr(environment, "row", dict(environment.columns)))

        def log_metric(name: str, value: float) -> None:
            episodes[0].logged.append((str(name), float(value)))

        def log_extra(name: str, column: Sequence[Any]) -> None:
            for episode, cell in zip(episodes, column, strict=True):
                episode.extra[str(name)] = json.loads(json.dumps(cell, default=_plain))

        columns = {name: [row.get(name) for row in rows] for name in self._columns}
        return {
            **columns,
            "prompts": prompts,
            "completions": completions,
            "reasonings": [episode.messages[-1].reasoning for episode in episodes],
            "completion_ids": [list(episode.completion_ids) for episode in episodes],
            "trainer_state": _trainer_state(progress),
            "log_metric": log_metric,
            "log_extra": log_extra,
        }


def _to_openai(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message in OpenAI's form, with reasoning and calls if it has them."""
    message: dict[str, Any] = {"role": turn.role, "content": turn.text}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [
            call.as_message_part(f"call_{index}") for index, call in enumerate(turn.calls)
        ]
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


async def _await_all(pending: Mapping[str, Awaitable[Any]]) -> dict[str, Any]:
    """Return the results of asynchronous reward functions by name."""

    async def await_named(name: str, result: Awaitable[Any]) -> Any:
        with _naming(name):
            return await result

    results = await asyncio.gather(*(await_named(*item) for item in pending.items()))
    return dict(zip(pending, results, strict=True))


def _check_rewards(name: str, result: Any, count: int) -> list[float | None]:
    with _naming(name):
        rewards = list(result)
    if len(rewards) != count:
        raise TaskError(
            f"the reward function {name!r} returned {counted(len(rewards), 'value')} for "
            f"{counted(count, 'completion')}. Return one for each."
        )
    return [None if reward is None else _check_reward(name, reward) for reward in rewards]


def _check_reward(name: str, reward: Any) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise TaskError(
            f"the reward function {name!r} returned {str(reward)[:80]!r}. Return finite numbers, "
            "or None where it does not apply."
        )
    return number


def episode_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return means over episodes: each reward by name, what reward functions log, use of tools.

    `rewards/<name>/mean` and `/std` over the episodes to which the reward applies, the means of
    logged metrics under their own names, `environment/<name>` of environments, and `tool_figures`.
    """
    rewards_by_name: dict[str, list[float]] = {}
    logged_by_name: dict[str, list[float]] = {}
    for episode in episodes:
        for name, reward in episode.rewards.items():
            if reward is not None:
                rewards_by_name.setdefault(name, []).append(reward)
        for name, metric in episode.logged:
            logged_by_name.setdefault(name, []).append(metric)
        for name, figure in episode.figures.items():
            logged_by_name.setdefault(f"environment/{name}", []).append(figure)
    figures = {name: fmean(metrics) for name, metrics in logged_by_name.items()}
    for name, rewards in rewards_by_name.items():
        figures[f"rewards/{name}/mean"] = fmean(rewards)
        figures[f"rewards/{name}/std"] = stdev(rewards) if len(rewards) > 1 else 0.0
    return figures | tool_figures([episode.tool_counts for episode in episodes])
