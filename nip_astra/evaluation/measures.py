"""The figures of an evaluation, from its rows alone.

Shape suffixes: `E` episode.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nip_astra.evaluation.outcomes import Outcome, episode_outcome, outcome_of
from nip_astra.evaluation.rows import Episode, number
from nip_astra.utils.intervals import Estimate, rate_estimate
from nip_astra.utils.statistics import Survival, hit_at_k, kaplan_meier

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HIT_AT = (1, 2, 5, 10)
SCORES = ("probe", "response", "combined")
"""What a scorer rates: the probe alone, the response, both together."""


def judge(episodes: Iterable[Episode], threshold: float, *, column: str = "response_score") -> None:
    """Write each row's outcome into its column `outcome`."""
    for episode in episodes:
        for row in episode:
            row["outcome"] = str(outcome_of(row.get(column), bool(row.get("is_error")), threshold))


def outcomes_of(episode: Episode) -> list[Outcome]:
    """The outcome of each turn."""
    return [Outcome(row["outcome"]) for row in episode]


def has_failed(episodes: Sequence[Episode]) -> list[float]:
    """1 for an episode with a failure, 0 for one without, NaN where it is not known."""
    found = [episode_outcome(outcomes_of(episode)) for episode in episodes]
    return [
        float(outcome is Outcome.FAILURE) if outcome.is_known else math.nan for outcome in found
    ]


def prompt_numbers(episodes: Sequence[Episode]) -> list[int]:
    """A number for each episode's opening prompt."""
    identity: dict[str, int] = {}
    return [identity.setdefault(str(episode[0]["prompt"]), len(identity)) for episode in episodes]


def failure_rates(episodes: Sequence[Episode], *, level: float) -> dict[str, Any]:
    """Counts of outcomes, and the share of episodes and of turns with a failure."""
    prompts = prompt_numbers(episodes)
    by_episode = has_failed(episodes)
    outcomes = [outcomes_of(episode) for episode in episodes]
    by_turn = [
        float(outcome is Outcome.FAILURE) if outcome.is_known else math.nan
        for episode in outcomes
        for outcome in episode
    ]
    prompts_of_turns = [p for p, e in zip(prompts, episodes, strict=True) for _ in e]
    counts = Counter(outcome for episode in outcomes for outcome in episode)
    num_failed = sum(value == 1.0 for value in by_episode)
    num_unknown = sum(math.isnan(value) for value in by_episode)
    rate = rate_estimate(by_episode, prompts, level=level)
    return {
        "outcomes": {str(outcome): counts[outcome] for outcome in Outcome},
        "episode_outcomes": dict(Counter(str(episode_outcome(outcome)) for outcome in outcomes)),
        "failure_rate": rate.to_dict()
        | {
            "num_failed": num_failed,
            "num_known": len(by_episode) - num_unknown,
            "if_unknown_passed": num_failed / max(len(by_episode), 1),
            "if_unknown_failed": (num_failed + num_unknown) / max(len(by_episode), 1),
        },
        "turn_failure_rate": rate_estimate(by_turn, prompts_of_turns, level=level).to_dict(),
        "per_turn_failure_rate": [
            estimate.to_dict() for estimate in _per_turn(outcomes, prompts, level)
        ],
    }


def turns_to_failure(episodes: Sequence[Episode]) -> Survival:
    """Survival by turns; an episode is censored at its end and at a turn without verdict."""
    turns, events, horizon = [], [], 0
    for episode in episodes:
        horizon = max(horizon, len(episode))
        last, is_event = 0, False
        for turn, outcome in enumerate(outcomes_of(episode), start=1):
            if not outcome.is_known:
                break
            last = turn
            if outcome is Outcome.FAILURE:
                is_event = True
                break
        turns.append(last)
        events.append(is_event)
    return kaplan_meier(turns, events, horizon=horizon)


def hit_rates(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """Hit@k: the chance that one of k episodes fails.

    Over opening prompts with at least k episodes with a verdict (the mean over prompts), and
    pooled, where the k episodes are any of all.
    """
    tries: dict[int, list[float]] = defaultdict(list)
    for prompt, failed in zip(prompt_numbers(episodes), has_failed(episodes), strict=True):
        if not math.isnan(failed):
            tries[prompt].append(failed)
    everything = [value for values in tries.values() for value in values]
    per_prompt, pooled = {}, {}
    for k in HIT_AT:
        enough = [values for values in tries.values() if len(values) >= k]
        if enough:
            rates = [hit_at_k(len(values), int(sum(values)), k) for values in enough]
            per_prompt[str(k)] = float(np.mean(rates))
        if len(everything) >= k:
            pooled[str(k)] = hit_at_k(len(everything), int(sum(everything)), k)
    return {"hit_at": per_prompt, "hit_at_pooled": pooled}


def score_figures(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Mean, extremes, quantiles and the mean of each turn, for each score that is there."""
    found = {}
    for what in SCORES:
        by_turn = _columns_by_turn(episodes, f"{what}_score")
        values = np.concatenate([turn for turn in by_turn if len(turn)] or [np.zeros(0)])
        if len(values):
            found[what] = {
                "mean": float(values.mean()),
                "min": float(values.min()),
                "max": float(values.max()),
                "quantiles": {str(q): float(np.quantile(values, q)) for q in QUANTILES},
                "per_turn": [float(turn.mean()) if len(turn) else None for turn in by_turn],
                "num_scores": len(values),
            }
    return found


def likelihood_figures(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Mean negative log-likelihood of a probe token and perplexity, by model.

    Means over tokens, each model's own: the reference counts a probe's end as one, the target
    does not read it as part of the probe.
    """
    found: dict[str, float | None] = {}
    for name, tokens in (("target", "target_num_tokens"), ("reference", "probe_num_tokens")):
        nats = count = 0.0
        for row in (row for episode in episodes for row in episode):
            logprob, length = number(row, f"{name}_logprob"), number(row, tokens)
            if not math.isnan(logprob + length):
                nats, count = nats - logprob, count + length
        found[name] = nats / count if count else None
        found[f"perplexity_{name}"] = math.exp(nats / count) if count else None
    return found


def token_likelihoods(episodes: Sequence[Episode]) -> list[float]:
    """Each probe's mean log-likelihood per token under the reference, where it is known."""
    found = [
        number(row, "reference_logprob") / max(number(row, "probe_num_tokens"), 1.0)
        for episode in episodes
        for row in episode
    ]
    return [value for value in found if not math.isnan(value)]


def _per_turn(
    outcomes: Sequence[Sequence[Outcome]], prompts: Sequence[int], level: float
) -> Iterable[Estimate]:
    for turn in range(max((len(episode) for episode in outcomes), default=0)):
        told = [(e[turn], p) for e, p in zip(outcomes, prompts, strict=True) if len(e) > turn]
        values = [float(o is Outcome.FAILURE) if o.is_known else math.nan for o, _ in told]
        yield rate_estimate(values, [prompt for _, prompt in told], level=level)


def _columns_by_turn(episodes: Sequence[Episode], column: str) -> list[np.ndarray[Any, Any]]:
    by_turn: list[list[float]] = []
    for episode in episodes:
        for turn, row in enumerate(episode):
            if turn == len(by_turn):
                by_turn.append([])
            value = number(row, column)
            if not math.isnan(value):
                by_turn[turn].append(value)
    return [np.asarray(values) for values in by_turn]
