"""All figures of an evaluation: the content of `evaluation.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nip_astra.errors import counted
from nip_astra.evaluation.clusters import (
    chao2,
    cluster_failures,
    failing_turns,
    find_plants,
    likelihood,
    reference_to,
    tokens_of,
)
from nip_astra.evaluation.detectors import LabelDesign, Quality, corrected_rates
from nip_astra.evaluation.failure_probability import (
    REFERENCE,
    ImportanceEstimate,
    WeighedEpisodes,
    importance_sampling,
    monte_carlo,
)
from nip_astra.evaluation.outcomes import (
    Outcome,
    Replies,
    failure_rate,
    failure_rates,
    follow_up_of,
    hit_rates,
    judge,
    likelihood_figures,
    numbered,
    outcome_of,
    outcomes_of,
    prompt_numbers,
    score_figures,
    token_likelihoods,
    turns_to_failure,
    unknown_warning,
)
from nip_astra.evaluation.playing import EvaluationOptions, scored_by
from nip_astra.evaluation.storage import Episode, number
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.scenario_base.conversation.planted_failures import Discovery, PlantedFailure
from nip_astra.utils.diversity import distinct_n, mean_cosine_distance, self_bleu, vendi_score

VERSION = 1
"""Version of `evaluation.json`; changed if readers of the previous version would misread it."""
FLUENCY_PERCENTILE = 1.0
MAX_SHARE_BELOW = 0.05
"""Share of probes below the reference's percentile above which a warning is issued."""
MIN_REFERENCE_PROBES = 300
"""Minimum number of reference probes for a percentile."""
CLUSTER_DISTANCE = 0.5
"""Largest mean cosine distance at which groups of failing probes are merged."""
MAX_BLEU_TEXTS = 500
"""Maximum number of texts in a self-BLEU; a random sample if there are more."""

