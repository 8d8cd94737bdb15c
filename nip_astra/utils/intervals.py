"""Confidence intervals for observations that share an opening prompt.

Observations of one prompt are correlated. The design effect D is the variance of the mean if whole
prompts are sampled, divided by that of independent observations. Every interval here is that of
independent observations at the effective sample size n / D. Chosen by simulated coverage
(`benchmarks/interval_coverage.py`).

If few prompts differ from the others, for instance three of a hundred have a failure, the estimate
of D is usually too small. So beside the k prompts that differ, a more are counted whose m
observations are all equal: D becomes (k D + a m) / (k + a), with a = 1 for a rate and 2 for a
paired difference, one per sign. With k = 0 that is m: prompts count, not observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nip_astra.utils.statistics import ROUNDING, FollowUp, event_counts, pseudo_values

Array = npt.NDArray[np.float64]

ALIKE = 0.1
"""Score differences up to this far from the median count as equal to it."""


class Interval(NamedTuple):
    """A two-sided confidence interval; each bound has the error (1 - level) / 2."""

    low: float
    high: float


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval and the method."""

    value: float
    low: float
    high: float
    """NaN if there are no data."""
    level: float
    """Confidence level, for instance 0.95."""
    num_clusters: int
    """Number of opening prompts in the estimate."""
    method: str
    """Name of the interval's method."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        return asdict(self)


class PairedDifference(NamedTuple):
    """The mean of paired differences with its interval and standard error."""

    estimate: Estimate
    """The mean and its interval."""
    standard_error: float
    """Standard error of the mean; NaN if unknown."""


def exact_rate_interval(rate: float, num_observations: float, *, level: float = 0.95) -> Interval:
    """Compute Clopper and Pearson's exact interval of a rate.

    `num_observations` is an effective number of independent observations and may be fractional.
    """
    from scipy.special import betaincinv

    tail = (1.0 - level) / 2.0
    num_ones = rate * num_observations
    num_zeros = num_observations - num_ones
    low = float(betaincinv(num_ones, num_zeros + 1.0, tail)) if rate > 0.0 else 0.0
    high = float(betaincinv(num_ones + 1.0, num_zeros, 1.0 - tail)) if rate < 1.0 else 1.0
    return Interval(low, high)


def rate_estimate(
    values: Sequence[float] | Array, clusters: Sequence[int], *, level: float = 0.95
) -> Estimate:
    """Estimate the mean of 0/1 values; NaN values are left out.

    Clopper and Pearson's interval at the effective sample size, reduced for the uncertainty of the
    design effect with few prompts (Korn and Graubard 1998). With a single prompt it is that of one
    observation.

    Parameters
    ----------
    values : Sequence[float]
        One number an observation, for instance 1.0 for an episode that failed.
    clusters : Sequence[int]
        The cluster (opening prompt) of each observation; any integers.
    """
    array = np.asarray(values, dtype=np.float64)
    is_known = ~np.isnan(array)
    verdicts, groups = array[is_known], np.asarray(clusters)[is_known]
    if verdicts.size == 0:
        return Estimate(math.nan, math.nan, math.nan, level, 0, "none: there is no verdict")
    spread = _Spread.of(verdicts, groups)
    size = spread.effective_size(1) * _certainty(verdicts.size, spread.num_clusters, level)
    # At least as if the observations of a prompt were all equal.
    size = max(size, verdicts.size / spread.cluster_size)
    interval = exact_rate_interval(spread.mean, size, level=level)
    is_apart = spread.num_clusters == verdicts.size
    method = "Clopper-Pearson" + ("" if is_apart else " at the effective sample size over prompts")
    return Estimate(spread.mean, *interval, level, spread.num_clusters, method)


def event_rate_estimate(
    follow_up: FollowUp, clusters: Sequence[int], *, level: float = 0.95
) -> Estimate:
    """Estimate the share of episodes with an event if some are censored.

    One minus the Kaplan-Meier estimate at the horizon; NaN if no episode was left to observe. If
    none is censored after its first turn, this is `rate_estimate`. Otherwise the interval is the
    beta product of Fay, Brittain and Proschan (2013, doi:10.1093/biostatistics/kxt016), fitted by
    its first two moments, with counts scaled to the effective sample size over prompts; without
    censoring it is Clopper and Pearson's.

    Parameters
    ----------
    clusters : Sequence[int]
        The cluster (opening prompt) of each episode; any integers.
    """
    observed, indices = follow_up.observed()
    groups = [clusters[index] for index in indices]
    failed = np.asarray(observed.is_event, dtype=np.float64)
    if observed.is_complete:
        return rate_estimate(failed, groups, level=level)
    at_risk_H, events_H = event_counts(observed)
    # If none is left at the end, earlier turns show how alike a prompt's episodes are.
    until = int(np.count_nonzero(at_risk_H))
    cut = FollowUp([min(turn, until) for turn in observed.turns], observed.is_event, until)
    values = pseudo_values(cut)
    spread = _Spread.of(values, groups)
    spread = replace(spread, num_unlike=_Spread.of(failed, groups).num_unlike)
    size = spread.effective_size(1) * _certainty(len(values), spread.num_clusters, level)
    scale = max(size / len(values), 1.0 / spread.cluster_size)
    survivors_H = scale * (at_risk_H - events_H)
    terms = [(a + 1.0, b) for a, b in zip(survivors_H, scale * events_H, strict=True) if b > 0.0]
    tail = (1.0 - level) / 2.0
    low = 1.0 - _beta_product_quantile(terms, 1.0 - tail)
    left = float(survivors_H[-1])
    high = 1.0 - _beta_product_quantile([*terms, (left, 1.0)], tail) if left > 0.0 else 1.0
    is_known = until == observed.horizon or bool((values == 1.0).all())
    value = float(values.mean()) if is_known else math.nan
    method = "beta product of survival at the effective sample size over prompts"
    return Estimate(value, low, high, level, spread.num_clusters, method)


def _beta_product_quantile(terms: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile of a product of independent Beta variables, by a moment-matched Beta."""
    from scipy.special import betaincinv

    mean = square = 1.0
    for a, b in terms:
        mean *= a / (a + b)
        square *= a * (a + 1.0) / ((a + b) * (a + b + 1.0))
    if not terms:
        return 1.0
    weight = (mean - square) / (square - mean**2)
    return float(betaincinv(mean * weight, (1.0 - mean) * weight, share))


