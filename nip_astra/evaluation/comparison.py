"""Paired comparison of evaluations with the first one: one test, one adjustment.

A unit is a conversation, an episode of a protocol, or a problem with its runs; the family gives the
keys of pairs and the metrics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from nip_astra.errors import DataError
from nip_astra.evaluation.outcomes import follow_up_of, outcomes_of
from nip_astra.evaluation.storage import differences
from nip_astra.registry import Registry
from nip_astra.utils.intervals import paired_difference
from nip_astra.utils.statistics import (
    event_counts,
    holm,
    mcnemar_exact,
    pseudo_values,
    sign_flip_test,
)

DETECTABLE = 2.8
"""Difference, in standard errors, that a two-sided 5 % test detects with a power of 80 %."""
Pair: TypeAlias = tuple[Hashable, Any, Any]
"""Key of a pair, and a unit of each evaluation."""
Bound: TypeAlias = Literal["unit", "observed", "none"]


class Paired(NamedTuple):
    """A metric's values on the pairs for which it is known.

    Attributes
    ----------
    clusters : list
        The key of each pair; pairs of equal keys are not independent.
    first, second : list[float]
        A number of each unit; the mean of their differences is the estimate.
    tested : list[float]
        The differences that the test uses.
    more : dict
        Further entries of the result.
    """

    clusters: list[Hashable]
    first: list[float]
    second: list[float]
    tested: list[float]
    more: dict[str, Any] = {}


class Metric(NamedTuple):
    """A metric to compare.

    Attributes
    ----------
    pairs : Callable
        From pairs to the numbers of each pair.
    bound : str
        "unit": values lie in [0, 1]. "observed": values have no known bound, and the interval
        assumes the range of those observed. "none": Student's interval.
    is_binary : bool
        Whether each unit passes or fails, so that McNemar's test applies to independent pairs.
    possible : Sequence[float]
        Values known to be possible, with the bound "observed".
    """

    pairs: Callable[[Sequence[Pair]], Paired]
    bound: Bound = "unit"
    is_binary: bool = False
    possible: Sequence[float] = ()


Measure: TypeAlias = Callable[[Any], float | None]
METRICS: Registry[Measure] = Registry("metric")
"""Further metrics. Each returns a number for a unit, or None.

