"""Intervals cover what they say, with observations that share a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from nip_astra.utils.statistics import cluster_bootstrap_interval


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
