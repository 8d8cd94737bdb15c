"""Intervals, tests and survival for outcomes whose observations share an opening prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv

from nip_astra.utils.seeding import derive_seed

Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A two-sided confidence interval."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval and how that was made.

    Attributes
    ----------
    value, low, high : float
        NaN where there was nothing to estimate from.
    level : float
        Confidence level, for instance 0.95.
    num_clusters : int
        Opening prompts that the interval rests on.
    method : str
        How the interval was made.
    """

    value: float
    low: float
    high: float
    level: float
    num_clusters: int
    method: str

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for a JSON file."""
        return asdict(self)


def cluster_bootstrap_interval(
    values: Sequence[float],
    clusters: Sequence[int],
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Bootstrap the mean of `values` by resampling whole clusters with replacement.

    Observations that share an opening prompt are not independent; resampling prompts keeps their
    correlation (Davison and Hinkley 1997, section 3.8). Where every value is 0 or every value is 1
    the bootstrap has no width; then the far bound is the rule of three, `3 / number of clusters`.

    Parameters
    ----------
    values : Sequence[float]
        One number an observation, for instance 1.0 for an episode that failed.
    clusters : Sequence[int]
        The cluster (opening prompt) of each observation; any integers.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return Interval(float("nan"), float("nan"))
    sums, counts = _sums_by_cluster(array, clusters)
    num_clusters = len(sums)
    if np.all(array == 0.0):
        return Interval(0.0, min(1.0, 3.0 / num_clusters))
    if np.all(array == 1.0):
        return Interval(max(0.0, 1.0 - 3.0 / num_clusters), 1.0)
    rng = np.random.default_rng(derive_seed(seed, "bootstrap"))
    draws = rng.integers(0, num_clusters, size=(num_resamples, num_clusters))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(low), float(high))


def bootstrap_estimate(
    values: Sequence[float],
    clusters: Sequence[int],
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Give the mean of the values with `cluster_bootstrap_interval`; NaN values are left out."""
    array = np.asarray(values, dtype=np.float64)
    is_known = ~np.isnan(array)
    known, groups = array[is_known], np.asarray(clusters)[is_known]
    if known.size == 0:
        return Estimate(math.nan, math.nan, math.nan, level, 0, "none: there is no verdict")
    interval = cluster_bootstrap_interval(
        known.tolist(), groups.tolist(), num_resamples=num_resamples, level=level, seed=seed
    )
    is_constant = bool(np.all(known == 0.0) or np.all(known == 1.0))
    method = "rule of three" if is_constant else "bootstrap over opening prompts"
    return Estimate(float(known.mean()), *interval, level, len(np.unique(groups)), method)


