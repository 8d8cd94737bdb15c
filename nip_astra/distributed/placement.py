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

    def with_sharded_weights(self, weight_bytes: float) -> Work:
        """Return the same run with trained weights sharded over devices (FSDP2).

        The first device holds the full weights beside its shard.

        Parameters
        ----------
        weight_bytes : float
            Bytes of sharded weights, including frozen ones under an adapter.
        """
        sharded = {name: self.memory[name] for name in ("gradients", "optimizer")}
        whole = {name: size for name, size in self.memory.items() if name not in sharded}
        # Weights are gathered in the forward and in the backward pass, and gradients are scattered:
        # three ring exchanges. An all-reduce, which `exchange_seconds` counts, is two.
        gradient_bytes = weight_bytes + 0.5 * self.gradient_bytes
        return replace(
            self,
            gradient_bytes=gradient_bytes,
            memory=whole,
            sharded_memory={"part of the weights": weight_bytes, **sharded},
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


def slowdown(count: int, spread: float) -> float:
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
    num_bytes_sent = 2 * (count - 1) / count * num_bytes
    return latency + num_bytes_sent / cluster.bytes_per_second


def iteration_seconds(work: Work, count: int, cluster: Cluster) -> float:
    """Return the time of an iteration on a number of devices, without failures."""
    # Further devices have nothing to do.
    num_samplers = min(count, work.num_episodes)
    num_learners = min(count, work.rows_per_step)
    # All wait for the largest share: 10 episodes on 8 devices take as long as 16.
    max_episodes = math.ceil(work.num_episodes / num_samplers)
    max_rows = math.ceil(work.rows_per_step / num_learners)
    rollout = work.rollout_seconds * max_episodes / work.num_episodes
    update = work.update_seconds * max_rows / work.rows_per_step
    exchange = exchange_seconds(num_learners, work.gradient_bytes, cluster)
    return (
        rollout * slowdown(num_samplers, cluster.spread)
        + update * slowdown(num_learners, cluster.spread)
        + work.steps_per_iteration * exchange
    )


def overhead_share(seconds_per_iteration: float, count: int, cluster: Cluster) -> float:
    """Return the overhead of checkpoints and failures, as a share of the time without them.

    A failure costs half a checkpoint interval, and the restart (Young 1974).
    """
    period = cluster.checkpoint_period * seconds_per_iteration
    # Of all devices: any failure stops the run.
    failures_per_second = count / (cluster.hours_between_failures * 3600)
    failure_share = failures_per_second * (period / 2 + cluster.restart_seconds)
    return cluster.checkpoint_seconds / period + failure_share


def plan_for(work: Work, count: int, cluster: Cluster) -> Plan:
    """Return the plan for a number of devices."""
    seconds = iteration_seconds(work, count, cluster)
    seconds_alone = iteration_seconds(work, 1, cluster)
    overhead = overhead_share(seconds, count, cluster)
    hours = work.num_iterations * seconds * (1 + overhead) / 3600
    num_samplers = min(count, work.num_episodes)
    memory = dict(work.memory)
    for name, size in work.divided_memory.items():
        memory[name] = size / num_samplers
    for name, size in work.sharded_memory.items():
        memory[name] = size / count
    return Plan(
        num_devices=count,
        num_used=min(count, max(work.num_episodes, work.rows_per_step)),
        memory=memory,
        tokens_per_second=work.tokens_per_iteration / seconds,
        hours=hours,
        device_hours=hours * count,
        efficiency=seconds_alone / seconds / count,
    )
