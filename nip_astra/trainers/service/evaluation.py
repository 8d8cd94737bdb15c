"""Measure a policy on the problems of its task, apart from its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, NothingMeasuredError
from nip_astra.evaluation.rows import Row, RowFile
from nip_astra.evaluation.storage import text_hash
from nip_astra.samplers.tasks import TaskRollout
from nip_astra.scenario_base.tasks.base import Episode, Split
from nip_astra.trainers.service.measuring import Tally
from nip_astra.trainers.service_base import ServiceTrainer
from nip_astra.utils.intervals import paired_difference


@dataclass(frozen=True)
class TaskEvaluation:
    """What is to be played.

    Attributes
    ----------
    problems : Sequence[int]
        Numbers of the problems, in order.
    num_runs : int
        Of each problem.
    """

    split: Split
    problems: Sequence[int]
    num_runs: int


def evaluation_of(trainer: ServiceTrainer, split: Split, count: int | None) -> TaskEvaluation:
    """What a trainer plays of a split by its parameters, or so many problems of it.

    Raises
    ------
    ConfigurationError
        When the data has fewer problems than were asked for.
    """
    options = trainer.options.evaluation
    is_dev = split == "dev"
    asked = options.num_dev_problems if is_dev else options.num_problems
    problems = trainer.held_out(split, asked if count is None else count)
    if count is not None and count > len(problems):
        runs = "num_dev_runs" if is_dev else "num_runs"
        raise ConfigurationError(
            f"{count} problems were to be played, but the {split} data has {len(problems)}. Ask "
            "for fewer with --num-episodes, or for several runs of each with "
            f"--set task.evaluation.{runs}=4."
        )
    return TaskEvaluation(split, problems, options.num_dev_runs if is_dev else options.num_runs)


def play_task_evaluation(
    trainer: ServiceTrainer,
    evaluation: TaskEvaluation,
    path: Path,
    on_part: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Play what is not yet in a file of rows, and tell the figures as a run's results have them.

    Parameters
    ----------
    path : Path
        Where rows are kept as they come, so that a killed evaluation goes on where it was.
    on_part : callable
        Told how many problems were played, after each part of them.
    """
    options, num_runs = trainer.options.evaluation, evaluation.num_runs
    size, problems = options.batch_size, evaluation.problems
    file = RowFile(path, size * num_runs)
    num_done = len(problems)
    if len(file.read()) < len(problems) * num_runs:
        num_done = file.recover() * size
    on_part(num_done)
    if num_done < len(problems):
        with trainer.measuring():
            for start in range(num_done, len(problems), size):
                some = problems[start : start + size]
                rollout = trainer.play_held_out(evaluation.split, some, num_runs)
                file.append(rows_of(rollout, some, num_runs, options.success_reward))
                on_part(len(some))
    rows = file.read()
    known = [row for row in rows if row["reward"] is not None]
    tally = Tally(
        options.success_reward,
        [row["problem"] for row in known],
        [row["reward"] for row in known],
        len(rows),
    )
    try:
        trainer._refuse_nothing(f"the evaluation {path.parent.name}", tally.report(num_runs))
    except NothingMeasuredError:
        # The same command plays again.
        path.unlink()
        raise
    return _with_interval(tally, tally.report(num_runs))


def rows_of(
    rollout: TaskRollout, problems: Sequence[int], num_runs: int, success_reward: float
) -> list[Row]:
    """A row for each run of some problems."""
    return [
        {
            "problem": problems[place // num_runs],
            "run": place % num_runs,
            **_told(episode),
            "reward": episode.reward,
            "is_right": None if episode.reward is None else episode.reward >= success_reward,
        }
        for place, episode in enumerate(rollout.episodes)
    ]


def _told(episode: Episode) -> Row:
    messages, environment = episode.messages, episode.environment
    own = [place for place, one in enumerate(messages) if one.role == "assistant"]
    asked = messages[: own[0]] if own else messages
    columns = [f"{name}={value}" for name, value in environment.columns]
    texts = [*(f"{one.role}: {one.text}" for one in asked), *columns, str(environment.solution)]
    return {
        # Which problem it is, whatever its number.
        "problem_hash": text_hash(texts),
        "prompt": "\n\n".join(one.text for one in asked),
        "solution": environment.solution,
        "answer": messages[own[-1]].text if own else "",
        "messages": [[one.role, one.text] for one in messages],
    }


def _with_interval(tally: Tally, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures with an interval of the mean reward over problems, where its spread is known."""
    found = paired_difference(tally.rewards, tally.problems, is_bounded=False).estimate
    if not math.isfinite(found.low):
        return figures
    place = list(figures).index("mean_reward") + 1
    items = list(figures.items())
    interval = ("mean_reward_interval", [found.low, found.high])
    return dict([*items[:place], interval, *items[place:]])
