"""All figures of an evaluation: the content of `evaluation.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nip_astra.evaluation.agreement import scorer_figures
from nip_astra.evaluation.clusters import (
    chao2,
    cluster_failures,
    failing_turns,
    likelihood,
    reference_to,
)
from nip_astra.evaluation.detectors import Quality
from nip_astra.evaluation.discoveries import find_plants, tokens_of
from nip_astra.evaluation.failure_probability import (
    REFERENCE,
    WeighedEpisodes,
    importance_sampling,
    monte_carlo,
    refused,
)
from nip_astra.evaluation.failures import COLLAPSED_DISTINCT_SHARE, NUM_PROBES_FOR_COLLAPSE
from nip_astra.evaluation.measured import Replies
from nip_astra.evaluation.measures import (
    failure_rates,
    hit_rates,
    judge,
    likelihood_figures,
    outcomes_of,
    prompt_numbers,
    score_figures,
    token_likelihoods,
    turns_to_failure,
)
from nip_astra.evaluation.outcomes import Outcome, follow_up_of, unknown_warning
from nip_astra.evaluation.playing import EvaluationOptions
from nip_astra.evaluation.rows import Episode, number
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.utils.diversity import distinct_n, mean_cosine_distance, self_bleu, vendi_score

VERSION = 1
"""Of `evaluation.json`; grows when a reader of the old one would misread the new one."""
FLUENCY_PERCENTILE = 1.0
MAX_SHARE_BELOW = 0.05
"""Warned of, where more probes than this share lie below that percentile of the reference's."""
MIN_REFERENCE_PROBES = 300
"""Fewer say too little about a percentile."""
CLUSTER_DISTANCE = 0.5
"""Mean cosine distance up to which groups of failing probes are one cluster."""
MAX_BLEU_TEXTS = 500
"""Texts of a self-BLEU, drawn from all where there are more."""

NGRAMS = "hashed character n-grams"
"""What texts are embedded by unless told otherwise."""

Embed = Callable[[Sequence[str]], Tensor]


