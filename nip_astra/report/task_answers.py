"""What a policy answered to the problems of its task, by table and iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.report.conversations import TITLES, order_of
from nip_astra.report.records import RunRecord, items, number, text
from nip_astra.report.spec import Context

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
    """Answers of one iteration; `num_answers` and `mean_reward` are of all that were kept."""

    title: str
    step: int
    answers: list[Answer]
    num_answers: int
    mean_reward: float | None


def task_answers(run: RunRecord) -> Context | None:
    """The tables of a run's answers, the newest iteration of each first."""
    tables = []
    for name in sorted(run.answers, key=lambda name: (order_of(name), name)):
        by_step: dict[int, list[Mapping[str, Any]]] = {}
        for row in run.answers[name]:
            by_step.setdefault(int(number(row.get("step")) or 0), []).append(row)
        title = TITLES.get(name, name.replace("evaluations/", "Evaluation "))
        tables += [_table(title, step, by_step[step]) for step in sorted(by_step, reverse=True)]
    return {"tables": tables} if tables else None


def _table(title: str, step: int, rows: Sequence[Mapping[str, Any]]) -> AnswerTable:
    rewards = [number(row.get("reward")) for row in rows]
    known = [one for one in rewards if one is not None]
    mean = sum(known) / len(known) if known else None
    return AnswerTable(title, step, [_answer(r) for r in rows[:MAX_ANSWERS]], len(rows), mean)


def _answer(row: Mapping[str, Any]) -> Answer:
    pairs = [one for one in items(row.get("messages")) if isinstance(one, list) and len(one) == 2]
    messages = [(text(role), text(said)) for role, said in pairs]
    opening = next((said for role, said in messages if role == "user"), "")
    return Answer(opening, number(row.get("reward")), messages)
