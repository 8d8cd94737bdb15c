"""How long does it take to make a batch for GRPO of trajectories, beside a loop over tokens?

    python benchmarks/trajectory_preparation.py --out trajectory_preparation.json

Trajectories of several turns, of given lengths, eight to a problem, as lists of numbers. What is
made: padded tokens, positions, masks and log-probabilities, the reward at the last token that was
said, advantages by runs and groups, one a token, and a sample a row. The loop does the same token
by token in Python and is compared with it number by number. One thread; the least of the rounds.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import torch
from measuring import options_of, seconds_of, tell

from nip_astra.parameters.types import TrainerType
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.samples import samples_of
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.trainers.registry import TRAINERS

NUM_RUNS = 8
Rows = list[dict[str, Any]]


def make_rows(count: int, mean_length: int, seed: int = 0) -> Rows:
    """Trajectories as plain lists: a prompt, then turns of policy and environment."""
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
                "logprobs": [-rng.random() if said else 0.0 for said in mask],
                "reward": float(rng.random() < 0.4),
                "group_id": index // NUM_RUNS,
                "run_id": index,
            }
        )
    return rows


def prepare(rows: Rows) -> Batch:
    """As `self_hosted_grpo` does it."""
    trainer: Any = TRAINERS.get(TrainerType.SELF_HOSTED_GRPO)({})
    batch, _ = trainer._prepare_batch(Batch.from_trajectories([Trajectory(**row) for row in rows]))
    samples_of(batch)
    return batch


def prepare_by_loop(rows: Rows) -> dict[str, torch.Tensor]:
    """The same, a token at a time."""
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
        last = max(place for place, said in enumerate(row["loss_mask"]) if said)
        made: dict[str, list[float]] = {name: [] for name in columns}
        for place in range(width):
            is_token = place < len(row["tokens"])
            is_said = is_token and row["loss_mask"][place] == 1
            made["input_ids"].append(row["tokens"][place] if is_token else 0)
            made["position_ids"].append(min(place, len(row["tokens"]) - 1))
            made["attention_mask"].append(1 if is_token else 0)
            made["loss_mask"].append(1 if is_said else 0)
            made["logprobs"].append(row["logprobs"][place] if is_token else 0.0)
            made["token_level_scores"].append(row["reward"] if place == last else 0.0)
            made["advantages"].append(0.0 if is_flat or not is_said else advantage)
        for name, values in made.items():
            columns[name].append(values)
    return {name: torch.tensor(values) for name, values in columns.items()}


def check(batch: Batch, by_loop: dict[str, torch.Tensor]) -> None:
    """Raise where the two are not the same."""
    for name, expected in by_loop.items():
        found = batch.values[name]
        if name == "advantages":
            found = found[:, None] * batch.values["loss_mask"]
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-5, atol=1e-5)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print a table and write JSON."""
    parser = options_of(__doc__, trajectories=512, mean_length=1140, rounds=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = make_rows(options.trajectories, options.mean_length)
    check(prepare(rows), prepare_by_loop(rows))
    ours, loop = (
        min(seconds_of(lambda way=way: way(rows)) for _ in range(options.rounds))
        for way in (prepare, prepare_by_loop)
    )
    figures = {
        "num_trajectories": len(rows),
        "num_tokens": sum(len(row["tokens"]) for row in rows),
        "seconds": ours,
        "loop_seconds": loop,
        "loop_over_ours": loop / ours,
    }
    tell(figures, options.out)


if __name__ == "__main__":
    main()
