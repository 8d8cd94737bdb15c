"""Intervals for rates and means whose observations share an opening prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nip_astra.utils.seeding import derive_seed


class Interval(NamedTuple):
    """A two-sided confidence interval."""

    low: float
    high: float


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
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=array)
    counts = np.bincount(index).astype(np.float64)
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
