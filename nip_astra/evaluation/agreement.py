"""How far scorers agree with one another on the same turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.rows import Episode, number


def agreement_matrix(views: Mapping[str, Sequence[Episode]]) -> list[dict[str, Any]]:
    """For each two scorers how often, and how far beyond chance, their verdicts agree.

    Turns on which one of the two has no verdict are left out. Cohen's kappa is
    (observed - expected) / (1 - expected) agreement; null where both always say the same one thing.
    The correlation (Pearson's) is that of scores; null where one of them never varies.

    Parameters
    ----------
    views : Mapping[str, Sequence[Episode]]
        By scorer, the same episodes, judged by it: `outcome` and `response_score` are its own.
    """
    turns = {name: [row for episode in own for row in episode] for name, own in views.items()}
    found = []
    for first, second in combinations(turns, 2):
        pairs = [
            (a, b)
            for a, b in zip(turns[first], turns[second], strict=True)
            if Outcome(a["outcome"]).is_known and Outcome(b["outcome"]).is_known
        ]
        flags = Counter((_is_failure(a), _is_failure(b)) for a, b in pairs)
        scores = [(number(a, "response_score"), number(b, "response_score")) for a, b in pairs]
        found.append(
            {
                "first": first,
                "second": second,
                "num_turns": len(pairs),
                "agreement": _agreement(flags),
                "kappa": cohens_kappa(flags),
                "correlation": _correlation(scores),
                "both": flags[True, True],
                "only_first": flags[True, False],
                "only_second": flags[False, True],
                "neither": flags[False, False],
            }
        )
    return found


def cohens_kappa(flags: Mapping[tuple[bool, bool], int]) -> float | None:
    """Cohen's kappa of two raters' counts of (first says yes, second says yes)."""
    total, observed = sum(flags.values()), _agreement(flags)
    if observed is None:
        return None
    expected = 0.0
    for says in (True, False):
        first = sum(count for (one, _), count in flags.items() if one is says)
        second = sum(count for (_, other), count in flags.items() if other is says)
        expected += first * second / total**2
    return None if expected == 1.0 else (observed - expected) / (1.0 - expected)


def _agreement(flags: Mapping[tuple[bool, bool], int]) -> float | None:
    total = sum(flags.values())
    alike = sum(count for (first, second), count in flags.items() if first is second)
    return alike / total if total else None


def _correlation(scores: Sequence[tuple[float, float]]) -> float | None:
    if len(scores) < 2:
        return None
    first, second = np.asarray(scores, dtype=np.float64).T
    if np.ptp(first) == 0.0 or np.ptp(second) == 0.0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _is_failure(row: Mapping[str, Any]) -> bool:
    return bool(row["outcome"] == Outcome.FAILURE)
