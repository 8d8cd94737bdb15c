"""How many kinds of failure there are at least."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nip_astra.evaluation.clusters import chao2


def test_the_estimate_is_chaos() -> None:
    """Seven kinds in 10 units, 4 once and 2 twice: 7 + 0.9 * 12 / 6."""
    found = chao2([1, 1, 1, 1, 2, 2, 5], 10, level=0.95)
    assert (found["seen"], found["seen_once"], found["seen_twice"]) == (7, 4, 2)
    assert found["value"] == pytest.approx(8.8)
    # var = 0.9 * 12 / 6 + 0.81 * 4 * 49 / 36 + 0.81 * 2 * 144 / 324; the unseen 1.8 are log-normal.
    spread = math.exp(1.959964 * math.sqrt(math.log1p(6.93 / 1.8**2)))
    # What was seen is certain, and nothing shows that there is more.
    assert found["low"] == 7.0
    assert found["high"] == pytest.approx(7 + 1.8 * spread, rel=1e-5)


def test_a_kind_seen_twice_is_not_needed() -> None:
    """3 + 0.8 * 3 * 2 / 2."""
    found = chao2([1, 1, 1], 5, level=0.95)
    assert found["value"] == pytest.approx(5.4)
    assert 3.0 == found["low"] < found["value"] < found["high"]


def test_where_all_were_seen_often_none_is_thought_unseen() -> None:
    found = chao2([9, 12, 30], 100, level=0.95)
    assert found["value"] == found["low"] == 3.0
    assert 3.0 <= found["high"] < 3.1


def test_nothing_seen_tells_nothing() -> None:
    found = chao2([], 100, level=0.95)
    assert (found["seen"], found["value"], found["low"], found["high"]) == (0, 0.0, 0.0, 0.0)


def test_on_average_it_is_a_lower_bound_nearer_to_the_truth_than_what_was_seen() -> None:
    rng = np.random.default_rng(0)
    chances = 0.15 / np.arange(1, 31)
    seen, told, num_low_enough = [], [], 0
    for _ in range(200):
        counts = (rng.random((200, 30)) < chances).sum(axis=0)
        found = chao2([int(one) for one in counts if one], 200, level=0.95)
        seen.append(found["seen"])
        told.append(found["value"])
        num_low_enough += found["low"] <= 30.0
    assert np.mean(seen) < np.mean(told) < 30
    assert num_low_enough == 200
