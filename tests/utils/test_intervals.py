"""Intervals have the stated coverage, with observations that share a prompt."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from nip_astra.utils.intervals import (
    Estimate,
    cluster_variance,
    effective_sample_size,
    event_rate_estimate,
    exact_rate_interval,
    paired_difference,
    rate_estimate,
    weighted_rate_interval,
)
from nip_astra.utils.statistics import FollowUp, mcnemar_exact


def test_an_exact_interval_is_that_of_the_tables() -> None:
    # 81 of 263 and 0 of 20, Newcombe 1998 (Statistics in Medicine 17, 857), method 5.
    assert exact_rate_interval(81 / 263, 263) == pytest.approx((0.2527, 0.3676), abs=5e-5)
    assert exact_rate_interval(0.0, 20) == pytest.approx((0.0, 0.1684), abs=5e-5)
    low, high = exact_rate_interval(0.2, 50)
    assert exact_rate_interval(0.8, 50) == pytest.approx((1.0 - high, 1.0 - low))


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_the_bound_without_a_failure_follows_the_level(level: float) -> None:
    """With the upper bound as the rate, nothing is seen in half of 1 - level of evaluations."""
    result = rate_estimate([0.0] * 50, range(50), level=level)
    assert (result.value, result.low) == (0.0, 0.0)
    assert (1.0 - result.high) ** 50 == pytest.approx((1.0 - level) / 2.0)
    all_failed = rate_estimate([1.0] * 50, range(50), level=level)
    assert (all_failed.low, all_failed.high) == (pytest.approx(1.0 - result.high), 1.0)


def test_values_without_verdict_are_left_out_of_an_estimate() -> None:
    known = rate_estimate([1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3])
    with_gaps = rate_estimate([1.0, math.nan, 0.0, 1.0, math.nan, 0.0], [0, 9, 1, 2, 2, 3])
    assert with_gaps == known
    assert (known.value, known.num_clusters, known.method) == (0.5, 4, "Clopper-Pearson")
    for nothing in (rate_estimate([math.nan, math.nan], [0, 1]), rate_estimate([], [])):
        assert np.isnan([nothing.value, nothing.high]).all()
        assert nothing.num_clusters == 0


def test_a_cluster_of_equal_outcomes_counts_as_one_observation() -> None:
    apart = rate_estimate([1.0, 0.0, 0.0, 0.0] * 5, range(20))
    assert (apart.low, apart.high) == exact_rate_interval(0.25, 20)
    # Each prompt's outcome repeated three times is no more evidence than once.
    thrice = rate_estimate(np.repeat([1.0, 0.0, 0.0, 0.0] * 5, 3), np.repeat(range(20), 3))
    assert thrice.value == 0.25
    assert (thrice.low, thrice.high) == (apart.low, apart.high)
    assert "effective sample size" in thrice.method


@pytest.mark.parametrize("values", [[1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4])
def test_a_single_prompt_is_as_informative_as_a_single_observation(values: list[float]) -> None:
    rate = rate_estimate(values, [3] * 8)
    assert (rate.low, rate.high) == exact_rate_interval(float(np.mean(values)), 1)
    # And it excludes no difference.
    difference, _ = paired_difference(values, [0] * 8)
    assert (difference.low, difference.high) == (-1.0, 1.0)
    unbounded, _ = paired_difference(values, [0] * 8, is_bounded=False)
    assert np.isnan([unbounded.low, unbounded.high]).all()


def outcomes(
    rng: np.random.Generator, shape: tuple[int, int, int], rate: float, correlation: float
) -> npt.NDArray[np.bool_]:
    """Whether observations fail, in a number of repetitions, prompts and episodes of each."""
    rates = np.full(shape[:2], rate)
    if correlation:
        spread = (1.0 - correlation) / correlation
        rates = rng.beta(rate * spread, (1.0 - rate) * spread, size=rates.shape)
    return rng.random(shape) < rates[..., None]


def assert_errs_as_stated(estimates: list[Estimate], truth: float) -> None:
    """95 % intervals: 2.5 % on each side, and 2 points for the unknown distribution of prompts."""
    below = np.mean([estimate.low > truth for estimate in estimates])
    above = np.mean([estimate.high < truth for estimate in estimates])
    assert max(below, above) <= 0.045
    assert below + above <= 0.07


@pytest.mark.parametrize(
    ("design", "rate", "correlation"),
    [
        ((20, 8), 0.02, 0.1),
        ((10, 4), 0.1, 0.3),
        ((100, 4), 0.02, 0.3),
        ((100, 4), 0.02, 0.6),
        ((50, 1), 0.05, 0.0),
        ((5, 8), 0.5, 0.6),
    ],
)
def test_neither_bound_of_a_rate_errs_more_often_than_stated(
    design: tuple[int, int], rate: float, correlation: float
) -> None:
    prompts = np.repeat(np.arange(design[0]), design[1])
    values = outcomes(np.random.default_rng(17), (600, *design), rate, correlation)
    result = [rate_estimate(item.ravel().astype(float), prompts) for item in values]
    assert_errs_as_stated(result, rate)


def test_pairs_that_all_differ_alike_leave_doubt() -> None:
    result, error = paired_difference([1.0] * 5, range(5))
    assert (result.value, result.high) == (1.0, 1.0)
    # Like the exact test, whose p-value is 0.06.
    assert result.low < 0.0
    assert error > 0.1
    apart, _ = paired_difference([0.3] * 5, range(5))
    assert apart.low < 0.0 < 0.3 < apart.high
    equal, _ = paired_difference([0.0] * 60, range(60))
    assert equal.low == -equal.high
    assert equal.high == pytest.approx(0.05, abs=0.01)
    assert math.isnan(paired_difference([], []).estimate.value)


def test_without_a_bound_a_difference_has_the_interval_of_student() -> None:
    differences, prompts = np.repeat([1.0, 2.0, 2.0, 3.0], 2), np.repeat(range(4), 2)
    result, error = paired_difference(differences, prompts, is_bounded=False)
    assert error == pytest.approx(math.sqrt(2.0 / 3.0) / 2.0)
    # The quantile for four prompts is 3.182.
    assert result.high - 2.0 == pytest.approx(3.1824 * error, abs=1e-4)
    assert 2.0 - result.low == pytest.approx(result.high - 2.0)
    # Of pairs that all differ alike no spread is known, whatever the rounding of their mean.
    for value, num_pairs in ((0.7, 5), (0.1, 30), (-3.3, 7), (1e4 / 3, 11)):
        alike, error = paired_difference([value] * num_pairs, range(num_pairs), is_bounded=False)
        assert alike.value == pytest.approx(value)
        assert math.isnan(alike.low)
        assert math.isnan(error)


@pytest.mark.parametrize("num_pairs", [5, 8, 12, 30, 100, 400])
def test_interval_and_test_of_a_difference_agree_where_either_is_clear(num_pairs: int) -> None:
    for only_first in range(min(num_pairs, 12)):
        for only_second in range(min(num_pairs - only_first, 25) + 1):
            same = num_pairs - only_first - only_second
            differences = [-1.0] * only_first + [1.0] * only_second + [0.0] * same
            result, _ = paired_difference(differences, range(num_pairs))
            p_value = mcnemar_exact(only_first, only_second)
            if p_value > 0.1:
                assert result.low <= 0.0 <= result.high, differences
            if p_value < 0.01:
                assert not result.low <= 0.0 <= result.high, differences


@pytest.mark.parametrize(
    ("design", "rates", "correlation"),
    [
        ((5, 1), (0.1, 0.9), 0.0),
        ((10, 1), (0.02, 0.1), 0.0),
        ((10, 4), (0.02, 0.98), 0.3),
        ((20, 8), (0.005, 0.1), 0.6),
        ((100, 4), (0.02, 0.1), 0.6),
        ((50, 1), (0.1, 0.5), 0.0),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_neither_bound_of_a_difference_errs_more_often_than_stated(
    design: tuple[int, int], rates: tuple[float, float], correlation: float, noise: float
) -> None:
    """For outcomes, and with noise of scores that are mostly near 0 and near 1."""
    rng, shape = np.random.default_rng(18), (500, *design)
    prompts = np.repeat(np.arange(design[0]), design[1])
    scores = []
    for rate in rates:
        is_failure = outcomes(rng, shape, rate, correlation)
        scores.append(np.abs(is_failure - noise * rng.beta(1.0, 9.0, size=shape)))
    truth = (rates[1] - rates[0]) * (1.0 - 2.0 * noise * 0.1)
    result = [paired_difference(item.ravel(), prompts).estimate for item in scores[1] - scores[0]]
    assert_errs_as_stated(result, truth)


def test_weighted_events_are_covered_even_if_the_heavy_events_were_not_seen() -> None:
    """Light events in 20 % of observations, heavy ones in 1 %, three observations a prompt."""
    rng = np.random.default_rng(4)
    truth = 0.2 * 0.05 + 0.01 * 2.0
    prompts = [i for i in range(40) for _ in range(3)]
    gamma, normal = [], []
    for _ in range(400):
        # A prompt makes events likely or unlikely in all of its three observations.
        factor = np.repeat(rng.choice([0.2, 1.8], size=40), 3)
        draw = rng.random(120)
        weights = np.where(draw < 0.01 * factor, 2.0, np.where(draw < 0.21 * factor, 0.05, 0.0))
        low, high = weighted_rate_interval(weights, prompts, largest=2.0)
        gamma.append(low <= truth <= high)
        half = 1.96 * math.sqrt(cluster_variance(weights.tolist(), prompts))
        normal.append(abs(weights.mean() - truth) <= half)
    assert np.mean(gamma) >= 0.95
    assert np.mean(normal) < 0.75


def test_equal_weights_give_the_interval_of_a_count() -> None:
    assert effective_sample_size([2.0] * 7) == pytest.approx(7.0)
    assert effective_sample_size([1.0, 0.0, 0.0]) == pytest.approx(1.0)
    assert effective_sample_size([0.0, 0.0]) == 0.0
    # Ten events among 1,000: the exact Poisson interval of 10 is 4.795 to 18.39.
    interval = weighted_rate_interval([1.0] * 10 + [0.0] * 990, range(1000), largest=1.0)
    assert interval == pytest.approx((0.004795, 0.01839), abs=5e-6)
    # Without any, the exact upper bound is 3.689 (97.5 %).
    none = weighted_rate_interval([0.0] * 100, range(100), largest=1.0)
    assert none == pytest.approx((0.0, 0.03689), abs=1e-5)


def test_the_interval_of_a_survival_estimate_is_that_of_a_rate_where_nothing_is_censored() -> None:
    turns, is_event = [1, 2, 3, 3, 0, 0], [True, True, False, False, False, False]
    result = event_rate_estimate(FollowUp(turns, is_event, 3), [0, 1, 1, 2, 3, 3])
    # Two were never observed: they carry no information.
    assert result == rate_estimate([1.0, 1.0, 0.0, 0.0], [0, 1, 1, 2])
    # A single censored observation of 400 changes next to nothing.
    turns, is_event = [*[2] * 100, *[3] * 299, 2], [*[True] * 100, *[False] * 300]
    nearly = event_rate_estimate(FollowUp(turns, is_event, 3), range(400))
    plain = rate_estimate([1.0] * 100 + [0.0] * 300, range(400))
    assert (nearly.value, nearly.low, nearly.high) == pytest.approx(
        (plain.value, plain.low, plain.high), abs=0.002
    )
    assert nearly.high - nearly.low >= plain.high - plain.low - 1e-4


def test_without_an_event_the_bound_rests_on_those_observed_to_the_end() -> None:
    result = event_rate_estimate(FollowUp([3] * 20 + [1] * 80, [False] * 100, 3), range(100))
    assert (result.value, result.low) == (0.0, 0.0)
    assert (1.0 - result.high) ** 20 == pytest.approx(0.025)


@pytest.mark.parametrize("num_played", [1, 3])
def test_the_interval_of_a_survival_estimate_holds_the_truth(num_played: int) -> None:
    rng = np.random.default_rng(0)
    num_covered, num_prompts, truth = 0, 60, 0.3
    for _ in range(200):
        # For rates of prompts drawn from Beta(1.2, 2.8), the mean is 0.3.
        rates = np.repeat(rng.beta(1.2, 2.8, num_prompts), num_played)
        failing = rng.geometric(1.0 - (1.0 - rates) ** 0.2)
        leaving = rng.geometric(0.1, len(rates)) - 1
        turns = np.minimum(np.minimum(failing, leaving), 5)
        is_event = (failing <= leaving) & (failing <= 5)
        prompts = np.repeat(np.arange(num_prompts), num_played)
        result = event_rate_estimate(FollowUp(turns.tolist(), is_event.tolist(), 5), prompts)
        num_covered += result.low <= truth <= result.high
    assert num_covered >= 186
