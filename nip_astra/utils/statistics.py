"""Survival estimates, hit rates and significance tests; confidence intervals are in `intervals`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nip_astra.utils.seeding import derive_seed

Array = npt.NDArray[np.float64]

NUM_FLIPS = 10_000
"""Number of random sign flips in `sign_flip_test`."""
ROUNDING = 1e-12
"""Relative differences up to this are rounding."""


class FollowUp(NamedTuple):
    """Observation times of episodes."""

    turns: list[int]
    """Turn of the event, from 1; without an event, the last turn known to have passed without one,
    or 0. An episode without an event is censored unless this is the horizon."""
    is_event: list[bool]
    """Whether the event was observed."""
    horizon: int
    """The number of turns."""

    @property
    def is_complete(self) -> bool:
        """Whether no episode is censored."""
        observed = zip(self.turns, self.is_event, strict=True)
        return all(is_event or turn >= self.horizon for turn, is_event in observed)

    def observed(self) -> tuple[FollowUp, list[int]]:
        """Return the episodes observed for at least one turn, and their indices."""
        indices = [index for index, turn in enumerate(self.turns) if turn > 0]
        turns = [self.turns[index] for index in indices]
        is_event = [self.is_event[index] for index in indices]
        return FollowUp(turns, is_event, self.horizon), indices


class Survival(NamedTuple):
    """Kaplan-Meier estimate over turns 1 to H."""

    survival: list[float]
    """S(1) to S(H): share of episodes without failure through that turn; NaN once no episode is
    observed, unless all had failed."""
    median: int | None
    """First turn at which at most half survive; None if more than half survive the last."""
    num_at_risk: list[int]
    """Episodes observed at each turn."""


def kaplan_meier(follow_up: FollowUp) -> Survival:
    """Compute the Kaplan-Meier estimate of survival, with censored episodes."""
    at_risk_H, events_H = event_counts(follow_up)
    if all(follow_up.is_event) and follow_up.is_event:
        survival_H = 1.0 - events_H.cumsum() / len(follow_up.turns)
    else:
        survival_H = np.where(at_risk_H > 0, (at_risk_H - events_H) / np.maximum(at_risk_H, 1), 1.0)
        survival_H = survival_H.cumprod()
    # Where no episode is left to observe, survival is known only if all failed before: it is 0.
    survival_H[(at_risk_H == 0) & (survival_H > 0)] = math.nan
    # A product of shares, such as 9/10 * 7/9 * 5/7, may exceed one half by its rounding.
    half = np.flatnonzero(survival_H <= 0.5 + ROUNDING)
    median = int(half[0]) + 1 if len(half) else None
    return Survival(survival_H.tolist(), median, at_risk_H.astype(int).tolist())


def event_counts(follow_up: FollowUp) -> tuple[Array, Array]:
    """Return the episodes at risk and the events at each turn, `[H]` each."""
    last = np.asarray(follow_up.turns, dtype=int)
    events = np.asarray(follow_up.is_event, dtype=bool)
    turns_H = np.arange(1, follow_up.horizon + 1)
    at_risk_H = (last[:, None] >= turns_H).sum(axis=0)
    events_H = (last[events, None] == turns_H).sum(axis=0)
    return at_risk_H.astype(np.float64), events_H.astype(np.float64)


def pseudo_values(follow_up: FollowUp) -> Array:
    """Return a number per episode with the Kaplan-Meier share of events as mean, `[E]`.

    1 or 0 without censoring. Otherwise the estimate plus E times the episode's influence on it, so
    that their spread is the estimate's (infinitesimal jackknife):
    F + E S(H) sum_t (dN(t) - Y(t) d_t / n_t) / (n_t - d_t), with d_t events among n_t at risk.
    Leave out episodes censored before turn 1. NaN if no episode was left to observe.
    """
    last, events = np.asarray(follow_up.turns), np.asarray(follow_up.is_event, dtype=bool)
    if follow_up.is_complete:
        return events.astype(np.float64)
    at_risk_H, events_H = event_counts(follow_up)
    values = np.zeros(len(last))
    survival = 1.0
    for turn in range(follow_up.horizon):
        if survival == 0.0:
            break
        num_at_risk = at_risk_H[turn]
        if num_at_risk == 0.0:
            return np.full(len(last), math.nan)
        share = events_H[turn] / num_at_risk
        # Each of `values` is so far S(t - 1) times the sum; with 1 - share it stays defined at 0.
        is_event_E = events & (last == turn + 1)
        influence_E = (is_event_E - share * (last >= turn + 1)) / num_at_risk
        values = values * (1.0 - share) + survival * influence_E
        survival *= 1.0 - share
    return np.asarray(1.0 - survival + len(last) * values)


def hit_at_k(num_tries: int, num_hits: int, k: int) -> float:
    """Return the probability that at least one of k of the tries is a hit.

    Unbiased: `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374, eq. 1). NaN for k > n.
    """
    if k > num_tries:
        return math.nan
    return 1.0 - math.comb(num_tries - num_hits, k) / math.comb(num_tries, k)


def mcnemar_exact(num_only_first: int, num_only_second: int) -> float:
    """Return the two-sided p-value of McNemar's exact test, from the counts of discordant pairs."""
    total = num_only_first + num_only_second
    if total == 0:
        return 1.0
    from scipy import stats

    return float(stats.binomtest(num_only_first, total).pvalue)


def sign_flip_test(differences: Sequence[float], clusters: Sequence[int]) -> float:
    """Return the two-sided p-value of no difference, by flipping the signs of whole clusters.

    1 if no pair differs, and at least `1 / (NUM_FLIPS + 1)`.
    """
    _, index = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.bincount(index, weights=np.asarray(differences, dtype=np.float64))
    if not np.any(sums):
        return 1.0
    rng = np.random.default_rng(derive_seed(0, "sign flips"))
    signs = rng.integers(0, 2, size=(NUM_FLIPS, len(sums)), dtype=np.int8) * 2 - 1
    # A flip that changes nothing but the order of additions must count as equal.
    observed = abs(float(sums.sum())) * (1.0 - ROUNDING)
    num_extreme = np.count_nonzero(np.abs(signs @ sums) >= observed)
    return float((1 + num_extreme) / (NUM_FLIPS + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