def design_effect(values: Sequence[float] | Array, clusters: Sequence[int]) -> float:
    """Return the number of 0/1 observations that are worth one independent observation."""
    array = np.asarray(values, dtype=np.float64)
    return array.size / _Spread.of(array, clusters).effective_size(1)


def paired_difference(
    differences: Sequence[float] | Array,
    clusters: Sequence[int],
    *,
    is_bounded: bool = True,
    largest: float = 1.0,
    scale: float = 0.0,
    level: float = 0.95,
) -> PairedDifference:
    """Estimate the mean of paired differences.

    For bounded differences (outcomes and scores lie between -1 and 1) Bonett and Price (2012) add
    one pair with the largest difference and one with its negative to the effective sample size,
    here with Student's quantile over prompts: the interval has a width even if all pairs agree, and
    excludes 0 about when McNemar's exact test does. For unbounded differences it is Student's
    interval over prompts, and none if all pairs agree or there is one prompt.

    Parameters
    ----------
    is_bounded : bool
        Whether differences have a bound.
    largest : float
        That bound: differences lie between -largest and largest.
    scale : float
        Largest of the values that the differences are of, whose rounding errors they contain.
    """
    from scipy.special import stdtrit

    array = np.asarray(differences, dtype=np.float64)
    if array.size == 0:
        nothing = Estimate(math.nan, math.nan, math.nan, level, 0, "none: there is no pair")
        return PairedDifference(nothing, math.nan)
    spread = _Spread.of(array, np.asarray(clusters), tolerance=ALIKE * largest)
    if is_bounded:
        size = spread.effective_size(2) + 2.0
        centre = spread.mean * (size - 2.0) / size
        square = (spread.mean_square * (size - 2.0) + 2.0 * largest**2) / size
        error = math.sqrt((square - centre**2) / size)
        method = "Bonett-Price at the effective sample size over prompts"
    else:
        centre, error = spread.mean, math.sqrt(spread.cluster_variance)
        # Below this it is rounding of values that are all equal.
        size = max(math.sqrt(spread.mean_square), scale)
        error = error if error > ROUNDING * size else math.nan
        method = "Student's over prompts" if error > 0.0 else "none: no spread is known"
    degrees = spread.num_clusters - 1
    half = float(stdtrit(degrees, 0.5 + level / 2.0)) * error if degrees else math.inf
    low, high = centre - half, centre + half
    if is_bounded:
        low, high = max(-largest, low), min(largest, high)
    elif not degrees:
        low, high = math.nan, math.nan
    estimate = Estimate(spread.mean, low, high, level, spread.num_clusters, method)
    return PairedDifference(estimate, error)


def _certainty(num_observations: int, num_clusters: int, level: float) -> float:
    """Return the squared ratio of Student's quantiles for observations and clusters; at most 1."""
    if num_clusters < 2:
        return 1.0
    from scipy.special import stdtrit

    of_all, of_clusters = stdtrit([num_observations - 1, num_clusters - 1], 0.5 + level / 2.0)
    return float(of_all / of_clusters) ** 2