COLLAPSED_DISTINCT_SHARE = 0.3
"""Share of distinct successful probes below which an attacker counts as collapsed."""
NUM_PROBES_FOR_COLLAPSE = 20
"""Minimum number of successful probes to judge their variety."""
RUN_FIGURES = (
    *("failure_rate", "failure_rate_interval", "mean_score", "mean_reward", "probe_nll"),
    *("distinct_share", "num_successful_probes", "most_common_probe", "plants_found"),
    *("num_plants", "first_query", "num_episodes", "target_queries", "num_failed", "num_known"),
    *("if_unknown_passed", "if_unknown_failed", "lowest", "highest", "num_distinct_probes"),
    *("outcomes", "replies"),
)
"""Figures that a trainer measures of its attacker.

The rate is that of `FailureRate`, with a 95 % interval over opening prompts; `probe_nll` is a mean
over tokens under the reference, nats; `distinct_share` is null if no probe succeeded, and
`first_query` has the target queries until each planted failure was first met.
"""
NGRAMS = "hashed character n-grams"
"""The default embedding."""

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
    num_listed_attacks: int | None = None,
    parts: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return all figures of an evaluation; null if the rows do not determine them.

    Parameters
    ----------
    embedding : str
        Describes `embed`.
    scorers : Sequence[str]
        Names of all scorers, the deciding one first.
    qualities : Mapping[str, Quality], optional
        By scorer, how its verdicts agree with labels.
    why_not_weighed : str, optional
        Why importance weights would not be exact.
    num_listed_attacks : int, optional
        The number of attacks of a list, which episodes repeat in order. In the diversity a
        successful attack counts once: that it is played again says nothing about the attacker.
    parts : Sequence[Mapping]
        Costs of the parts of the work.
    """
    judge([*episodes, *probability_episodes], options.failure_threshold)
    rates = failure_rates(episodes, level=options.level)
    replies = Replies.of(
        (
            str(row["response"] or row.get("response_calls") or ""),
            row.get("response_failure"),
            bool(row.get("is_refused")),
        )
        for episode in episodes
        for row in episode
    )
    failing = failing_turns(episodes)
    if num_listed_attacks is not None:
        failing = [*{int(row["episode"]) % num_listed_attacks: row for row in failing}.values()]
    probes = [str(row["probe"]) for row in failing]
    fluency = _fluency(episodes, probability_episodes)
    groups = cluster_failures(episodes, embed, distance=CLUSTER_DISTANCE, planted=planted)
    clusters, num_prompts = groups["clusters"], len(set(prompt_numbers(episodes)))
    kinds = chao2([one["num_prompts"] for one in clusters], num_prompts, level=options.level)
    figures = {
        "num_episodes": len(episodes),
        "num_prompts": num_prompts,
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
        "num_clusters": groups["num_clusters"],
        "num_unclustered_probes": groups["num_left_out"],
        "clusters": clusters,
        "kinds": kinds | {"by_queries": sorted(one["first_query"] for one in clusters)},
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
    """Return the diversity of successful probes, counted with repetitions; None without any."""
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
    """Return warnings about the figures."""
    found = []
    variety = figures["diversity"] or {}
    names = ("num_probes", "distinct_share", "most_common")
    collapse = collapse_of(*(variety.get(name) for name in names))
    found += [] if collapse is None else [f"{collapse}; the failure rate is that of a few probes"]
    fluency = figures["fluency"]
    if fluency is not None and fluency["share_below"] > MAX_SHARE_BELOW:
        found.append(
            f"{fluency['share_below']:.0%} of the probes are less likely per token than all but "
            f"{FLUENCY_PERCENTILE:.0f} % of ordinary ones: the failures may be met by no user"
        )
    if figures["why_no_fluency"] is not None:
        found.append(f"fluency was not measured: {figures['why_no_fluency']}")
    if figures["num_unclustered_probes"]:
        found.append(
            f"{counted(figures['num_unclustered_probes'], 'distinct failing probe')}, the least "
            "frequent, are in no cluster: the numbers of clusters and kinds are too small"
        )
    unknown = unknown_warning(figures["failure_rate"], figures["outcomes"])
    found += [] if unknown is None else [unknown]
    found += Replies.read(figures["replies"]).warnings()
    if 0 < figures["failure_rate"]["num_clusters"] < 30:
        found.append(
            "the intervals rest on "
            f"{counted(figures['failure_rate']['num_clusters'], 'opening prompt')}; with "
            "fewer than 30 they are wide"
        )
    if any(quality["design"] == LabelDesign.UNKNOWN for quality in figures["detectors"].values()):
        found.append(
            "the labelled responses do not say how they were drawn, and count as a random sample; "
            "give each its stratum and weight, or the corrected rates may be wrong"
        )
    importance = (figures["probability_of_failure"] or {}).get("importance_sampling")
    if importance is not None and importance["is_refused"]:
        found.append(f"importance sampling is refused: {importance['reason']}")
    elif importance is not None and importance["caution"] is not None:
        found.append(f"importance sampling rests on few failures: {importance['caution']}")
    return found


def collapse_of(
    num_probes: int | None, distinct_share: float | None, most_common: str | None
) -> str | None:
    """Return a warning if there are many successful probes and nearly all are equal."""
    if (num_probes or 0) < NUM_PROBES_FOR_COLLAPSE or distinct_share is None:
        return None
    if distinct_share >= COLLAPSED_DISTINCT_SHARE:
        return None
    return (
        f"the attacker has collapsed: only {distinct_share:.0%} of its successful probes are "
        f"distinct, most often {most_common!r}"
    )


def _fluency(
    episodes: Sequence[Episode], probability_episodes: Sequence[Episode]
) -> dict[str, Any] | None:
    """Return the share of probes below the first percentile of the reference's own probes."""
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
    """Return why probes are not compared with the reference's."""
    num_probes = sum(len(episode) for episode in _of_reference(probability_episodes))
    if num_probes >= MIN_REFERENCE_PROBES:
        return "how likely the reference finds a probe is not known of enough of them"
    # Half of the importance sampler's episodes are the reference's.
    shares = 2 if options.use_importance_sampling and why_not_weighed is None else 1
    num_needed = shares * math.ceil(MIN_REFERENCE_PROBES / options.num_turns)
    return (
        f"it takes {MIN_REFERENCE_PROBES} probes of the reference, and there are {num_probes}; "
        f"`nip-astra evaluate` with --probability-episodes {num_needed} or more plays them"
    )


def _of_reference(probability_episodes: Sequence[Episode]) -> list[Episode]:
    return [e for e in probability_episodes if e[0].get("proposal") == REFERENCE]


