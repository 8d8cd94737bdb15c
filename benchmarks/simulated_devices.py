"""Simulate runs on many devices with stragglers and failures, and compare with the plan's estimate.

    python benchmarks/simulated_devices.py

Every device needs a lognormal time for its share, and all wait for the slowest twice per iteration.
Devices fail independently at random; after a restart, the work since the last checkpoint is
repeated. The simulated run has rollouts of 4,096 episodes and 4 steps of 4,096 rows per iteration.
"""

from __future__ import annotations

import random
import statistics

from measuring import build_parser, markdown_table, report_figures

from nip_astra.distributed.placement import (
    NUM_DEVICES,
    Cluster,
    Work,
    exchange_seconds,
    plan_for,
)

RUN = Work(
    num_iterations=500,
    num_episodes=4096,
    rows_per_step=4096,
    steps_per_iteration=4,
    rollout_seconds=20_000.0,
    update_seconds=10_000.0,
    tokens_per_iteration=4096 * 8192.0,
    gradient_bytes=2e9,
    memory={},
    divided_memory={},
)
"""34 M tokens per rollout and a model of 1 billion weights with bfloat16 gradients."""


def simulated_hours(work: Work, count: int, cluster: Cluster, generator: random.Random) -> float:
    """Hours of one simulated run."""
    clock, done, saved = 0.0, 0, 0
    mean_between = cluster.hours_between_failures * 3600 / count
    fails_at = generator.expovariate(1 / mean_between)
    exchanges = work.steps_per_iteration * exchange_seconds(count, work.gradient_bytes, cluster)
    rollout, update = (
        seconds * -(-parts // count) / parts
        for seconds, parts in (
            (work.rollout_seconds, work.num_episodes),
            (work.update_seconds, work.rows_per_step),
        )
    )
    while done < work.num_iterations:
        slowest = [
            max(generator.lognormvariate(0, cluster.spread) for _ in range(count)) for _ in range(2)
        ]
        clock += rollout * slowest[0] + update * slowest[1] + exchanges
        done += 1
        if done % cluster.checkpoint_period == 0:
            clock += cluster.checkpoint_seconds
        if clock >= fails_at:
            clock = fails_at + cluster.restart_seconds
            done = saved
            fails_at = clock + generator.expovariate(1 / mean_between)
        elif done % cluster.checkpoint_period == 0:
            saved = done
    return clock / 3600


def main() -> None:
    """Simulate, print and write the table."""
    options = build_parser(__doc__, runs=5, seed=0).parse_args()
    cluster = Cluster(spread=0.1, hours_between_failures=10_000.0)
    rows = []
    for count in NUM_DEVICES:
        computed = plan_for(RUN, count, cluster)
        hours = [
            simulated_hours(RUN, count, cluster, random.Random(f"{options.seed} {count} {run}"))
            for run in range(options.runs)
        ]
        median, estimate = statistics.median(hours), computed.hours
        rows.append(
            [
                *(count, estimate, median, min(hours), max(hours)),
                *(estimate / median, computed.efficiency),
            ]
        )
    header = ["devices", "hours: computed", "simulated", "least", "most", "ratio", "efficiency"]
    report_figures(
        {"columns": header, "rows": rows}, options.out, shown=markdown_table(header, rows)
    )


if __name__ == "__main__":
    main()
