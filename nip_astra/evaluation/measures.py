"""The figures of an evaluation, from its rows alone."""

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
from nip_astra.evaluation.storage import Episode, number
from nip_astra.utils.statistics import Survival, hit_at_k, kaplan_meier

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HIT_AT = (1, 2, 5, 10)
SCORES = ("probe", "response", "combined")
"""A scorer rates the probe alone, the response, and both together."""


def judge(episodes: Iterable[Episode], threshold: float) -> None:
    """Write each row's outcome into its column `outcome`."""
    for row in (row for episode in episodes for row in episode):
        is_error = bool(row.get("is_error"))
        row["outcome"] = str(outcome_of(row.get("response_score"), is_error, threshold))


def outcomes_of(episode: Episode) -> list[Outcome]:
    """The outcome of each turn."""
    return [Outcome(row["outcome"]) for row in episode]


def has_failed(episodes: Sequence[Episode]) -> list[float]:
    """1 for an episode with a failure, 0 for one without, NaN if a verdict is missing first."""
    outcomes = [episode_outcome(outcomes_of(episode)) for episode in episodes]
    return [float(one is Outcome.FAILURE) if one.is_known else math.nan for one in outcomes]


def prompt_numbers(episodes: Sequence[Episode]) -> list[int]:
    """A number for each episode's opening prompt."""
    identity: dict[str, int] = {}
    return [identity.setdefault(str(episode[0]["prompt"]), len(identity)) for episode in episodes]


def failure_rates(episodes: Sequence[Episode], *, level: float) -> dict[str, Any]:
    """Counts of outcomes, and the share of episodes and of turns with a failure."""
    prompts = prompt_numbers(episodes)
    outcomes = [outcomes_of(episode) for episode in episodes]

    def rate_of_turns(turns: Iterable[tuple[Outcome, int]]) -> dict[str, Any]:
        """The share of failures among turns with a verdict, and their number."""
        pairs = list(turns)
        rate = failure_rate([[one] for one, _ in pairs], [p for _, p in pairs], level=level)
        counts = {"num_failed": rate.num_failed, "num_known": rate.num_known}
        return rate.estimate.to_dict() | counts

    with_prompts = [
        [(turn, prompt) for turn in turns] for turns, prompt in zip(outcomes, prompts, strict=True)
    ]
    counts = Counter(outcome for episode in outcomes for outcome in episode)
    return {
        "outcomes": {str(outcome): counts[outcome] for outcome in Outcome},
        "episode_outcomes": dict(Counter(str(episode_outcome(outcome)) for outcome in outcomes)),
        "failure_rate": failure_rate(outcomes, prompts, level=level).to_dict(),
        "turn_failure_rate": rate_of_turns(pair for turns in with_prompts for pair in turns),
        "per_turn_failure_rate": [
            rate_of_turns(turns[turn] for turns in with_prompts if len(turns) > turn)
            for turn in range(max(map(len, outcomes), default=0))
        ],
    }


def turns_to_failure(episodes: Sequence[Episode]) -> Survival:
    """Survival by turn; an episode is censored at its first turn without a verdict."""
    return kaplan_meier(follow_up_of([outcomes_of(episode) for episode in episodes]))


def hit_rates(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Hit@k: the chance that one of k episodes fails.

    The mean over opening prompts with at least k episodes, and pooled over all episodes. Only
    episodes with a verdict on every turn count, so that the choice does not depend on failures.
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
    """Mean, extremes, quantiles and the mean of each turn, for each score in the rows."""
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

    Means over each model's own tokens: the reference counts a probe's end, the target does not.
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
    """Each probe's mean log-likelihood per token under the reference, if known."""
    found = [
        number(row, "reference_logprob") / max(number(row, "probe_num_tokens"), 1.0)
        for episode in episodes
        for row in episode
    ]
    return [value for value in found if not math.isnan(value)]


def mean_score(episode: Episode) -> float:
    """Mean score of an episode's responses, NaN if none has one."""
    known = [value for row in episode if not math.isnan(value := number(row, "response_score"))]
    return sum(known) / len(known) if known else math.nan


def nats_per_token(episode: Episode) -> float:
    """Negative log-likelihood of a probe token under the reference, NaN if unknown."""
    tokens = sum(number(row, "probe_num_tokens") for row in episode)
    nats = -sum(number(row, "reference_logprob") for row in episode)
    return nats / tokens if tokens > 0 else math.nan


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
