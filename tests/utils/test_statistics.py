"""Intervals cover what they say, with observations that share a prompt."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nip_astra.utils.statistics import (
    bootstrap_difference,
    bootstrap_estimate,
    cluster_bootstrap_interval,
    cluster_variance,
    clustered_wilson,
    effective_sample_size,
    hit_at_k,
    holm,
    kaplan_meier,
    mcnemar_exact,
    sign_flip_test,
    weighted_rate_interval,
    wilson_interval,
)


def test_no_failures_give_the_rule_of_three() -> None:
    interval = cluster_bootstrap_interval([0.0] * 50, list(range(50)))
    assert interval == pytest.approx((0.0, 0.06))
    assert cluster_bootstrap_interval([1.0] * 50, list(range(50))) == pytest.approx((0.94, 1.0))


def test_an_interval_is_reproducible_and_holds_the_mean() -> None:
    values = [float(i % 3 == 0) for i in range(60)]
    first = cluster_bootstrap_interval(values, list(range(60)))
    assert first == cluster_bootstrap_interval(values, list(range(60)))
    assert first.low < np.mean(values) < first.high


def test_intervals_over_prompts_cover_correlated_observations() -> None:
    rng = np.random.default_rng(0)
    is_covered = []
    for trial in range(200):
        rates = rng.beta(0.6, 1.4, size=40)
        values = (rng.random((40, 8)) < rates[:, None]).astype(float).ravel()
        clusters = np.repeat(np.arange(40), 8)
        low, high = cluster_bootstrap_interval(
            values.tolist(), clusters.tolist(), num_resamples=400, seed=trial
        )
        is_covered.append(low <= 0.3 <= high)
    assert np.mean(is_covered) >= 0.89


def test_no_observations_give_no_interval() -> None:
    assert all(np.isnan(cluster_bootstrap_interval([], [])))


def test_values_without_verdict_are_left_out_of_an_estimate() -> None:
    known = bootstrap_estimate([1.0, 0.0, 1.0, 0.0], [0, 1, 2, 3])
    with_gaps = bootstrap_estimate([1.0, math.nan, 0.0, 1.0, math.nan, 0.0], [0, 9, 1, 2, 2, 3])
    assert with_gaps == known
    assert known.value == 0.5
    assert (known.num_clusters, known.method) == (4, "bootstrap over opening prompts")
    assert bootstrap_estimate([0.0, 0.0], [0, 1]).method == "rule of three"


def test_without_any_verdict_there_is_no_estimate() -> None:
    nothing = bootstrap_estimate([math.nan, math.nan], [0, 1])
    assert math.isnan(nothing.value)
    assert math.isnan(nothing.high)
    assert nothing.num_clusters == 0


def test_wilson_gives_the_published_interval() -> None:
    # 81 of 263, Newcombe 1998 (Statistics in Medicine 17, 857), method 3.
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


def test_a_cluster_of_equal_outcomes_counts_as_one_observation() -> None:
    apart = clustered_wilson([1.0, 0.0, 0.0, 0.0] * 5, list(range(20)))
    assert apart.low == pytest.approx(wilson_interval(0.25, 19).low)
    # Each outcome said three times by its prompt tells no more than once.
    thrice = clustered_wilson(
        [v for v in [1.0, 0.0, 0.0, 0.0] * 5 for _ in range(3)],
        [c for c in range(20) for _ in "abc"],
    )
    assert thrice.value == 0.25
    assert thrice.low == pytest.approx(apart.low, abs=0.01)
    assert clustered_wilson([0.0] * 30, list(range(30))).high == pytest.approx(0.1)


def test_intervals_of_a_rare_outcome_keep_nearer_to_their_level_than_a_bootstrap() -> None:
    rng = np.random.default_rng(1)
    wilson, bootstrap = [], []
    for trial in range(400):
        values, groups = (rng.random(300) < 0.01).astype(float).tolist(), list(range(300))
        estimate = clustered_wilson(values, groups)
        wilson.append(estimate.low <= 0.01 <= estimate.high)
        low, high = cluster_bootstrap_interval(values, groups, num_resamples=300, seed=trial)
        bootstrap.append(low <= 0.01 <= high)
    assert np.mean(wilson) >= 0.93
    assert abs(np.mean(wilson) - 0.95) < abs(np.mean(bootstrap) - 0.95)


def test_the_variance_of_a_mean_over_clusters_is_that_of_repeated_draws() -> None:
    rng = np.random.default_rng(2)
    means, told = [], []
    for _ in range(400):
        rates = rng.beta(1, 3, size=30)
        values = (rng.random((30, 5)) < rates[:, None]).astype(float).ravel().tolist()
        means.append(np.mean(values))
        told.append(cluster_variance(values, [i for i in range(30) for _ in range(5)]))
    assert np.mean(told) == pytest.approx(np.var(means), rel=0.15)
    assert math.isnan(cluster_variance([1.0, 0.0], [0, 0]))


def test_survival_is_the_product_worked_out_by_hand() -> None:
    # Five episodes: failures at turns 1 and 3, one censored after turn 1, two watched to the end.
    found = kaplan_meier([1, 3, 1, 3, 3], [True, True, False, False, False], horizon=3)
    assert found.num_at_risk == [5, 3, 3]
    assert found.survival == pytest.approx([4 / 5, 4 / 5, 4 / 5 * 2 / 3])
    assert found.median is None


def test_the_median_turn_is_the_first_at_which_half_have_failed() -> None:
    assert kaplan_meier([1, 2, 2, 3], [True, True, False, False], horizon=3).median == 2
    assert kaplan_meier([], [], horizon=2).num_at_risk == [0, 0]


def test_after_the_last_episode_left_survival_is_unknown() -> None:
    found = kaplan_meier([0, 1], [False, False], horizon=2)
    assert found.survival[0] == 1.0
    assert math.isnan(found.survival[1])
    assert kaplan_meier([1, 1], [True, True], horizon=3).survival == [0.0, 0.0, 0.0]


def test_censoring_keeps_the_estimate_right_where_leaving_out_would_not() -> None:
    rng = np.random.default_rng(3)
    event = rng.geometric(0.3, size=20_000)
    leave = rng.integers(0, 4, size=20_000)
    turns, is_event = np.minimum(event, leave), event <= leave
    found = kaplan_meier(turns.tolist(), is_event.tolist(), horizon=3)
    assert found.survival == pytest.approx([0.7, 0.49, 0.343], abs=0.02)


def test_hit_at_k_is_the_share_of_all_ways_to_draw_k() -> None:
    outcomes = [1, 0, 0, 0, 1]
    for k in (1, 2, 3, 5):
        draws = list(itertools.combinations(outcomes, k))
        assert hit_at_k(5, 2, k) == pytest.approx(sum(any(d) for d in draws) / len(draws))
    assert hit_at_k(5, 1, 3) == pytest.approx(0.6)
    assert math.isnan(hit_at_k(4, 1, 5))


def test_mcnemar_is_a_binomial_test_of_the_pairs_that_differ() -> None:
    assert mcnemar_exact(9, 2) == pytest.approx(0.0654, abs=5e-5)
    assert mcnemar_exact(2, 9) == mcnemar_exact(9, 2)
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(5, 5) == 1.0
    assert mcnemar_exact(0, 6) == pytest.approx(2 / 64)
    binomtest = pytest.importorskip("scipy.stats").binomtest
    assert mcnemar_exact(14, 5) == pytest.approx(binomtest(5, 19).pvalue)


def test_signs_flip_by_prompt_and_not_by_episode() -> None:
    # Eight prompts, each three times: 2/256 by prompts, far less if episodes were independent.
    differences = [1.0] * 24
    prompts = [i for i in range(8) for _ in range(3)]
    assert sign_flip_test(differences, prompts) == pytest.approx(2 / 256, abs=0.003)
    assert sign_flip_test(differences, list(range(24))) < 0.001
    assert sign_flip_test([0.0, 0.0], [0, 1]) == 1.0


def test_holm_steps_down_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


def test_a_paired_difference_has_an_interval_and_no_false_certainty() -> None:
    found = bootstrap_difference([1.0, 0.0, 0.0, -1.0, 1.0], list(range(5)))
    assert found.value == pytest.approx(0.2)
    assert found.low < 0.2 < found.high
    equal = bootstrap_difference([0.0] * 60, list(range(60)))
    assert (equal.low, equal.high, equal.method) == (-0.05, 0.05, "rule of three")
    assert math.isnan(bootstrap_difference([], []).value)


def test_equal_weights_are_worth_their_number() -> None:
    assert effective_sample_size([2.0] * 7) == pytest.approx(7.0)
    assert effective_sample_size([1.0, 0.0, 0.0]) == pytest.approx(1.0)
    assert effective_sample_size([0.0, 0.0]) == 0.0


def test_weighted_events_are_covered_also_where_the_heavy_ones_were_not_seen() -> None:
    """Light events in 20 % of observations, heavy ones in 1 %, three observations a prompt."""
    rng = np.random.default_rng(4)
    truth = 0.2 * 0.05 + 0.01 * 2.0
    prompts = [i for i in range(40) for _ in range(3)]
    gamma, normal = [], []
    for _ in range(400):
        # A prompt makes its three observations likely or unlikely to have an event, together.
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
    # Ten events among 1,000: the exact Poisson interval of 10 is 4.795 to 18.39.
    found = weighted_rate_interval([1.0] * 10 + [0.0] * 990, range(1000), largest=1.0)
    assert found == pytest.approx((0.004795, 0.01839), abs=5e-6)
    # Without any, the exact upper bound is 3.689 (97.5 %).
    assert weighted_rate_interval([0.0] * 100, range(100), largest=1.0) == pytest.approx(
        (0.0, 0.03689), abs=1e-5
    )
