"""Compare how policies answered the same problems of a task, problem by problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nip_astra.errors import DataError
from nip_astra.evaluation.rows import Row
from nip_astra.evaluation.text_comparison import other_conditions, paired_metric
from nip_astra.utils.statistics import holm

MATTERS = ("split", "num_runs", "success_reward", "task")
"""Parts of an evaluation that should be alike where policies are compared."""


@dataclass(frozen=True)
class TaskContender:
    """An evaluation to compare.

    Attributes
    ----------
    rows : Sequence of Row
        One a run of a problem.
    figures : Mapping
        The content of its `evaluation.json`.
    """

    label: str
    rows: Sequence[Row]
    figures: Mapping[str, Any]


class _Problem(NamedTuple):
    """How a policy did on a problem: means over its runs, and how many they were."""

    accuracy: float
    mean_reward: float
    num_runs: int


_Key = tuple[str, int]
"""What a problem is, and which of its like: drawn problems may come up again."""


def compare_task_rows(first: TaskContender, others: Sequence[TaskContender]) -> dict[str, Any]:
    """The differences in accuracy and mean reward of each other contender to the first.

    A pair is a problem, with the means over its runs. P-values are adjusted by Holm's method over
    both measures and all contenders.

    Raises
    ------
    DataError
        When two share no problem.
    """
    found: dict[str, Any] = {"baseline": first.label, "comparisons": {}, "warnings": []}
    tests: list[dict[str, Any]] = []
    ours = _problems(first)
    for other in others:
        theirs = _problems(other)
        pairs = {
            key: (one, partner)
            for key, one in ours.items()
            if one is not None and (partner := theirs.get(key)) is not None
        }
        if not pairs:
            raise DataError(
                f"{first.label} and {other.label} were to be compared problem by problem, but they "
                "share no problem. Evaluate both on the same split of the same task: nip-astra "
                "evaluate RUN --split test"
            )
        rights = [one.figures.get("success_reward") for one in (first, other)]
        possible = [reward for reward in rights if reward is not None]
        measured = _measured([*pairs.values()], [*pairs], possible)
        tests += measured.values()
        found["comparisons"][other.label] = {"num_pairs": len(pairs), **measured}
        found["warnings"] += _warnings(first, other, len(ours | theirs) - len(pairs))
    for metric, adjusted in zip(tests, holm([one["p_value"] for one in tests]), strict=True):
        metric["p_holm"] = adjusted
    return found


def _problems(contender: TaskContender) -> dict[_Key, _Problem | None]:
    """Problems in order, None for those without a verdict."""
    runs: dict[int, list[Row]] = {}
    for row in contender.rows:
        runs.setdefault(row["problem"], []).append(row)
    counts: dict[str, int] = {}
    found: dict[_Key, _Problem | None] = {}
    for rows in runs.values():
        name = str(rows[0]["problem_hash"])
        counts[name] = counts.get(name, -1) + 1
        known = [row for row in rows if row["reward"] is not None]
        found[name, counts[name]] = None
        if known:
            found[name, counts[name]] = _Problem(
                sum(row["is_right"] for row in known) / len(known),
                sum(row["reward"] for row in known) / len(known),
                len(known),
            )
    return found


def _measured(
    pairs: Sequence[tuple[_Problem, _Problem]], keys: Sequence[_Key], possible: Sequence[float]
) -> dict[str, dict[str, Any]]:
    places = {name: place for place, (name, _) in enumerate(keys)}
    clusters = [places[name] for name, _ in keys]
    are_single = all(a.num_runs == b.num_runs == 1 for a, b in pairs)
    return {
        name: paired_metric(
            [(getattr(a, name), getattr(b, name)) for a, b in pairs],
            clusters,
            is_bounded=is_share,
            is_binary=is_share and are_single,
            unit="problems",
            possible=possible,
        )
        for name, is_share in (("accuracy", True), ("mean_reward", False))
    }


def _warnings(first: TaskContender, other: TaskContender, num_lost: int) -> list[str]:
    """What the two differ in beside their policies."""
    ours, theirs = ({name: one.figures.get(name) for name in MATTERS} for one in (first, other))
    places = (f"in {first.label}", f"in {other.label}")
    found = other_conditions(ours, theirs, places)
    if num_lost:
        found.append(
            f"{num_lost} problems of {first.label} or {other.label} have no partner, since the "
            "other was not asked them or has no verdict on them; they are left out."
        )
    return found