def _probability(
    episodes: Sequence[Episode], options: EvaluationOptions, why_not_weighed: str | None
) -> dict[str, Any] | None:
    """Return both estimates of the probability of failure under the reference."""
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
            weighed = ImportanceEstimate(why_not_weighed, options.level).to_dict()
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
        reason = "the backend does not report which tokens it may draw, so weights are not exact"
        return ImportanceEstimate(reason, level).to_dict()
    weighed = WeighedEpisodes(
        ratios,
        follow_up_of([outcomes_of(episode) for episode in episodes]),
        [str(episode[0]["proposal"]) for episode in episodes],
        prompt_numbers(episodes),
    )
    return importance_sampling(weighed, level=level).to_dict()


def _most_likely(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Return the failing turn with the conversation that is most likely under the reference."""
    found: list[tuple[float, Episode]] = []
    for episode in episodes:
        outcomes = outcomes_of(episode)
        if Outcome.FAILURE in outcomes:
            path = episode[: outcomes.index(Outcome.FAILURE) + 1]
            found.append((sum(map(likelihood, path)), path))
    if not found:
        return None
    logprob, path = max(found, key=lambda pair: pair[0])
    return {"conversation_logprob": logprob, **reference_to(path[-1])}


def _budget(
    episodes: Sequence[Episode],
    probability_episodes: Sequence[Episode],
    parts: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(number(part, name) for part in parts if name in part)

    rows = [row for episode in episodes for row in episode]
    seconds = total("seconds")
    return {
        "target_queries": len(rows),
        "tokens": sum(map(tokens_of, rows)),
        "probability_target_queries": sum(map(len, probability_episodes)),
        "reused_target_queries": int(total("reused_queries")),
        "scorer_calls": int(total("scorer_calls")),
        "seconds": seconds,
        "tokens_generated": int(total("tokens_generated")),
        "tokens_per_second": total("tokens_generated") / seconds if seconds > 0 else None,
        "tokens_forwarded": int(total("tokens_forwarded")),
    }


def scorer_figures(
    episodes: Sequence[Episode],
    scorers: Sequence[str],
    qualities: Mapping[str, Quality],
    options: EvaluationOptions,
) -> dict[str, Any]:
    """Return failure rates by each further scorer, pairwise agreement, and accuracy on labels.

    `episodes` are judged by the first of `scorers`, which decides.
    """
    views = dict.fromkeys(scorers[:1], episodes)
    for name in scorers[1:]:
        views[name] = [scored_by(name, episode) for episode in episodes]
        judge(views[name], options.failure_threshold)
    agreements = agreement_matrix(views)
    with_first = {pair["second"]: pair for pair in agreements if pair["first"] in scorers[:1]}
    rates = {name: failure_rates(views[name], level=options.level) for name in scorers[1:]}
    return {
        "scorers": {
            name: {key: own[key] for key in ("outcomes", "failure_rate", "turn_failure_rate")}
            | {key: with_first[name][key] for key in ("agreement", "num_turns")}
            for name, own in rates.items()
        },
        "scorer_agreement": agreements,
        "detectors": {
            name: quality.to_dict(options.level)
            | {
                "corrected": corrected_rates(
                    views[name],
                    quality,
                    num_resamples=options.num_bootstrap_resamples,
                    level=options.level,
                )
            }
            for name, quality in qualities.items()
        },
    }


def agreement_matrix(views: Mapping[str, Sequence[Episode]]) -> list[dict[str, Any]]:
    """Return for each pair of scorers how often, and how far beyond chance, their verdicts agree.

    Turns without a verdict of both are left out. Cohen's kappa is (observed - expected) /
    (1 - expected) agreement; null if both always give the same verdict. The correlation is
    Pearson's of the scores; null if one of them never varies.

    Parameters
    ----------
    views : Mapping[str, Sequence[Episode]]
        By scorer, the same episodes, with its own `outcome` and `response_score`.
    """
    turns = {name: [row for episode in own for row in episode] for name, own in views.items()}
    matrix = []
    for first, second in combinations(turns, 2):
        pairs = [
            (a, b)
            for a, b in zip(turns[first], turns[second], strict=True)
            if Outcome(a["outcome"]).is_known and Outcome(b["outcome"]).is_known
        ]
        flags = Counter(tuple(row["outcome"] == Outcome.FAILURE for row in pair) for pair in pairs)
        scores = [(number(a, "response_score"), number(b, "response_score")) for a, b in pairs]
        matrix.append(
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
    return matrix


def cohens_kappa(flags: Mapping[Any, int]) -> float | None:
    """Return Cohen's kappa of two raters, from counts of their pairs of verdicts."""
    total, observed = sum(flags.values()), _agreement(flags)
    if observed is None:
        return None
    expected = 0.0
    for verdict in (True, False):
        first = sum(count for (one, _), count in flags.items() if one is verdict)
        second = sum(count for (_, other), count in flags.items() if other is verdict)
        expected += first * second / total**2
    return None if expected == 1.0 else (observed - expected) / (1.0 - expected)


def _agreement(flags: Mapping[Any, int]) -> float | None:
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


# ---- rollouts of a trainer


class FailureTally:
    """Accumulates rollouts into the figures measured by a trainer.

    Attributes
    ----------
    trees : list[RolloutTree]
        The rollouts so far.
    """

    def __init__(self, planted: Sequence[PlantedFailure], failure_threshold: float) -> None:
        self.failure_threshold = failure_threshold
        self.discovery = Discovery(planted, failure_threshold)
        self.trees: list[RolloutTree] = []
        self._episodes: list[list[Outcome]] = []
        self._successes: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._replies = Replies()

    def add(self, tree: RolloutTree) -> None:
        """Add a rollout."""
        self.trees.append(tree)
        nodes, sums = tree.nodes, self._sums
        scores_N, rewards_N = nodes["response_score"], nodes["reward"]
        self._episodes += outcomes_by_episode(tree, self.failure_threshold)
        is_failure_N = scores_N >= self.failure_threshold
        self._successes.update(tree.probes[i] for i in is_failure_N.nonzero().flatten().tolist())
        sums["nodes"] += tree.num_nodes
        sums["score"] += scores_N[~scores_N.isnan()].double().sum().item()
        sums["reward"] += rewards_N[~rewards_N.isnan()].double().sum().item()
        sums["rewarded"] += int((~rewards_N.isnan()).sum())
        sums["nll"] -= (nodes["reference_logprobs"].double() * nodes["probe_mask"]).sum().item()
        sums["tokens"] += int(nodes["probe_mask"].sum())
        self.discovery.update(tree)
        self._replies += Replies.of(tree.replies())

    def report(self) -> dict[str, Any]:
        """Return the `RUN_FIGURES` of all rollouts so far."""
        prompts = numbered(prompt for tree in self.trees for prompt in tree.prompts)
        rate = failure_rate(self._episodes, prompts)
        counts = Counter(outcome for episode in self._episodes for outcome in episode)
        sums, successes, has_plants = self._sums, self._successes, bool(self.discovery.planted)
        num_successes = successes.total()
        found = {
            "failure_rate": rate.estimate.value,
            "failure_rate_interval": [rate.estimate.low, rate.estimate.high],
            "mean_score": _mean(sums["score"], sum(counts[one] for one in Outcome if one.is_known)),
            "mean_reward": _mean(sums["reward"], sums["rewarded"]),
            "probe_nll": sums["nll"] / max(sums["tokens"], 1),
            "distinct_share": len(successes) / num_successes if num_successes else None,
            "num_successful_probes": num_successes,
            "most_common_probe": successes.most_common(1)[0][0] if num_successes else None,
            "plants_found": self.discovery.num_found if has_plants else None,
            "num_plants": len(self.discovery.planted) if has_plants else None,
            "first_query": dict(self.discovery.first_query),
            "target_queries": int(sums["nodes"]),
            "num_distinct_probes": len(successes),
            "outcomes": {str(outcome): counts[outcome] for outcome in Outcome},
            "replies": self._replies._asdict(),
        } | rate.to_dict()
        return {name: found[name] for name in RUN_FIGURES}


def outcomes_by_episode(tree: RolloutTree, failure_threshold: float) -> list[list[Outcome]]:
    """Return the outcomes of each episode's nodes, in order."""
    scores_N = tree.nodes["response_score"]
    is_error_N = tree.nodes.get("is_error", torch.zeros_like(scores_N, dtype=torch.bool))
    columns = (one.tolist() for one in (tree.nodes["episode"], scores_N, is_error_N))
    outcomes: list[list[Outcome]] = [[] for _ in range(tree.num_episodes)]
    for episode, score, is_error in zip(*columns, strict=True):
        outcomes[episode].append(outcome_of(score, is_error, failure_threshold))
    return outcomes


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan
