"""Plans for many devices, by hand and compared with a simulation."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from nip_astra.distributed.placement import (
    Cluster,
    Work,
    exchange_seconds,
    iteration_seconds,
    overhead_share,
    plan_for,
    slowdown,
)

CALM = Cluster(
    bytes_per_second=100.0,
    seconds_per_exchange=0.5,
    spread=0.0,
    checkpoint_seconds=0.0,
    hours_between_failures=1e12,
)
WORK = Work(
    num_iterations=10,
    num_episodes=10,
    rows_per_step=4,
    steps_per_iteration=2,
    rollout_seconds=100.0,
    update_seconds=40.0,
    tokens_per_iteration=1400.0,
    gradient_bytes=200.0,
    memory={"weights": 8.0},
    divided_memory={"keys and values": 20.0},
)


def test_a_plan_by_hand() -> None:
    one, eight = plan_for(WORK, 1, CALM), plan_for(WORK, 8, CALM)
    assert one.hours == pytest.approx(10 * 140 / 3600)
    assert (one.efficiency, one.tokens_per_second) == (1.0, 10.0)
    # Two of ten episodes; a row each on four devices; two exchanges of 2 * 0.5 + 2 * 3/4 * 2 s.
    seconds = 20 + 10 + 2 * (1.0 + 3.0)
    assert iteration_seconds(WORK, 8, CALM) == pytest.approx(seconds)
    assert eight.efficiency == pytest.approx(140 / seconds / 8)
    assert eight.device_hours == pytest.approx(8 * 10 * seconds / 3600)
    assert eight.memory == {"weights": 8.0, "keys and values": 2.5}
    assert eight.num_used == 8


def test_sharded_weights_are_held_in_parts_and_travel_once_more() -> None:
    whole = replace(WORK, memory={"weights": 8.0, "gradients": 8.0, "optimizer": 16.0})
    sharded = whole.with_sharded_weights(200.0)
    assert plan_for(whole, 4, CALM).memory == {**whole.memory, "keys and values": 5.0}
    parts = {"part of the weights": 50.0, "gradients": 2.0, "optimizer": 4.0}
    assert plan_for(sharded, 4, CALM).memory == {"weights": 8.0, **parts, "keys and values": 5.0}
    # 3 * 3/4 of 200 bytes at 100 bytes a second, in place of 2 * 3/4. Of an adapter's base, which
    # is gathered twice and has no gradients, 2 * 3/4 of 1,000 more.
    adapter = whole.with_sharded_weights(1_200.0)
    works = (whole, sharded, adapter)
    calm = replace(CALM, seconds_per_exchange=0.0)
    seconds = [exchange_seconds(4, work.gradient_bytes, calm) for work in works]
    assert seconds == [3.0, 4.5, 19.5]


def test_devices_without_work_make_nothing_faster() -> None:
    many, most = (plan_for(WORK, count, CALM) for count in (64, 1000))
    assert (many.num_used, most.num_used) == (10, 10)
    assert many.hours == pytest.approx(most.hours)
    assert most.device_hours > many.device_hours


def test_a_single_device_never_waits() -> None:
    assert slowdown(1, 0.5) == 1.0
    assert exchange_seconds(1, 1e9, CALM) == 0.0


def test_the_slowest_of_many_is_the_median_of_their_maximum() -> None:
    generator = random.Random(0)
    most = [max(generator.lognormvariate(0, 0.1) for _ in range(64)) for _ in range(2000)]
    assert slowdown(64, 0.1) == pytest.approx(statistics.median(most), rel=5e-3)


def test_failures_cost_half_a_period_and_the_restart() -> None:
    cluster = replace(
        CALM, hours_between_failures=100.0, checkpoint_period=10, restart_seconds=400.0
    )
    # A failure per hour on 100 devices; 200 s of a period of 400 s are lost, and 400 s to restart.
    assert overhead_share(40.0, 100, cluster) == pytest.approx(600 / 3600)
