"""The figures of an evaluation, from its rows alone.

Shape suffixes: `E` episode.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from nip_astra.evaluation.outcomes import (
    Outcome,
    episode_outcome,
    failure_rate,
    follow_up_of,
    outcome_of,
)
from nip_astra.evaluation.rows import Episode, number
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
    """1 for an episode with a failure, 0 for one without, NaN where a verdict is missing first."""
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
    outcomes = [outcomes_of(episode) for episode in episodes]
    # Of single turns, what is missing is left out.
    turns = [[turn] for episode in outcomes for turn in episode]
    prompts_of_turns = [p for p, e in zip(prompts, episodes, strict=True) for _ in e]
    counts = Counter(outcome for episode in outcomes for outcome in episode)
    return {
        "outcomes": {str(outcome): counts[outcome] for outcome in Outcome},
        "episode_outcomes": dict(Counter(str(episode_outcome(outcome)) for outcome in outcomes)),
        "failure_rate": failure_rate(outcomes, prompts, level=level).to_dict(),
        "turn_failure_rate": _rate_of_turns(turns, prompts_of_turns, level),
        "per_turn_failure_rate": list(_per_turn(outcomes, prompts, level)),
    }


def turns_to_failure(episodes: Sequence[Episode]) -> Survival:
    """Survival by turns; an episode is censored at its first turn without a verdict."""
    return kaplan_meier(follow_up_of([outcomes_of(episode) for episode in episodes]))


def hit_rates(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Hit@k: the chance that one of k episodes fails.

    Over opening prompts with at least k episodes (the mean over prompts), and pooled, where the k
    episodes are any of all. Only episodes with a verdict on every turn count: which are left out
    must not depend on whether they failed. The numbers of prompts and episodes stand beside.
    """
    tries: dict[int, list[bool]] = defaultdict(list)
    for prompt, episode in zip(prompt_numbers(episodes), episodes, strict=True):
        outcomes = outcomes_of(episode)
        if all(outcome.is_known for outcome in outcomes):
            tries[prompt].append(Outcome.FAILURE in outcomes)
    everything = [value for values in tries.values() for value in values]
    per_prompt, num_prompts, pooled = {}, {}, {}
    for k in HIT_AT:
        enough = [values for values in tries.values() if len(values) >= k]
        if enough:
            rates = [hit_at_k(len(values), sum(values), k) for values in enough]
            per_prompt[str(k)] = float(np.mean(rates))
            num_prompts[str(k)] = len(enough)
        if len(everything) >= k:
            pooled[str(k)] = hit_at_k(len(everything), sum(everything), k)
    return {
        "hit_at": per_prompt,
        "hit_at_pooled": pooled,
        "hit_at_num_prompts": num_prompts,
        "hit_at_num_episodes": len(everything),
    }


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


def mean_score(episode: Episode) -> float:
    """Mean score of an episode's responses, NaN where none has one."""
    known = [value for row in episode if not math.isnan(value := number(row, "response_score"))]
    return sum(known) / len(known) if known else math.nan


def nats_per_token(episode: Episode) -> float:
    """Negative log-likelihood of a probe token under the reference, NaN where it is unknown."""
    tokens = sum(number(row, "probe_num_tokens") for row in episode)
    nats = -sum(number(row, "reference_logprob") for row in episode)
    return nats / tokens if tokens > 0 else math.nan


def _per_turn(
    outcomes: Sequence[Sequence[Outcome]], prompts: Sequence[int], level: float
) -> Iterable[dict[str, Any]]:
    for turn in range(max((len(episode) for episode in outcomes), default=0)):
        found = [(e[turn], p) for e, p in zip(outcomes, prompts, strict=True) if len(e) > turn]
        yield _rate_of_turns([[o] for o, _ in found], [prompt for _, prompt in found], level)


def _rate_of_turns(
    turns: Sequence[Sequence[Outcome]], prompts: Sequence[int], level: float
) -> dict[str, Any]:
    """The share of failures among turns with a verdict, and how many they are."""
    rate = failure_rate(turns, prompts, level=level)
    return rate.estimate.to_dict() | {"num_failed": rate.num_failed, "num_known": rate.num_known}


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
