"""Cost of a run on other numbers of devices, extrapolated from measurements on one.

In an iteration each device samples its episodes of a rollout and computes its rows of optimizer
steps. All wait for the slowest; a failure takes the run back to its last checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist

NUM_DEVICES = (1, 8, 64, 1000)
"""Numbers of devices to plan for."""
PLACEMENT = "placement"
"""Name of the plans in the estimate of a dry run."""


@dataclass(frozen=True)
class Work:
    """The work of a run, extrapolated from its smallest measured step.

    Attributes
    ----------
    rollout_seconds, update_seconds : float
        Of an iteration on one device such as this.
    gradient_bytes : float
        Summed over devices at each step.
    memory, divided_memory, sharded_memory : dict[str, float]
        Bytes by part: on every device, divided among the devices that play, and divided among all.
    """

    num_iterations: int
    num_episodes: int
    rows_per_step: int
    steps_per_iteration: int
    rollout_seconds: float
    update_seconds: float
    tokens_per_iteration: float
    gradient_bytes: float
    memory: dict[str, float]
    divided_memory: dict[str, float]
    sharded_memory: dict[str, float] = field(default_factory=dict)

    def with_sharded_weights(self, read: float) -> Work:
        """Return the same run with trained weights sharded over devices (FSDP2).

        The first device holds the full weights beside its shard. Shards are gathered in the forward
        and backward pass, and gradients are scattered: three ring exchanges instead of two. `read`
        are the bytes of sharded weights, including frozen ones under an adapter.
        """
        sharded = {name: self.memory[name] for name in ("gradients", "optimizer")}
        return replace(
            self,
            gradient_bytes=read + 0.5 * self.gradient_bytes,
            memory={name: size for name, size in self.memory.items() if name not in sharded},
            sharded_memory={"part of the weights": read, **sharded},
        )


@dataclass(frozen=True)
class Cluster:
    """Assumptions about a cluster; none of them is measured.

    `seconds_per_exchange` is the latency of a reduction at each doubling of the devices; `spread`
    the standard deviation of the logarithm of a device's time for equal work;
    `hours_between_failures` the mean of one device; `checkpoint_period` counts iterations.
    """

    bytes_per_second: float = 10e9
    seconds_per_exchange: float = 2e-4
    spread: float = 0.05
    hours_between_failures: float = 50_000.0
    checkpoint_seconds: float = 5.0
    restart_seconds: float = 300.0
    checkpoint_period: int = 10


@dataclass(frozen=True)
class Plan:
    """Computed cost of a run on a number of devices.

    `num_used` devices have an episode or a row to work on. `memory` has the bytes of the first
    device by part, `hours` includes failures, and `efficiency` is the speed-up over one device per
    device.
    """

    num_devices: int
    num_used: int
    memory: dict[str, float]
    tokens_per_second: float
    hours: float
    device_hours: float
    efficiency: float


def slowest_of(count: int, spread: float) -> float:
    """Return the median time of the slowest of several devices, relative to a typical one.

    The median of the largest of n independent values with distribution F is F^-1(2^(-1/n)); times
    are lognormal.
    """
    if count <= 1:
        return 1.0
    return math.exp(spread * NormalDist().inv_cdf(0.5 ** (1 / count)))


def exchange_seconds(count: int, num_bytes: float, cluster: Cluster) -> float:
    """Return the time of a gradient all-reduce: a ring moves 2 (n - 1) / n of the bytes."""
    if count <= 1:
        return 0.0
    latency = cluster.seconds_per_exchange * math.ceil(math.log2(count))
    return latency + 2 * (count - 1) / count * num_bytes / cluster.bytes_per_second


def iteration_seconds(work: Work, count: int, cluster: Cluster) -> float:
    """Return the time of an iteration on a number of devices, without failures."""
    players, learners = min(count, work.num_episodes), min(count, work.rows_per_step)
    # All wait for the largest share: 10 episodes on 8 devices take as long as 16.
    rollout = work.rollout_seconds * math.ceil(work.num_episodes / players) / work.num_episodes
    update = work.update_seconds * math.ceil(work.rows_per_step / learners) / work.rows_per_step
    exchanges = exchange_seconds(learners, work.gradient_bytes, cluster)
    return (
        rollout * slowest_of(players, cluster.spread)
        + update * slowest_of(learners, cluster.spread)
        + work.steps_per_iteration * exchanges
    )


def share_lost(seconds_per_iteration: float, count: int, cluster: Cluster) -> float:
    """Return the overhead of checkpoints and failures, as a share of the time without them.

    A failure costs half a checkpoint interval, and the restart (Young 1974).
    """
    period = cluster.checkpoint_period * seconds_per_iteration
    failures_per_second = count / (cluster.hours_between_failures * 3600)
    lost = failures_per_second * (period / 2 + cluster.restart_seconds)
    return cluster.checkpoint_seconds / period + lost


def plan_for(work: Work, count: int, cluster: Cluster) -> Plan:
    """Return the plan for a number of devices."""
    seconds = iteration_seconds(work, count, cluster)
    hours = work.num_iterations * seconds * (1 + share_lost(seconds, count, cluster)) / 3600
    alone = iteration_seconds(work, 1, cluster)
    divided = {
        name: size / min(count, work.num_episodes) for name, size in work.divided_memory.items()
    }
    divided |= {name: size / count for name, size in work.sharded_memory.items()}
    return Plan(
        num_devices=count,
        num_used=min(count, max(work.num_episodes, work.rows_per_step)),
        memory=work.memory | divided,
        tokens_per_second=work.tokens_per_iteration / seconds,
        hours=hours,
        device_hours=hours * count,
        efficiency=alone / seconds / count,
    )
