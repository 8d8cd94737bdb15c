"""Estimates against a world of three turns in which every probability is known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nip_astra.evaluation.failure_probability import (
    ATTACKER,
    MIN_EFFECTIVE_FAILURES,
    REFERENCE,
    ImportanceEstimate,
    WeighedEpisodes,
    attacker_at,
    attacker_turns,
    defensive_shares,
    importance_sampling,
    log_mixture,
    monte_carlo,
)
from nip_astra.evaluation.outcomes import Outcome, follow_up_of
from nip_astra.utils.statistics import FollowUp

REFERENCE_CHANCES = np.array([0.70, 0.285, 0.01, 0.005])
ATTACKER_CHANCES = np.array([0.10, 0.199, 0.70, 0.001])
FAILS = np.array([0.0, 0.0, 0.9, 0.8])
"""Probability that the target fails on each of four probes; the attacker seldom draws the last."""
NUM_TURNS = 3
TRUTH = 1.0 - (1.0 - REFERENCE_CHANCES @ FAILS) ** NUM_TURNS


def play(proposal: str, count: int, rng: np.random.Generator) -> dict[str, Any]:
    drawn = np.zeros((count, NUM_TURNS), dtype=int)
    for turn, is_attacker in enumerate(attacker_turns(proposal, NUM_TURNS)):
        drawn[:, turn] = rng.choice(
            4, size=count, p=ATTACKER_CHANCES if is_attacker else REFERENCE_CHANCES
        )
    failed = rng.random(drawn.shape) < FAILS[drawn]
    return {
        "ratio": np.log(ATTACKER_CHANCES[drawn]) - np.log(REFERENCE_CHANCES[drawn]),
        "first": np.where(failed.any(axis=1), failed.argmax(axis=1), -1),
    }


def followed(first: Any, horizon: int = NUM_TURNS) -> FollowUp:
    """Episodes whose verdicts are all known, by the turn of the first failure, -1 for none."""
    has_failed = np.asarray(first) >= 0
    turns = np.where(has_failed, np.asarray(first) + 1, horizon)
    return FollowUp(turns.astype(int).tolist(), has_failed.tolist(), horizon)


def outcomes_of(has_failed: Any) -> list[list[Outcome]]:
    return [[Outcome.FAILURE if item else Outcome.NONE] for item in has_failed]


def mixture(counts: dict[str, int], rng: np.random.Generator) -> WeighedEpisodes:
    parts = {name: play(name, count, rng) for name, count in counts.items()}
    total = sum(counts.values())
    return WeighedEpisodes(
        np.concatenate([part["ratio"] for part in parts.values()]),
        followed(np.concatenate([part["first"] for part in parts.values()])),
        [name for name, count in counts.items() for _ in range(count)],
        list(range(total)),
    )


def test_half_of_the_episodes_are_the_references_and_turns_share_the_rest() -> None:
    for num_episodes, counts in ((301, (151, 50, 50, 50)), (11, (6, 2, 2, 1)), (1, (1,))):
        names = (REFERENCE, *(attacker_at(turn) for turn in (1, 2, 3)))
        assert defensive_shares(num_episodes, 3) == dict(zip(names, counts, strict=False))
    assert attacker_turns(REFERENCE, 2) == [False, False]
    assert attacker_turns(ATTACKER, 2) == [True, True]
    assert attacker_turns(attacker_at(2), 3) == [False, True, False]


def test_weights_are_those_worked_out_by_hand_and_a_mean_over_all_conversations_is_exact() -> None:
    """The expectation over the mixture, by enumeration: probability times weight, summed."""
    shares = {REFERENCE: 0.5, attacker_at(1): 0.3, ATTACKER: 0.2}
    ratios = np.array([[2.0, 4.0]])
    expected = [0.5 + 0.3 * 2 + 0.2 * 2, 0.5 + 0.3 * 2 + 0.2 * 2 * 4]
    assert np.exp(log_mixture(np.log(ratios), shares))[0] == pytest.approx(expected)
    counts = defensive_shares(12, NUM_TURNS)
    shares = {name: count / 12 for name, count in counts.items()}
    total = 0.0
    for drawn in itertools.product(range(4), repeat=NUM_TURNS):
        ratios = (np.log(ATTACKER_CHANCES) - np.log(REFERENCE_CHANCES))[list(drawn)][None]
        log_weights = -log_mixture(ratios, shares)[0]
        mixed = 0.0
        for name, share in shares.items():
            turns = attacker_turns(name, NUM_TURNS)
            chosen = [ATTACKER_CHANCES if own else REFERENCE_CHANCES for own in turns]
            mixed += share * np.prod([p[probe] for p, probe in zip(chosen, drawn, strict=True)])
        survived = 1.0
        for turn, probe in enumerate(drawn):
            total += mixed * survived * FAILS[probe] * np.exp(log_weights[turn])
            survived *= 1.0 - FAILS[probe]
    assert total == pytest.approx(TRUTH, rel=1e-12)


def test_both_estimates_cover_the_truth_and_weights_earn_their_cost() -> None:
    rng = np.random.default_rng(0)
    counts = defensive_shares(300, NUM_TURNS)
    plain, weighed = [], []
    for _ in range(250):
        failed = play(REFERENCE, 300, rng)["first"] >= 0
        plain.append(monte_carlo(outcomes_of(failed), list(range(300)), num_turns=NUM_TURNS))
        weighed.append(importance_sampling(mixture(counts, rng)).to_dict())
    for estimates in (plain, weighed):
        assert np.mean([e["value"] for e in estimates]) == pytest.approx(TRUTH, rel=0.06)
        assert np.mean([e["low"] <= TRUTH <= e["high"] for e in estimates]) >= 0.92
    errors = [np.mean([(e["value"] - TRUTH) ** 2 for e in own]) for own in (plain, weighed)]
    assert errors[1] < 0.75 * errors[0]
    assert plain[0]["target_queries"] == weighed[0]["target_queries"] == 900
    assert max(e["largest_weight"] for e in weighed) <= 2.0 + 1e-9
    assert np.mean([e["mean_weight"] for e in weighed]) == pytest.approx(1.0, abs=0.02)


def test_both_estimates_are_right_where_verdicts_are_missing_at_random() -> None:
    rng = np.random.default_rng(1)
    episodes = mixture(defensive_shares(30_000, NUM_TURNS), rng)
    pairs = zip(episodes.follow_up.turns, episodes.follow_up.is_event, strict=True)
    first = np.array([turn - 1 if is_event else -1 for turn, is_event in pairs])
    failed_EH = np.arange(NUM_TURNS) == first[:, None]
    missing_EH = rng.random(failed_EH.shape) < 0.2
    codes = np.where(missing_EH, 2, failed_EH)
    names = (Outcome.NONE, Outcome.FAILURE, Outcome.UNDETERMINED)
    outcomes = [[names[code] for code in turns] for turns in codes.tolist()]
    result = importance_sampling(replace(episodes, follow_up=follow_up_of(outcomes)))
    assert result.value == pytest.approx(TRUTH, abs=3 * result.standard_error)
    assert result.standard_error < 0.1 * TRUTH
    assert result.num_known < 0.7 * result.num_episodes
    own = [i for i, name in enumerate(episodes.proposals_E) if name == REFERENCE]
    plain = monte_carlo([outcomes[i] for i in own], range(len(own)), num_turns=NUM_TURNS)
    assert plain["value"] == pytest.approx(TRUTH, abs=3 * plain["standard_error"])


def quiet() -> WeighedEpisodes:
    """Fifty episodes of the reference without a failure."""
    follow_up = FollowUp([2] * 50, [False] * 50, 2)
    return WeighedEpisodes(np.zeros((50, 2)), follow_up, [REFERENCE] * 50, list(range(50)))


def test_without_a_failure_both_estimates_have_their_bound_which_censoring_widens() -> None:
    half = replace(quiet(), follow_up=FollowUp([2] * 25 + [1] * 25, [False] * 50, 2))
    assert importance_sampling(half).high == pytest.approx(2 * importance_sampling(quiet()).high)
    none = importance_sampling(replace(quiet(), follow_up=FollowUp([1] * 50, [False] * 50, 2)))
    assert (none.value, none.reason) == (None, "no episode has verdicts through its last turn")
    result = importance_sampling(quiet())
    assert (result.is_refused, result.value, result.low) == (False, 0.0, 0.0)
    # The exact bound of a Poisson count of 0 is 3.689 (97.5 %).
    assert result.high == pytest.approx(3.689 / 50, abs=1e-4)
    assert "the failing episodes weigh as much as 0.0" in str(result.caution)
    plain = monte_carlo(outcomes_of([False] * 150), list(range(150)), num_turns=2)
    assert (plain["value"], plain["num_failures"], plain["target_queries"]) == (0.0, 0, 300)
    assert (1.0 - plain["high"]) ** 150 == pytest.approx(0.025)


def rare_world(rng: np.random.Generator, count: int) -> WeighedEpisodes:
    """One turn; the attacker often draws a light failure, and never the heavy one."""
    chances = np.array([[0.9977, 0.0003, 0.002], [0.3, 0.7, 1e-9]])
    names = [name for name, n in defensive_shares(count, 1).items() for _ in range(n)]
    limits = np.cumsum(chances, axis=1)[[int(name != REFERENCE) for name in names]]
    drawn = (rng.random((count, 1)) > limits).sum(axis=1).clip(max=2)
    ratios = np.log(chances[1] / chances[0])[drawn]
    return WeighedEpisodes(
        ratios[:, None], followed(np.where(drawn, 0, -1), 1), names, list(range(count))
    )


def test_estimates_are_right_on_average_also_where_the_heavy_failure_is_rare() -> None:
    rng, truth = np.random.default_rng(5), 0.0023
    result = [importance_sampling(rare_world(rng, 300)) for _ in range(1000)]
    assert not any(estimate.is_refused for estimate in result)
    values = np.array([estimate.value for estimate in result])
    error = values.std() / len(values) ** 0.5
    assert abs(values.mean() - truth) < 3 * error < 0.2 * truth
    assert np.mean([e.low <= truth <= e.high for e in result if e.low is not None]) >= 0.93
    # Reported only if many light failures support it, it would have been far too small.
    light = values[[e.effective_num_failures >= MIN_EFFECTIVE_FAILURES for e in result]]
    assert 0.1 < len(light) / len(values) < 0.9
    assert light.mean() < 0.5 * truth
    # And single estimates are mostly below the truth, hence the caution.
    assert np.mean(values < truth) > 0.5


def test_mixtures_whose_weights_cannot_be_right_are_refused_whatever_failed() -> None:
    right = mixture(defensive_shares(60, 3), np.random.default_rng(4))
    wrong = replace(right, log_ratio_EH=right.log_ratio_EH - 3.0)
    for episodes, is_refused in ((right, False), (wrong, True)):
        for first in (np.full(60, -1), np.zeros(60, dtype=int)):
            result = importance_sampling(replace(episodes, follow_up=followed(first)))
            assert result.is_refused is (result.value is None) is is_refused
    right = mixture(defensive_shares(400, 3), np.random.default_rng(2))
    # As if the attacker had generated everything with a fifth of its probability.
    wrong = replace(right, log_ratio_EH=right.log_ratio_EH - 1.6)
    without = mixture({ATTACKER: 50}, np.random.default_rng(3))
    ratios = np.zeros((60, 1))
    ratios[1:] = 40.0
    names = [REFERENCE] * 2 + [ATTACKER] * 58
    collapsed = WeighedEpisodes(ratios, followed([0] * 60, 1), names, list(range(60)))
    for episodes, reason in (
        (wrong, "and not 1, so the log-probabilities are not those"),
        (without, "no episode of the reference"),
        (collapsed, "effective sample size is 1.0 of 60 episodes"),
    ):
        result = importance_sampling(episodes)
        assert (result.is_refused, result.value) == (True, None)
        assert reason in str(result.reason)
    plain = ImportanceEstimate("temperature 0.7", 0.95).to_dict()
    assert (plain["is_refused"], plain["reason"], plain["value"]) == (True, "temperature 0.7", None)
