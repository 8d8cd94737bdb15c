"""Time to prepare a GRPO batch from trajectories, compared with a loop over tokens.

    python benchmarks/trajectory_preparation.py --out trajectory_preparation.json

The input is lists of multi-turn trajectories, eight per problem. The output is padded tokens,
positions, masks and log-probabilities, the reward at the last generated token, a group-relative
advantage per token, and a sample per row. The loop computes the same token by token in Python, and
the results are compared. One thread; the minimum over rounds.
"""

from __future__ import annotations

import random
import statistics
from functools import partial
from typing import Any

import torch
from measuring import build_parser, report_figures, seconds_of

from nip_astra.parameters.types import TrainerType
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import samples_of
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.registry import TRAINERS

NUM_RUNS = 8
Rows = list[dict[str, Any]]


def make_rows(count: int, mean_length: int, seed: int = 0) -> Rows:
    """Random trajectories as lists: a prompt, then turns of policy and environment."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        mask: list[int] = [0] * rng.randint(50, 200)
        length = max(len(mask) + 1, int(rng.gauss(mean_length, mean_length / 4)))
        while len(mask) < length:
            mask += [1] * rng.randint(20, 120) + [0] * rng.randint(5, 40)
        mask = mask[:length]
        rows.append(
            {
                "tokens": [rng.randrange(50_000) for _ in mask],
                "loss_mask": mask,
                "logprobs": [-rng.random() if is_trained else 0.0 for is_trained in mask],
                "reward": float(rng.random() < 0.4),
                "group_id": index // NUM_RUNS,
                "run_id": index,
            }
        )
    return rows


def prepare(rows: Rows) -> Batch:
    """Prepare a batch as in `self_hosted_grpo`."""
    kind: Any = TRAINERS.get(TrainerType.SELF_HOSTED_GRPO)
    trainer = kind({})
    batch: Batch
    batch, _ = trainer._prepare_batch(Batch.from_trajectories([Trajectory(**row) for row in rows]))
    samples_of(batch)
    return batch


def prepare_by_loop(rows: Rows) -> dict[str, torch.Tensor]:
    """Prepare the same batch token by token."""
    width = max(len(row["tokens"]) for row in rows)
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row["reward"])
    names = ("input_ids", "position_ids", "attention_mask", "loss_mask", "logprobs")
    columns: dict[str, list[list[float]]] = {
        name: [] for name in (*names, "token_level_scores", "advantages")
    }
    for row in rows:
        rewards = groups[row["group_id"]]
        is_flat = min(rewards) == max(rewards)
        spread = 1.0 if is_flat else statistics.stdev(rewards)
        advantage = (row["reward"] - statistics.fmean(rewards)) / (spread + 1e-6)
        last = max(i for i, is_trained in enumerate(row["loss_mask"]) if is_trained)
        cells: dict[str, list[float]] = {name: [] for name in columns}
        for position in range(width):
            is_token = position < len(row["tokens"])
            is_trained = is_token and row["loss_mask"][position] == 1
            cells["input_ids"].append(row["tokens"][position] if is_token else 0)
            cells["position_ids"].append(min(position, len(row["tokens"]) - 1))
            cells["attention_mask"].append(1 if is_token else 0)
            cells["loss_mask"].append(1 if is_trained else 0)
            cells["logprobs"].append(row["logprobs"][position] if is_token else 0.0)
            cells["token_level_scores"].append(row["reward"] if position == last else 0.0)
            cells["advantages"].append(0.0 if is_flat or not is_trained else advantage)
        for name, values in cells.items():
            columns[name].append(values)
    return {name: torch.tensor(values) for name, values in columns.items()}


def check(batch: Batch, by_loop: dict[str, torch.Tensor]) -> None:
    """Raise if the two batches differ."""
    for name, expected in by_loop.items():
        actual = batch.values[name]
        if name == "advantages":
            actual = actual[:, None] * batch.values["loss_mask"]
        torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-5, atol=1e-5)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    parser = build_parser(__doc__, trajectories=512, mean_length=1140, rounds=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = make_rows(options.trajectories, options.mean_length)
    check(prepare(rows), prepare_by_loop(rows))
    ours, loop = (
        min(seconds_of(partial(function, rows)) for _ in range(options.rounds))
        for function in (prepare, prepare_by_loop)
    )
    figures = {
        "num_trajectories": len(rows),
        "num_tokens": sum(len(row["tokens"]) for row in rows),
        "seconds": ours,
        "loop_seconds": loop,
        "loop_over_ours": loop / ours,
    }
    report_figures(figures, options.out)


if __name__ == "__main__":
    main()
