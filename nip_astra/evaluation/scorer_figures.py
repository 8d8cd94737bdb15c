"""What scorers say of the same turns: rates by each, how far they agree, and how good they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.evaluation.agreement import agreement_matrix
from nip_astra.evaluation.detectors import Quality, corrected_rates
from nip_astra.evaluation.measures import failure_rates, judge
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rating import scored_by
from nip_astra.evaluation.rows import Episode


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
