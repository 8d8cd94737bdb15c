"""Tests, survival and shares of hits for outcomes; intervals are in `intervals`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from nip_astra.utils.seeding import derive_seed


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
    turns_H = np.arange(1, horizon + 1)
    at_risk_H = (last[:, None] >= turns_H).sum(axis=0)
    survival_H = np.ones(horizon)
    if len(last):
        watched = stats.CensoredData.right_censored(last, ~events)
        survival_H = np.asarray(stats.ecdf(watched).sf.evaluate(turns_H))
    # Where nobody is left to observe, it is known only that nobody survives whom all failed before.
    survival_H[(at_risk_H == 0) & (survival_H > 0)] = math.nan
    half = np.flatnonzero(survival_H <= 0.5)
    median = int(turns_H[half[0]]) if len(half) else None
    return Survival(survival_H.tolist(), median, at_risk_H.tolist())


def hit_at_k(num_tries: int, num_hits: int, k: int) -> float:
    """The probability that one of k tries, drawn from those made, is a hit.

    Unbiased: `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374, eq. 1). NaN for k > n.
    """
    if k > num_tries:
        return math.nan
    return 1.0 - math.comb(num_tries - num_hits, k) / math.comb(num_tries, k)


def mcnemar_exact(num_only_first: int, num_only_second: int) -> float:
    """The two-sided p-value of McNemar's exact test.

    Parameters
    ----------
    num_only_first, num_only_second : int
        Pairs in which one of the two alone failed; pairs that agree tell nothing.
    """
    total = num_only_first + num_only_second
    if total == 0:
        return 1.0
    return float(stats.binomtest(num_only_first, total).pvalue)


def sign_flip_test(
    differences: Sequence[float], clusters: Sequence[int], *, num_flips: int = 10_000, seed: int = 0
) -> float:
    """The two-sided p-value of no difference, by flipping the signs of whole clusters.

    Where no pair differs, 1. The smallest value it can give is `1 / (num_flips + 1)`.
    """
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(differences, dtype=np.float64))
    if not np.any(sums):
        return 1.0
    rng = np.random.default_rng(derive_seed(seed, "sign flips"))
    signs = rng.integers(0, 2, size=(num_flips, len(sums)), dtype=np.int8) * 2 - 1
    # A flip that changes nothing but the order of additions must count as equal.
    observed = abs(float(sums.sum())) * (1.0 - 1e-12)
    num_extreme = np.count_nonzero(np.abs(signs @ sums) >= observed)
    return float((1 + num_extreme) / (num_flips + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number by Holm's step-down method, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