@dataclass(frozen=True)
class _Spread:
    """Spread of values within and between clusters."""

    mean: float
    mean_square: float
    """Mean of the squared values."""
    cluster_variance: float
    """Variance of the mean if whole clusters are sampled; NaN with one cluster."""
    cluster_size: float
    """Mean cluster size over observations: sum of squared sizes divided by their sum."""
    num_observations: int
    num_clusters: int
    num_unlike: int
    """Number of clusters with an observation that differs from the median."""

    @staticmethod
    def of(array: Array, clusters: Any, *, tolerance: float = 0.0) -> _Spread:
        sums, counts, index = _by_cluster(array, clusters)
        is_unlike = np.abs(array - np.median(array)) > tolerance
        return _Spread(
            mean=float(array.mean()),
            mean_square=float((array**2).mean()),
            cluster_variance=_variance_over(sums, counts),
            cluster_size=float((counts**2).sum()) / array.size,
            num_observations=array.size,
            num_clusters=len(sums),
            num_unlike=int(np.count_nonzero(np.bincount(index, weights=is_unlike))),
        )

    def effective_size(self, num_added: int) -> float:
        """Return the equivalent number of independent observations.

        At least that of clusters whose observations are all equal, which with equal sizes is the
        number of clusters. `num_added` such clusters are counted beside those that differ.
        """
        independent_variance = (self.mean_square - self.mean**2) / self.num_observations
        effect = self.cluster_size
        if self.num_unlike and independent_variance > 0.0 and self.num_clusters > 1:
            ratio = self.cluster_variance / independent_variance
            weighed = self.num_unlike * ratio + num_added * self.cluster_size
            effect = weighed / (self.num_unlike + num_added)
        return self.num_observations / min(max(effect, 1.0), self.cluster_size)


def weighted_rate_interval(
    contributions: Sequence[float] | Array,
    clusters: Sequence[int],
    *,
    largest: float,
    level: float = 0.95,
) -> Interval:
    """Compute an interval for the mean of weights that are 0 for most observations.

    Fay and Feuer's (1997) gamma interval of a weighted sum of rare events. Its upper bound allows
    for one unseen event of the largest possible weight; a normal or bootstrap interval is far too
    narrow if heavy weights are rare. Conservative, more so if the rate is not small. Weights of one
    cluster count together; if few clusters have any, they are assumed to come by whole clusters.

    Parameters
    ----------
    contributions : Sequence[float]
        Weight of an observation in which the event happened, 0 of one without.
    largest : float
        The largest weight that an event could have had.
    """
    array = np.asarray(contributions, dtype=np.float64)
    mean, squares = float(array.mean()), float((array**2).sum())
    sums, counts, _ = _by_cluster(array, clusters)
    num_with_events = np.count_nonzero(sums)
    together = float((sums**2).sum()) / squares if squares > 0 else 1.0
    cluster_size = float((counts**2).sum()) / array.size
    together = (num_with_events * together + cluster_size) / (num_with_events + 1)
    variance = together * squares / array.size**2
    unseen = together * largest / array.size
    tail = (1.0 - level) / 2.0
    low = _gamma_quantile(tail, mean, variance) if mean > 0 else 0.0
    return Interval(low, min(1.0, _gamma_quantile(1.0 - tail, mean + unseen, variance + unseen**2)))


def cluster_variance(values: Sequence[float] | Array, clusters: Sequence[int]) -> float:
    """Return the variance of the mean if whole clusters are sampled; NaN with one cluster.

    The linearised (sandwich) estimator of a ratio, with the factor C / (C - 1) for C clusters.
    """
    sums, counts, _ = _by_cluster(np.asarray(values, dtype=np.float64), clusters)
    return _variance_over(sums, counts)


def effective_sample_size(weights: Sequence[float] | Array) -> float:
    """Return Kish's effective sample size, `(sum w)^2 / sum w^2`; 0 without a positive weight."""
    array = np.asarray(weights, dtype=np.float64)
    squares = float((array**2).sum())
    return float(array.sum()) ** 2 / squares if squares > 0 else 0.0


def _gamma_quantile(share: float, mean: float, variance: float) -> float:
    from scipy.special import gammaincinv

    return float(gammaincinv(mean**2 / variance, share)) * variance / mean


def _variance_over(sums: Array, counts: Array) -> float:
    num_clusters = len(sums)
    if num_clusters < 2:
        return math.nan
    residuals = sums - sums.sum() / counts.sum() * counts
    factor = num_clusters / (num_clusters - 1)
    return float(factor * (residuals**2).sum() / counts.sum() ** 2)


def _by_cluster(array: Array, clusters: Any) -> tuple[Array, Array, npt.NDArray[np.intp]]:
    """Return the sum and size of each cluster, and each value's cluster index."""
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=array).astype(np.float64)
    return sums, np.bincount(index).astype(np.float64), index