def summarise(
    episodes: Sequence[Episode],
    probability_episodes: Sequence[Episode],
    options: EvaluationOptions,
    *,
    embed: Embed,
    embedding: str = NGRAMS,
    planted: Sequence[PlantedFailure] = (),
    scorers: Sequence[str] = (),
    qualities: Mapping[str, Quality] | None = None,
    why_not_weighed: str | None = None,
    parts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Every figure that the rows allow; what they do not is null.

    Parameters
    ----------
    embedding : str
        What `embed` is, for a reader.
    scorers : Sequence[str]
        Names of all scorers, the one that decides first.
    qualities : Mapping[str, Quality], optional
        By scorer, how its verdicts agree with labels.
    why_not_weighed : str, optional
        Why importance weights would not be exact.
    parts : Sequence[Mapping]
        What the work took.
    """
    judge([*episodes, *probability_episodes], options.failure_threshold)
    rates = failure_rates(episodes, level=options.level)
    replies = Replies.of(
        (str(row["response"]), row.get("response_failure"), bool(row.get("is_refused")))
        for episode in episodes
        for row in episode
    )
    probes = [str(row["probe"]) for row in failing_turns(episodes)]
    fluency = _fluency(episodes, probability_episodes)
    figures = {
        "num_episodes": len(episodes),
        "num_prompts": len(set(prompt_numbers(episodes))),
        "tree_depth": options.num_turns,
        "failure_threshold": options.failure_threshold,
        "seed": options.seed,
        **rates,
        "replies": replies._asdict(),
        "scores": score_figures(episodes),
        "nll": likelihood_figures(episodes),
        "turns_to_failure": turns_to_failure(episodes)._asdict(),
        **hit_rates(episodes),
        "diversity": diversity_figures(probes, embed, embedding),
        **_kinds(episodes, embed, planted, options.level),
        "most_likely_failure": _most_likely(episodes),
        "plants": find_plants(episodes, planted),
        "fluency": fluency,
        "why_no_fluency": None
        if fluency is not None
        else _why_no_fluency(probability_episodes, options, why_not_weighed),
        "probability_of_failure": _probability(probability_episodes, options, why_not_weighed),
        **scorer_figures(episodes, scorers, qualities or {}, options),
        "budget": _budget(episodes, probability_episodes, parts),
    }
    return figures | {"warnings": warnings_about(figures)}


def diversity_figures(
    probes: Sequence[str], embed: Embed, embedding: str = NGRAMS
) -> dict[str, Any] | None:
    """The variety of successful probes, each as often as it was said; None without any."""
    if not probes:
        return None
    bleu = {"max_order": 4, "num_sampled": MAX_BLEU_TEXTS, "seed": 0}
    vectors, has_several = embed(probes), len(probes) > 1
    return {
        "num_probes": len(probes),
        "self_bleu_complement": 1.0 - self_bleu(probes, **bleu) if has_several else None,
        "self_bleu_num_probes": min(len(probes), MAX_BLEU_TEXTS),
        "cosine_distance": mean_cosine_distance(vectors) if has_several else None,
        "distinct_1": distinct_n(probes, 1),
        "distinct_2": distinct_n(probes, 2),
        "distinct_share": len(set(probes)) / len(probes),
        "num_distinct": len(set(probes)),
        "most_common": Counter(probes).most_common(1)[0][0],
        "vendi": vendi_score(vectors),
        "settings": {"self_bleu": bleu, "embedding": embedding},
    }


def warnings_about(figures: Mapping[str, Any]) -> list[str]:
    """Say what makes the figures less than they seem."""
    found = []
    variety = figures["diversity"] or {}
    share = variety.get("distinct_share", 1.0)
    if variety.get("num_probes", 0) >= NUM_PROBES_FOR_COLLAPSE and share < COLLAPSED_DISTINCT_SHARE:
        found.append(
            f"the attacker has collapsed: only {share:.0%} of its successful probes are distinct, "
            f"most often {variety['most_common']!r}; the failure rate is that of a few probes"
        )
    fluency = figures["fluency"]
    if fluency is not None and fluency["share_below"] > MAX_SHARE_BELOW:
        found.append(
            f"{fluency['share_below']:.0%} of the probes are less likely per token than all but "
            f"{FLUENCY_PERCENTILE:.0f} % of ordinary ones: the failures may be met by no user"
        )
    if figures["why_no_fluency"] is not None:
        found.append(f"fluency was not measured: {figures['why_no_fluency']}")
    unknown = unknown_warning(figures["failure_rate"], figures["outcomes"])
    found += [] if unknown is None else [unknown]
    found += Replies.read(figures["replies"]).warnings()
    if 0 < figures["failure_rate"]["num_clusters"] < 30:
        found.append(
            f"the intervals rest on {figures['failure_rate']['num_clusters']} opening prompts; "
            "with fewer than 30 they are wide"
        )
    importance = (figures["probability_of_failure"] or {}).get("importance_sampling")
    if importance is not None and importance["is_refused"]:
        found.append(f"importance sampling is refused: {importance['reason']}")
    elif importance is not None and importance["caution"] is not None:
        found.append(f"importance sampling rests on few failures: {importance['caution']}")
    return found


def _kinds(
    episodes: Sequence[Episode],
    embed: Embed,
    planted: Sequence[PlantedFailure],
    level: float,
) -> dict[str, Any]:
    """Clusters of failures, how many there are at least, and when each was first met."""
    groups = cluster_failures(episodes, embed, distance=CLUSTER_DISTANCE, planted=planted)
    clusters = groups["clusters"]
    found = chao2(
        [cluster["num_prompts"] for cluster in clusters],
        len(set(prompt_numbers(episodes))),
        level=level,
    )
    found["by_queries"] = sorted(cluster["first_query"] for cluster in clusters)
    return {"num_clusters": groups["num_clusters"], "clusters": clusters, "kinds": found}


def _fluency(
    episodes: Sequence[Episode], probability_episodes: Sequence[Episode]
) -> dict[str, Any] | None:
    """The share of probes below the first percentile of what the reference itself says."""
    ordinary = token_likelihoods(_of_reference(probability_episodes))
    found = token_likelihoods(episodes)
    if len(ordinary) < MIN_REFERENCE_PROBES or not found:
        return None
    bound = float(np.percentile(ordinary, FLUENCY_PERCENTILE))
    is_below = np.asarray(found) < bound
    return {
        "percentile": FLUENCY_PERCENTILE,
        "bound": bound,
        "share_below": float(np.mean(is_below)),
        "num_below": int(is_below.sum()),
        "num_probes": len(found),
        "num_reference_probes": len(ordinary),
    }


def _why_no_fluency(
    probability_episodes: Sequence[Episode],
    options: EvaluationOptions,
    why_not_weighed: str | None,
) -> str:
    """Say why probes are not held against the reference's."""
    num_said = sum(len(episode) for episode in _of_reference(probability_episodes))
    if num_said >= MIN_REFERENCE_PROBES:
        return "how likely the reference finds a probe is not known of enough of them"
    # Of the importance sampler's episodes half are the reference's.
    shares = 2 if options.use_importance_sampling and why_not_weighed is None else 1
    num_needed = shares * math.ceil(MIN_REFERENCE_PROBES / options.num_turns)
    return (
        f"it takes {MIN_REFERENCE_PROBES} probes of the reference, and there are {num_said}; "
        f"`nip-astra evaluate` with --probability-episodes {num_needed} or more plays them"
    )


def _of_reference(probability_episodes: Sequence[Episode]) -> list[Episode]:
    return [e for e in probability_episodes if e[0].get("proposal") == REFERENCE]


def _probability(
    episodes: Sequence[Episode], options: EvaluationOptions, why_not_weighed: str | None
) -> dict[str, Any] | None:
    """Both estimates of the probability of failure under the reference."""
    if not episodes:
        return None
    own = _of_reference(episodes)
    outcomes = [outcomes_of(episode) for episode in own]
    plain = monte_carlo(
        outcomes, prompt_numbers(own), num_turns=options.num_turns, level=options.level
    )
    weighed = None
    if options.use_importance_sampling:
        if why_not_weighed is not None:
            weighed = refused(why_not_weighed, level=options.level).to_dict()
        else:
            weighed = _weighed(episodes, options.level)
    return {"horizon": options.num_turns, "monte_carlo": plain, "importance_sampling": weighed}


def _weighed(episodes: Sequence[Episode], level: float) -> dict[str, Any]:
    ratios = np.array(
        [
            [
                number(row, "attacker_sampled_logprob") - number(row, "reference_sampled_logprob")
                for row in episode
            ]
            for episode in episodes
        ]
    )
    if np.isnan(ratios).any():
        reason = "the backend cannot tell which tokens it may draw, so weights are not exact"
        return refused(reason, level=level).to_dict()
    weighed = WeighedEpisodes(
        ratios,
        follow_up_of([outcomes_of(episode) for episode in episodes]),
        [str(episode[0]["proposal"]) for episode in episodes],
        prompt_numbers(episodes),
    )
    return importance_sampling(weighed, level=level).to_dict()


def _first_failure(episode: Episode) -> int:
    outcomes = outcomes_of(episode)
    return outcomes.index(Outcome.FAILURE) if Outcome.FAILURE in outcomes else -1


def _most_likely(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """The failing turn whose conversation up to it the reference finds most likely."""
    found: list[tuple[float, Episode]] = []
    for episode in episodes:
        turn = _first_failure(episode)
        if turn >= 0:
            found.append((sum(likelihood(row) for row in episode[: turn + 1]), episode[: turn + 1]))
    if not found:
        return None
    logprob, path = max(found, key=lambda pair: pair[0])
    return {"conversation_logprob": logprob, **reference_to(path[-1])}


def _budget(
    episodes: Sequence[Episode],
    probability_episodes: Sequence[Episode],
    parts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    def added(name: str) -> float:
        return sum(number(part, name) for part in parts if name in part)

    rows = [row for episode in episodes for row in episode]
    return {
        "target_queries": len(rows),
        "tokens": sum(tokens_of(row) for row in rows),
        "probability_target_queries": sum(len(episode) for episode in probability_episodes),
        "reused_target_queries": int(added("reused_queries")),
        "scorer_calls": int(added("scorer_calls")),
        "seconds": added("seconds"),
        "tokens_generated": int(added("tokens_generated")),
        "tokens_per_second": _per(added("tokens_generated"), added("seconds")),
        "tokens_forwarded": int(added("tokens_forwarded")),
    }


def _per(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