def bootstrap_difference(
    differences: Sequence[float],
    clusters: Sequence[int],
    *,
    num_resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Give the mean of paired differences, bootstrapped over clusters.

    Where every difference is 0 the bootstrap has no width; then the bounds are the rule of three,
    plus and minus `3 / number of clusters`: for differences of outcomes, which are at most 1.
    """
    array = np.asarray(differences, dtype=np.float64)
    if array.size == 0:
        return Estimate(math.nan, math.nan, math.nan, level, 0, "none: there is no pair")
    sums, counts = _sums_by_cluster(array, clusters)
    num_clusters = len(sums)
    if not np.any(array):
        bound = min(1.0, 3.0 / num_clusters)
        return Estimate(0.0, -bound, bound, level, num_clusters, "rule of three")
    rng = np.random.default_rng(derive_seed(seed, "paired bootstrap"))
    draws = rng.integers(0, num_clusters, size=(num_resamples, num_clusters))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    method = "paired bootstrap over opening prompts"
    return Estimate(float(array.mean()), float(low), float(high), level, num_clusters, method)


def cluster_variance(values: Sequence[float] | Array, clusters: Sequence[int]) -> float:
    """Give the variance of the mean of `values`, where whole clusters were drawn.

    The linearised (sandwich) estimator of a ratio, with the factor C / (C - 1) for C clusters.
    """
    array = np.asarray(values, dtype=np.float64)
    sums, counts = _sums_by_cluster(array, clusters)
    num_clusters = len(sums)
    if num_clusters < 2:
        return math.nan
    residuals = sums - array.mean() * counts
    factor = num_clusters / (num_clusters - 1)
    return float(factor * (residuals**2).sum() / counts.sum() ** 2)


def wilson_interval(rate: float, num_observations: float, *, level: float = 0.95) -> Interval:
    """Give Wilson's score interval of a rate.

    Parameters
    ----------
    num_observations : float
        Independent observations that would tell as much; need not be whole. For a rate of
        variance v it is `rate * (1 - rate) / v`.
    """
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    shrink = 1.0 + z * z / num_observations
    centre = (rate + z * z / (2.0 * num_observations)) / shrink
    spread = rate * (1.0 - rate) / num_observations + z * z / (4.0 * num_observations**2)
    half = z / shrink * math.sqrt(spread)
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def weighted_rate_interval(
    contributions: Sequence[float] | Array,
    clusters: Sequence[int],
    *,
    largest: float,
    level: float = 0.95,
) -> Interval:
    """Give an interval of the mean of weights that are 0 for most observations.

    Fay and Feuer's (1997) gamma interval of a weighted sum of rare events. Its upper bound allows
    for one event of the largest possible weight that was not seen; a normal or bootstrap interval,
    which knows the weights that were seen alone, is far too narrow where heavy ones are rare.
    Conservative, the more so where the rate is not small. Weights of one cluster count together.

    Parameters
    ----------
    contributions : Sequence[float]
        Weight of an observation in which the event happened, 0 of one without.
    largest : float
        The largest weight that an event could have had.
    """
    array = np.asarray(contributions, dtype=np.float64)
    mean, squares = float(array.mean()), float((array**2).sum())
    sums, _ = _sums_by_cluster(array, clusters)
    together = float((sums**2).sum()) / squares if squares > 0 else 1.0
    variance = together * squares / array.size**2
    unseen = together * largest / array.size
    tail = (1.0 - level) / 2.0
    low = _gamma_quantile(tail, mean, variance) if mean > 0 else 0.0
    return Interval(low, min(1.0, _gamma_quantile(1.0 - tail, mean + unseen, variance + unseen**2)))


def clustered_wilson(
    values: Sequence[float], clusters: Sequence[int], *, level: float = 0.95
) -> Estimate:
    """Give the mean of 0/1 values with Wilson's interval at the effective sample size.

    For rare outcomes: with a handful of ones it keeps nearer to its level than the percentile
    bootstrap. The number of observations is divided by the design effect, never below 1, of
    observations sharing a cluster (Korn and Graubard 1998). Without any 1 (or 0) the far bound is
    the rule of three over clusters.
    """
    array = np.asarray(values, dtype=np.float64)
    num_clusters = len(np.unique(np.asarray(clusters)))
    if array.size == 0:
        return Estimate(math.nan, math.nan, math.nan, level, 0, "none: there is no verdict")
    rate = float(array.mean())
    if rate in (0.0, 1.0):
        interval = cluster_bootstrap_interval(values, clusters, level=level)
        return Estimate(rate, *interval, level, num_clusters, "rule of three")
    simple = rate * (1.0 - rate) / array.size
    variance = cluster_variance(values, clusters)
    design_effect = 1.0 if math.isnan(variance) else max(1.0, variance / simple)
    interval = wilson_interval(rate, array.size / design_effect, level=level)
    method = "Wilson at the effective sample size over opening prompts"
    return Estimate(rate, *interval, level, num_clusters, method)


class Survival(NamedTuple):
    """Kaplan-Meier estimate over turns 1 to H.

    Attributes
    ----------
    survival : list[float]
        S(1) to S(H): share of episodes without failure through that turn; NaN from the first turn
        at which nobody was left to observe, unless all had failed.
    median : int or None
        First turn at which at most half survive; None where more than half survive the last.
    num_at_risk : list[int]
        Episodes observed at each turn.
    """

    survival: list[float]
    median: int | None
    num_at_risk: list[int]


def kaplan_meier(turns: Sequence[int], is_event: Sequence[bool], *, horizon: int) -> Survival:
    """Estimate survival where some episodes were not watched to their failure.

    Parameters
    ----------
    turns : Sequence[int]
        For an event the turn, from 1, at which it happened; else the last turn observed without
        one, 0 where none was.
    is_event : Sequence[bool]
        False for an episode that was censored.
    """
    last, events = np.asarray(turns, dtype=int), np.asarray(is_event, dtype=bool)
    survival, at_risk = [], []
    share, median = 1.0, None
    for turn in range(1, horizon + 1):
        watched = int((last >= turn).sum())
        failed = int((events & (last == turn)).sum())
        if watched:
            share *= 1.0 - failed / watched
        elif share > 0.0:
            # Nobody is left to observe; where all have failed, none survives any later turn.
            share = math.nan
        if median is None and share <= 0.5:
            median = turn
        survival.append(share)
        at_risk.append(watched)
    return Survival(survival, median, at_risk)


def hit_at_k(num_tries: int, num_hits: int, k: int) -> float:
    """Give the probability that one of k tries, drawn from those made, is a hit.

    Unbiased: `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374, eq. 1). NaN for k > n.
    """
    if k > num_tries:
        return math.nan
    return 1.0 - math.comb(num_tries - num_hits, k) / math.comb(num_tries, k)


def mcnemar_exact(num_only_first: int, num_only_second: int) -> float:
    """Give the two-sided p-value of McNemar's exact test.

    Parameters
    ----------
    num_only_first, num_only_second : int
        Pairs in which one of the two alone failed; pairs that agree tell nothing.
    """
    total = num_only_first + num_only_second
    if total == 0:
        return 1.0
    extreme = min(num_only_first, num_only_second)
    tail = sum(math.comb(total, i) for i in range(extreme + 1)) / (1 << total)
    return min(1.0, 2.0 * tail)


def sign_flip_test(
    differences: Sequence[float], clusters: Sequence[int], *, num_flips: int = 10_000, seed: int = 0
) -> float:
    """Give the two-sided p-value of no difference, by flipping the signs of whole clusters.

    Where no pair differs, 1. The smallest value it can give is `1 / (num_flips + 1)`.
    """
    sums, _ = _sums_by_cluster(np.asarray(differences, dtype=np.float64), clusters)
    if not np.any(sums):
        return 1.0
    rng = np.random.default_rng(derive_seed(seed, "sign flips"))
    signs = rng.integers(0, 2, size=(num_flips, len(sums)), dtype=np.int8) * 2 - 1
    # A flip that changes nothing but the order of additions must count as equal.
    observed = abs(float(sums.sum())) * (1.0 - 1e-12)
    num_extreme = np.count_nonzero(np.abs(signs @ sums) >= observed)
    return float((1 + num_extreme) / (num_flips + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Give p-values adjusted for their number by Holm's step-down method, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def effective_sample_size(weights: Sequence[float] | Array) -> float:
    """Give Kish's effective sample size, `(sum w)^2 / sum w^2`; 0 without a positive weight."""
    array = np.asarray(weights, dtype=np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares > 0 else 0.0


def _gamma_quantile(share: float, mean: float, variance: float) -> float:
    return float(gammaincinv(mean**2 / variance, share)) * variance / mean


def _sums_by_cluster(array: Array, clusters: Sequence[int]) -> tuple[Array, Array]:
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=array).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64)
