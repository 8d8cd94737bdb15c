"""What a policy answered to the problems of its task, by table and iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.report.conversations import TITLES, order_of
from nip_astra.report.records import RunRecord, items, mapping, number, text
from nip_astra.report.spec import Context

_MEASUREMENTS = {"before": "before", "evaluation": "after"}
"""Parts of results.json by the names of their tables."""
MAX_ANSWERS = 24
"""Answers of a table that are shown."""


@dataclass(frozen=True)
class Answer:
    """An episode of a problem.

    Attributes
    ----------
    messages : list of (role, text)
    """

    opening: str
    reward: float | None
    messages: list[tuple[str, str]]


@dataclass(frozen=True)
class AnswerTable:
    """Answers of one iteration, as many of them as were kept.

    Attributes
    ----------
    num_played, mean_reward : int or None, float or None
        Of all answers, kept or not.
    """

    title: str
    step: int
    answers: list[Answer]
    num_played: int | None
    mean_reward: float | None


def is_task_run(run: RunRecord) -> bool:
    """Whether a policy answers the problems of a task."""
    return "policy" in mapping(run.hyper_params.get("task"))


def task_answers(run: RunRecord) -> Context | None:
    """The tables of a run's answers, the newest iteration of each first."""
    tables = []
    for name in sorted(run.answers, key=lambda name: (order_of(name), name)):
        by_step: dict[int, list[Mapping[str, Any]]] = {}
        for row in run.answers[name]:
            by_step.setdefault(int(number(row.get("step")) or 0), []).append(row)
        title = TITLES.get(name, name.replace("evaluations/", "Evaluation "))
        for step in sorted(by_step, reverse=True):
            rows = by_step[step]
            answers = [_answer(row) for row in rows[:MAX_ANSWERS]]
            tables.append(AnswerTable(title, step, answers, *_of_all(run, name, step, rows)))
    return {"tables": tables} if tables else None


def _of_all(
    run: RunRecord, name: str, step: int, rows: Sequence[Mapping[str, Any]]
) -> tuple[int | None, float | None]:
    """Number and mean reward of all answers, of which a run's own tables keep the first few."""
    if name in _MEASUREMENTS:
        report = mapping(run.results.get(_MEASUREMENTS[name]))
        return None, number(report.get("mean_reward"))
    if name.startswith("evaluations/"):
        known = [one for row in rows if (one := number(row.get("reward"))) is not None]
        return len(rows), sum(known) / len(known) if known else None
    of_step: Mapping[str, Any] = next((row for row in run.metrics if row.get("step") == step), {})
    count = number(of_step.get("rollout/num_trajectories"))
    return None if count is None else int(count), number(of_step.get("rollout/reward_mean"))


def _answer(row: Mapping[str, Any]) -> Answer:
    pairs = [one for one in items(row.get("messages")) if isinstance(one, list) and len(one) == 2]
    messages = [(text(role), text(said)) for role, said in pairs]
    opening = next((said for role, said in messages if role == "user"), "")
    return Answer(opening, number(row.get("reward")), messages)
