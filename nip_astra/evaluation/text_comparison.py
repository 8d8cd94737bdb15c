"""Compare rollouts in words about the same datapoints, pair by pair. Shape suffix: `N` rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from nip_astra.errors import DataError
from nip_astra.evaluation.storage import differences
from nip_astra.protocols.protocol_base import CONTINUE
from nip_astra.utils.intervals import paired_difference
from nip_astra.utils.nested_array_dict import NestedArrayDict
from nip_astra.utils.statistics import holm, mcnemar_exact, sign_flip_test

Floats = npt.NDArray[np.float64]
ACCURACY = "accuracy"
BOUNDED = (ACCURACY, "share_undecided")
"""Measures that are 0 or 1 for each rollout."""
DETECTABLE = 2.8
"""Standard errors of the smallest difference that is found in four of five comparisons."""


@dataclass(frozen=True)
class TextContender:
    """Rollouts to compare.

    Attributes
    ----------
    agent_names : sequence of str
        In the order of the rollouts' dimension A.
    figures : Mapping
        What is known of them otherwise.
    conditions : Mapping
        What should be alike: split, seed, and the models that agents start from.
    """

    label: str
    rollouts: NestedArrayDict
    agent_names: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)


def compare_text_rollouts(first: TextContender, others: Sequence[TextContender]) -> dict[str, Any]:
    """The differences of each other contender to the first, measure by measure.

    Rollouts are paired by datapoint. P-values are adjusted by Holm's method over all measures and
    contenders.

    Raises
    ------
    DataError
        When two share no datapoint, or one number stands for different datapoints in them.
    """
    found: dict[str, Any] = {"baseline": first.label, "comparisons": {}, "warnings": []}
    tests: list[dict[str, Any]] = []
    for other in others:
        places = (f"in {first.label}", f"in {other.label}")
        found["warnings"] += other_conditions(first.conditions, other.conditions, places)
        pairs = _pairs(first, other)
        clusters = [int(first.rollouts["datapoint_id"][place]) for place, _ in pairs]
        measured = {}
        theirs = _measures(other)
        for name, values_N in _measures(first).items():
            if name in theirs:
                both = [(values_N[a], theirs[name][b]) for a, b in pairs]
                measured[name] = paired_metric(
                    both, clusters, is_bounded=name in BOUNDED, is_binary=name == ACCURACY
                )
        tests += measured.values()
        found["comparisons"][other.label] = {"num_pairs": len(pairs), **measured}
        lost = max(len(first.rollouts), len(other.rollouts)) - len(pairs)
        if lost:
            found["warnings"].append(
                f"{lost} rollouts of {first.label} or {other.label} have no partner, since the "
                "other was not played about their datapoints as often; they are left out."
            )
    for metric, adjusted in zip(tests, holm([one["p_value"] for one in tests]), strict=True):
        metric["p_holm"] = adjusted
    return found


def other_conditions(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], places: tuple[str, str]
) -> list[str]:
    """Say what two contenders differ in beside what they have learnt."""
    return [
        f"{line}: they differ in more than the policy."
        for line in differences(ours, theirs, places)
    ]


def _measures(contender: TextContender) -> dict[str, Floats]:
    rollouts = contender.rollouts
    returns_NA = rollouts["agents", "reward"].sum(axis=1)
    return {
        ACCURACY: (rollouts["decision"] == rollouts["y"]).astype(np.float64),
        "share_undecided": (rollouts["decision"] == CONTINUE).astype(np.float64),
        "episode_length": rollouts["num_rounds"].astype(np.float64),
        **{f"reward_of_{name}": returns_NA[:, a] for a, name in enumerate(contender.agent_names)},
    }


def _pairs(first: TextContender, second: TextContender) -> list[tuple[int, int]]:
    """Places of rollouts about the same datapoint, the n-th with the n-th."""
    by_key = dict(_numbered(second.rollouts))
    pairs = [(a, by_key[key]) for key, a in _numbered(first.rollouts) if key in by_key]
    if not pairs:
        raise DataError(
            f"{first.label} and {second.label} were to be compared pair by pair, but they share no "
            "datapoint. Evaluate both on the same split of the same scenario."
        )
    for a, b in pairs:
        ours, theirs = _datapoint(first.rollouts, a), _datapoint(second.rollouts, b)
        if ours != theirs:
            number = int(first.rollouts["datapoint_id"][a])
            raise DataError(
                f"{first.label} and {second.label} were to be compared pair by pair, but their "
                f"datapoints of number {number} differ. Evaluate both with the same data: the same "
                "scenario, its parameters, and seed."
            )
    return pairs


def _numbered(rollouts: NestedArrayDict) -> list[tuple[tuple[int, int], int]]:
    counts: dict[int, int] = {}
    found = []
    for place, number in enumerate(rollouts["datapoint_id"].tolist()):
        counts[number] = counts.get(number, -1) + 1
        found.append(((number, counts[number]), place))
    return found


def _datapoint(rollouts: NestedArrayDict, place: int) -> dict[str, Any]:
    columns = rollouts.get("datapoint")
    texts = {} if columns is None else {name: one[place] for name, one in columns.items()}
    return {"y": int(rollouts["y"][place]), **texts}


def _likely_bound(
    both: Sequence[tuple[float, float]], apart: Sequence[float], possible: Sequence[float]
) -> float:
    """The most by which rewards may differ: their range, at most twice the largest difference.

    Rewards are often alike in most pairs. Student's interval knows the differences that were seen
    alone, and held the truth in 68 to 87 % of simulations with few that differ, this one in at
    least 93 %.
    """
    values = [*(value for pair in both for value in pair), *possible]
    return min(max(values) - min(values), 2.0 * max(map(abs, apart)) or math.inf)


def paired_metric(
    both: Sequence[tuple[float, float]],
    clusters: Sequence[int],
    *,
    is_bounded: bool,
    is_binary: bool,
    unit: str = "datapoints",
    possible: Sequence[float] = (),
) -> dict[str, Any]:
    """Both means, the difference with its interval, and a p-value.

    Parameters
    ----------
    both : Sequence of pairs
        A value of the first contender and its partner of the second.
    clusters : Sequence[int]
        What each pair is about.
    is_bounded : bool
        Whether values lie between 0 and 1.
    is_binary : bool
        Whether values are 0 or 1.
    possible : Sequence[float]
        Further values that are known to be possible, where there is no bound.
    unit : str
        What clusters are called.
    """
    apart = [float(b - a) for a, b in both]
    largest = 1.0 if is_bounded else _likely_bound(both, apart, possible)
    difference, error = paired_difference(
        apart, clusters, is_bounded=largest > 0.0, largest=largest
    )
    found = {
        "first": float(np.mean([a for a, _ in both])),
        "second": float(np.mean([b for _, b in both])),
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "level": difference.level,
        "num_pairs": len(both),
        f"num_{unit}": len(set(clusters)),
        "minimum_detectable": DETECTABLE * error,
    }
    # McNemar's test takes pairs for independent; those about one thing are not.
    if is_binary and len(set(clusters)) == len(both):
        only_first = sum(one < 0 for one in apart)
        only_second = sum(one > 0 for one in apart)
        p_value = mcnemar_exact(only_first, only_second)
        counts = {"only_first": only_first, "only_second": only_second}
        return found | counts | {"p_value": p_value, "test": "McNemar, exact"}
    p_value = sign_flip_test(apart, clusters)
    return found | {"p_value": p_value, "test": f"sign flips of {unit}"}
