"""How many kinds of failure there are at least, those not seen included.

Chao's estimator for incidences (Chao 1987, often called Chao2), in its bias-corrected form. Of m
sampled units (opening prompts), S kinds were seen, Q1 of them in one unit only and Q2 in two. Kinds
that are seldom seen tell of those never seen:

    S + (m - 1) / m * Q1 (Q1 - 1) / (2 (Q2 + 1)).

A lower bound on average, whatever the kinds' frequencies. The lower end of the interval is S: kinds
that were seen are certain, and nothing shows that there are more. The upper end is Chao's: the
estimate of unseen kinds is taken to be log-normal. Where the estimate is S, it is that of Colwell
et al. (2012, eq. 14).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any


def chao2(num_units_by_kind: Sequence[int], num_units: int, *, level: float) -> dict[str, Any]:
    """A lower bound on the number of kinds, with its interval.

    Parameters
    ----------
    num_units_by_kind : Sequence[int]
        For each kind that was seen, the units in which it was; at least 1 each.
    num_units : int
        Units looked at, those without any kind included.
    """
    seen = len(num_units_by_kind)
    counts = Counter(num_units_by_kind)
    once, twice = counts[1], counts[2]
    share = (num_units - 1) / num_units if num_units else 0.0
    unseen = share * once * (once - 1) / (2 * (twice + 1))
    z = NormalDist().inv_cdf(0.5 + level / 2.0)
    if seen == 0:
        high = 0.0
    elif unseen > 0.0:
        spread = math.log1p(_variance(seen + unseen, once, twice, share) / unseen**2)
        high = seen + unseen * math.exp(z * math.sqrt(spread))
    else:
        high = _bound_of_seen(counts, num_units, z)
    return {
        "seen": seen,
        "seen_once": once,
        "seen_twice": twice,
        "value": seen + unseen,
        "low": float(seen),
        "high": high,
        "level": level,
        "num_units": num_units,
        "method": "Chao2 over opening prompts; a lower bound",
    }


def _variance(estimate: float, once: int, twice: int, share: float) -> float:
    pairs, more = once * (once - 1), twice + 1
    found = share * pairs / (2 * more) + share**2 * once * (2 * once - 1) ** 2 / (4 * more**2)
    if twice:
        return found + share**2 * twice * pairs**2 / (4 * more**4)
    return found - share**2 * once**4 / (4 * estimate)


def _bound_of_seen(counts: Counter[int], num_units: int, z: float) -> float:
    """The upper end where no kind is estimated to be unseen."""
    seen = sum(counts.values())
    missed = sum(number * math.exp(-units) for units, number in counts.items()) / seen
    variance = sum(
        number * (math.exp(-units) - math.exp(-2 * units)) for units, number in counts.items()
    )
    mean = sum(units * math.exp(-units) * number for units, number in counts.items())
    spread = math.sqrt(max(variance - mean**2 / num_units, 0.0))
    middle = seen / (1.0 - missed)
    return middle + z * spread / (1.0 - missed)
