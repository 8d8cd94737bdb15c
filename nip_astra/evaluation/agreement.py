"""Figures of several scorers on the same turns: rates, agreement, and quality by labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from nip_astra.evaluation.detectors import Quality, corrected_rates
from nip_astra.evaluation.measures import failure_rates, judge
from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rating import scored_by
from nip_astra.evaluation.rows import Episode, number


def scorer_figures(
    episodes: Sequence[Episode],
    scorers: Sequence[str],
    qualities: Mapping[str, Quality],
    options: EvaluationOptions,
) -> dict[str, Any]:
    """Failure rates by each further scorer, agreement of each two, and quality by labels.

    Parameters
    ----------
    episodes : Sequence[Episode]
        Judged by the first scorer.
    scorers : Sequence[str]
        Names of all scorers, the one that decides first.
    qualities : Mapping[str, Quality]
        By scorer, how its verdicts agree with labels; empty without labels.
    """
    sampled: dict[str, Any] = {
        "num_resamples": options.num_bootstrap_resamples,
        "level": options.level,
    }
    views = dict.fromkeys(scorers[:1], episodes)
    for name in scorers[1:]:
        view = scored_by(name)
        views[name] = [[view(row) for row in episode] for episode in episodes]
        judge(views[name], options.failure_threshold)
    agreements = agreement_matrix(views)
    with_first = {pair["second"]: pair for pair in agreements if pair["first"] in scorers[:1]}
    kept = ("outcomes", "failure_rate", "turn_failure_rate")
    rates = {name: failure_rates(views[name], level=options.level) for name in scorers[1:]}
    return {
        "scorers": {
            name: {key: found[key] for key in kept}
            | {key: with_first[name][key] for key in ("agreement", "num_turns")}
            for name, found in rates.items()
        },
        "scorer_agreement": agreements,
        "detectors": {
            name: quality.to_dict(options.level)
            | {"corrected": corrected_rates(views[name], quality, **sampled)}
            for name, quality in qualities.items()
        },
    }


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