A unit is a conversation's rows, an episode's row, or a problem's means. The range of the numbers
is taken from those observed.
"""

register_metric = METRICS.register


class Component(NamedTuple):
    """A condition that is a component, such as a scorer or target.

    Attributes
    ----------
    name : str or None
        Compared if the parameters of one of the two are unknown.
    parameters : Mapping or None
        Compared if those of both are known.
    """

    name: str | None
    parameters: Mapping[str, Any] | None = None


def metric_of(
    measure: Measure,
    bound: Bound = "unit",
    *,
    is_binary: bool = False,
    possible: Sequence[float] = (),
) -> Metric:
    """Return a metric from a number per unit; omits pairs without two finite numbers.

    The other arguments are those of `Metric`.
    """

    def pairs(units: Sequence[Pair]) -> Paired:
        values = [(key, measure(a), measure(b)) for key, a, b in units]
        known = [
            (key, float(a), float(b))
            for key, a, b in values
            if a is not None and b is not None and math.isfinite(a) and math.isfinite(b)
        ]
        return Paired(
            [key for key, _, _ in known],
            [a for _, a, _ in known],
            [b for _, _, b in known],
            [b - a for _, a, b in known],
        )

    return Metric(pairs, bound, is_binary, possible)


@dataclass(frozen=True)
class ComparedRun:
    """An evaluation to compare.

    Attributes
    ----------
    units, keys : Sequence
        Played units in order, and the pair key of each; units of one key are paired in order.
    figures : Mapping
        Content of `evaluation.json`; may be empty.
    conditions : Mapping
        Values that should be equal, by name; None if unknown.
    attacks : Sequence
        The attack of each unit, if a list of attacks was played; else empty. Two lists are paired
        by attack, since the n-th attack of one has nothing to do with that of the other.
    """

    label: str
    units: Sequence[Any]
    keys: Sequence[Hashable]
    metrics: Mapping[str, Metric]
    figures: Mapping[str, Any] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    attacks: Sequence[Hashable] = ()


def compare(
    first: ComparedRun, others: Sequence[ComparedRun], *, unit: str = "opening prompts"
) -> dict[str, Any]:
    """Compare each other evaluation with the first, metric by metric.

    P-values are adjusted by Holm's method over all metrics and evaluations. `warnings` names units
    without a partner, conditions that differ, and the evaluations' own warnings. `unit` is the
    plural of what pairs have in common.

    Raises
    ------
    DataError
        When two evaluations share no unit.
    """
    if all(compared_run.attacks for compared_run in (first, *others)):
        unit = "attacks"
        first, *others = (replace(run, keys=run.attacks) for run in (first, *others))
    found: dict[str, Any] = {"baseline": first.label, "comparisons": {}, "warnings": []}
    tests: list[dict[str, Any]] = []
    further = {name: metric_of(METRICS.get(name), "observed") for name in METRICS.names()}
    for other in others:
        pairs = pair_up(first, other)
        if not pairs:
            raise DataError(
                f"{first.label} and {other.label} share no {unit.removesuffix('s')}. Evaluate both "
                "on the same split of the same scenario with the same seed."
            )
        metrics = {
            name: _compare_metric(metric, _measured(name, metric, pairs), unit)
            for name, metric in {**first.metrics, **further}.items()
            if name in other.metrics or name in further
        }
        known = {name: metric for name, metric in metrics.items() if metric is not None}
        tests += known.values()
        found["comparisons"][other.label] = {"num_pairs": len(pairs), **known}
        found["warnings"] += [
            *_other_conditions(first, other),
            *_left_out(first, other, metrics, unit, len(pairs)),
        ]
    for metric, adjusted in zip(tests, holm([m["p_value"] for m in tests]), strict=True):
        metric["p_holm"] = adjusted
    found["warnings"] += [
        f"{one.label}: {text}"
        for one in (first, *others)
        for text in one.figures.get("warnings", ())
    ]
    return found


def _measured(name: str, metric: Metric, pairs: Sequence[Pair]) -> Paired:
    try:
        return metric.pairs(pairs)
    except Exception as error:
        raise DataError(
            f"the metric {name!r} cannot be computed ({type(error).__name__}: {error}). Restore "
            "the rows that it reads, or correct it."
        ) from error


def pair_up(first: ComparedRun, second: ComparedRun) -> list[Pair]:
    """Pair units of equal keys, the n-th with the n-th, in the order of the first."""
    partners = dict(_numbered(second))
    return [(key[0], unit, partners[key]) for key, unit in _numbered(first) if key in partners]


def _numbered(compared_run: ComparedRun) -> Iterator[tuple[tuple[Hashable, int], Any]]:
    counts: Counter[Hashable] = Counter()
    for key, unit in zip(compared_run.keys, compared_run.units, strict=True):
        yield (key, counts[key]), unit
        counts[key] += 1


def _left_out(
    first: ComparedRun,
    other: ComparedRun,
    metrics: Mapping[str, Mapping[str, Any] | None],
    unit: str,
    num_pairs: int,
) -> list[str]:
    """Return warnings about units without a partner, and pairs without a verdict."""
    lost = [(one.label, len(one.units) - num_pairs, len(one.units)) for one in (first, other)]
    found = []
    if any(number for _, number, _ in lost):
        counts = " and ".join(f"{number} of {total} of {label}" for label, number, total in lost)
        found.append(f"without a partner about the same {unit}, and left out: {counts}")
    both = f"{first.label} and {other.label}"
    for name, metric in metrics.items():
        if metric is None:
            found.append(f"no pair of {both} has a verdict for {name}")
            continue
        num_left_out = num_pairs - metric["num_pairs"]
        num_censored = metric.get("num_censored", 0)
        if num_left_out + num_censored:
            text = f"{name}: {num_left_out} of {num_pairs} pairs of {both} are left out"
            if num_censored:
                text += (
                    f", {num_censored} are compared up to their first turn without a verdict, "
                    f"failures count through turn {metric['through_turn']}"
                )
            found.append(text)
    return found


def _other_conditions(first: ComparedRun, other: ComparedRun) -> list[str]:
    """Return warnings about different conditions."""
    ours, theirs = {}, {}
    for name in first.conditions.keys() & other.conditions.keys():
        before, after = first.conditions[name], other.conditions[name]
        if isinstance(before, Component) and isinstance(after, Component):
            are_known = before.parameters is not None and after.parameters is not None
            before, after = (one.parameters if are_known else one.name for one in (before, after))
        if before is not None and after is not None:
            ours[name], theirs[name] = before, after
    places = f"in {first.label}", f"in {other.label}"
    return [
        f"{line}: the difference may be due to that" for line in differences(ours, theirs, places)
    ]


def _compare_metric(metric: Metric, paired: Paired, unit: str) -> dict[str, Any] | None:
    """Return both means, their difference with an interval, and a p-value; None without pairs."""
    if not paired.clusters:
        return None
    identity = {key: i for i, key in enumerate(dict.fromkeys(paired.clusters))}
    clusters = [identity[key] for key in paired.clusters]
    apart = [b - a for a, b in zip(paired.first, paired.second, strict=True)]
    largest = 1.0
    if metric.bound == "observed":
        largest = _observed_bound(paired, apart, metric.possible)
    is_bounded = metric.bound != "none" and largest > 0.0
    difference, error = paired_difference(apart, clusters, is_bounded=is_bounded, largest=largest)
    result = {
        "first": float(np.mean(paired.first)),
        "second": float(np.mean(paired.second)),
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "level": difference.level,
        "num_pairs": len(clusters),
        f"num_{unit.rpartition(' ')[2]}": len(identity),
        "minimum_detectable": DETECTABLE * error,
        **paired.more,
    }
    if metric.is_binary:
        only_first, only_second = (sum(sign * d > 0 for d in paired.tested) for sign in (-1, 1))
        result |= {"only_first": only_first, "only_second": only_second}
        # McNemar's test assumes independent pairs; pairs of one key are not.
        if len(identity) == len(clusters):
            p_value = mcnemar_exact(only_first, only_second)
            return result | {"p_value": p_value, "test": "McNemar, exact"}
    p_value = sign_flip_test(paired.tested, clusters)
    return result | {"p_value": p_value, "test": f"sign flips of {unit}"}


def _observed_bound(paired: Paired, apart: Sequence[float], possible: Sequence[float]) -> float:
    """Return the largest possible difference: the values' range, at most twice the observed one.

    In simulations in which few pairs differ, Student's interval covered the truth in 68 to 87 %,
    this one in at least 93 %.
    """
    values = [*paired.first, *paired.second, *possible]
    return min(max(values) - min(values), 2.0 * max(map(abs, apart)) or math.inf)


def paired_failures(pairs: Sequence[Pair]) -> Paired:
    """Return whether each conversation failed, up to the last turn known in both.

    Pairs without a known turn are left out. The means are survival estimates through the last turn
    at which a pair is left; shares if no verdict is missing.
    """
    sides: list[list[Any]] = [[outcomes_of(a) for _, a, _ in pairs]]
    sides.append([outcomes_of(b) for _, _, b in pairs])
    horizon = max(len(turns) for side in sides for turns in side)
    known = [
        [turn if not is_event else horizon for turn, is_event in zip(*follow_up[:2], strict=True)]
        for follow_up in (follow_up_of(side, horizon=horizon) for side in sides)
    ]
    limits = [min(both) for both in zip(*known, strict=True)]
    kept = [place for place, limit in enumerate(limits) if limit > 0]
    limits = [limits[place] for place in kept]
    outcomes = [[side[place] for place in kept] for side in sides]
    cut = [follow_up_of(side, limits, horizon=horizon) for side in outcomes]
    # Nothing is known after the last turn with a pair, unless all have failed.
    ends = [
        int(np.count_nonzero(event_counts(one)[0]))
        for one in cut
        if np.isnan(pseudo_values(one)).any()
    ]
    through = min(ends, default=horizon)
    cut = [follow_up_of(side, limits, horizon=through) for side in outcomes]
    failed = [[float(is_event) for is_event in one.is_event] for one in cut]
    return Paired(
        [pairs[place][0] for place in kept],
        pseudo_values(cut[0]).tolist(),
        pseudo_values(cut[1]).tolist(),
        [b - a for a, b in zip(*failed, strict=True)],
        {
            "through_turn": through,
            "num_censored": sum(limit < horizon for limit in limits),
            "num_left_out": len(pairs) - len(kept),
        },
    )


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels, with numbers appended to repetitions."""
    found: list[str] = []
    for label in labels:
        number, free = 2, label
        while free in found:
            free, number = f"{label} ({number})", number + 1
        found.append(free)
    return found
