"""Tests, survival and shares of hits, computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from nip_astra.utils.statistics import (
    FollowUp,
    hit_at_k,
    holm,
    kaplan_meier,
    mcnemar_exact,
    pseudo_values,
    sign_flip_test,
)


def test_survival_is_the_product_worked_out_by_hand() -> None:
    # Five episodes: failures at turns 1 and 3, one censored after turn 1, two watched to the end.
    curve = kaplan_meier(FollowUp([1, 3, 1, 3, 3], [True, True, False, False, False], 3))
    assert curve.num_at_risk == [5, 3, 3]
    assert curve.survival == pytest.approx([4 / 5, 4 / 5, 4 / 5 * 2 / 3])
    assert curve.median is None
    # The median turn is the first at which half have failed.
    assert kaplan_meier(FollowUp([1, 2, 2, 3], [True, True, False, False], 3)).median == 2
    # 9/10 * 7/9 * 5/7 exceeds one half by its rounding.
    half = FollowUp([1, 2, 2, 3, 3, 3, 3, 3, 3, 3], [True] * 5 + [False] * 5, 3)
    assert kaplan_meier(half).median == 3
    assert kaplan_meier(FollowUp([], [], 2)).num_at_risk == [0, 0]
    # After the last episode left, survival is unknown.
    left = kaplan_meier(FollowUp([0, 1], [False, False], 2))
    assert left.survival[0] == 1.0
    assert math.isnan(left.survival[1])
    assert kaplan_meier(FollowUp([1, 1], [True, True], 3)).survival == [0.0, 0.0, 0.0]


def test_pseudo_values_average_to_the_survival_estimate_and_spread_as_it_does() -> None:
    # Greenwood's variance of the first example: (0.533)^2 (1 / (5 * 4) + 1 / (3 * 2)).
    follow_up = FollowUp([1, 3, 1, 3, 3], [True, True, False, False, False], 3)
    values = pseudo_values(follow_up)
    assert values.mean() == pytest.approx(1 - 8 / 15)
    assert values.var() / 5 == pytest.approx((8 / 15) ** 2 * (1 / 20 + 1 / 6))
    # Censored after its first turn: its known turn counts, and the rest is estimated.
    assert values[2] == pytest.approx(1 - 8 / 15 - 5 * 8 / 15 * (1 / 20))
    complete = FollowUp([1, 3, 2], [True, False, True], 3)
    assert pseudo_values(complete).tolist() == [1.0, 0.0, 1.0]
    assert np.isnan(pseudo_values(FollowUp([1, 2], [True, False], 3))).all()
    assert pseudo_values(FollowUp([1, 2, 2], [False, True, True], 3)).tolist() == [1.0] * 3


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
