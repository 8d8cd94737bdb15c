"""Do the estimates of the probability of failure hold what they promise, on pocket_chat?

    nip-astra --trainer ast_dpo --run-id trained
    python benchmarks/failure_probability.py runs/trained

Brute force plays the reference many times for the truth. Then each estimator is repeated, each time
with as many target queries: plain Monte Carlo, on parts of the brute force; importance sampling as
`nip-astra evaluate` does it, half of the episodes the reference's and in the others one turn the
attacker's; and a mixture in which the other half is the attacker's throughout. Told are error,
width and coverage of the intervals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measuring import markdown_table, options_of, tell

from nip_astra.cli.evaluation_loading import LoadedAttacker, RunCode, load_attacker
from nip_astra.evaluation.failure_probability import (
    ATTACKER,
    REFERENCE,
    WeighedEpisodes,
    defensive_shares,
    importance_sampling,
    monte_carlo,
)
from nip_astra.evaluation.proposals import sampled_logprobs, sampler_of
from nip_astra.experiment_settings import ExperimentSettings

BATCH = 600


class Episodes(NamedTuple):
    """Episodes of one proposal: log-ratios, first failures and prompts, in order."""

    log_ratio: Any
    first: Any
    prompts: Any

    def part(self, start: int, count: int) -> Episodes:
        return Episodes(*(column[start : start + count] for column in self))


@torch.no_grad()
def play(
    attacker: LoadedAttacker, proposal: str, prompts: Sequence[int], key: Any, *, weigh: bool
) -> Episodes:
    """Play one episode a prompt number."""
    depth, threshold = attacker.section.tree_depth, attacker.section.failure_threshold
    texts = attacker.instance.datasets["test"]
    sampler = sampler_of(proposal, attacker.sampler, num_turns=depth)
    ratios, first = [], []
    for start in range(0, len(prompts), BATCH):
        numbers = prompts[start : start + BATCH]
        tree = sampler.sample(
            [texts[number] for number in numbers],
            tree_width=1,
            tree_depth=depth,
            key=key,
            first_episode=start,
        )
        failed_EH = (tree.nodes["response_score"] >= threshold).view(depth, -1).T.numpy()
        first.append(np.where(failed_EH.any(axis=1), failed_EH.argmax(axis=1), -1))
        logprobs = [
            sampled_logprobs(agent.language_model, tree, agent.sampling)
            if weigh
            else torch.zeros(1)
            for agent in (attacker.sampler.attacker, attacker.sampler.reference)
        ]
        shape = (depth, len(numbers))
        ratios.append(
            (logprobs[0] - logprobs[1]).expand(depth * len(numbers)).view(shape).T.numpy()
        )
    return Episodes(np.concatenate(ratios), np.concatenate(first), np.asarray(prompts))


def brute_force(attacker: LoadedAttacker, num_episodes: int, seed: int) -> Any:
    """Say of each episode of the reference whether it fails; prompts are used in order."""
    num_prompts = len(attacker.instance.datasets["test"])
    numbers = [i % num_prompts for i in range(num_episodes)]
    return play(attacker, REFERENCE, numbers, (seed, "brute"), weigh=False).first >= 0


def weighed(parts: dict[str, Episodes]) -> dict[str, Any]:
    """The importance-sampling estimate from parts of several proposals."""
    return importance_sampling(
        WeighedEpisodes(
            np.concatenate([part.log_ratio for part in parts.values()]),
            np.concatenate([part.first for part in parts.values()]),
            [name for name, part in parts.items() for _ in part.first],
            [int(p) for part in parts.values() for p in part.prompts],
        )
    ).to_dict()


def repeat(
    attacker: LoadedAttacker, counts: dict[str, int], repetitions: int, seed: int
) -> list[dict[str, Episodes]]:
    """Play every repetition of a mixture; within one, the prompts are used in turn."""
    texts = attacker.instance.datasets["test"]
    generator = np.random.default_rng(seed)
    numbers: dict[str, list[int]] = {name: [] for name in counts}
    for _ in range(repetitions):
        order, place = generator.permutation(len(texts)), 0
        for name, count in counts.items():
            numbers[name] += [int(order[i % len(texts)]) for i in range(place, place + count)]
            place += count
    pool = {
        name: play(attacker, name, chosen, (seed, "mixture", name), weigh=True)
        for name, chosen in numbers.items()
    }
    return [
        {name: pool[name].part(r * count, count) for name, count in counts.items()}
        for r in range(repetitions)
    ]


def figures(estimates: Sequence[dict[str, Any]], truth: float) -> dict[str, float]:
    """Error, width and coverage of repeated estimates; refused ones are counted apart."""
    told = [e for e in estimates if e["value"] is not None]
    values = np.array([e["value"] for e in told])
    low, high = np.array([e["low"] for e in told]), np.array([e["high"] for e in told])
    error = np.sqrt(((values - truth) ** 2).mean())
    return {
        "mean": float(values.mean()),
        "rmse": float(error),
        "relative_rmse": float(error / truth),
        "standard_error": float(np.sqrt(np.mean([e["standard_error"] ** 2 for e in told]))),
        "mean_width": float((high - low).mean()),
        "coverage": float(((low <= truth) & (truth <= high)).mean()),
        "refused": len(estimates) - len(told),
        "effective_sample_size": float(
            np.mean([e.get("effective_sample_size", np.nan) for e in told])
        ),
    }


def monte_carlo_parts(
    attacker: LoadedAttacker, has_failed: Any, count: int, repetitions: int
) -> list[Any]:
    """The plain estimate from each part of the brute force."""
    num_prompts = len(attacker.instance.datasets["test"])
    return [
        monte_carlo(
            has_failed[start : start + count].astype(float).tolist(),
            [i % num_prompts for i in range(start, start + count)],
            num_turns=attacker.section.tree_depth,
        )
        for start in range(0, repetitions * count, count)
    ]


def main() -> None:
    """Measure, and print the table."""
    parser = options_of(
        __doc__,
        episodes={"type": int, "default": 300, "help": "of one estimate"},
        repetitions=100,
        brute_force={"type": int, "default": 120_000, "help": "episodes for the truth"},
        truth={"type": Path, "help": ".npy file that keeps the brute force between calls"},
        seed=77,
    )
    parser.add_argument("run", help="a finished run on pocket_chat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attacker = load_attacker(options.run, ExperimentSettings(), code=RunCode())
    started = time.perf_counter()
    if options.truth is not None and options.truth.is_file():
        has_failed = np.load(options.truth)
    else:
        has_failed = brute_force(attacker, options.brute_force, options.seed)
        if options.truth is not None:
            np.save(options.truth, has_failed)
    truth, total = float(has_failed.mean()), len(has_failed)
    error = (truth * (1 - truth) / total) ** 0.5
    num_turns, count = attacker.section.tree_depth, options.episodes
    estimates = {"Monte Carlo": monte_carlo_parts(attacker, has_failed, count, options.repetitions)}
    mixtures = {
        "importance sampling, one turn": defensive_shares(count, num_turns),
        "importance sampling, all turns": {REFERENCE: count - count // 2, ATTACKER: count // 2},
    }
    for name, counts in mixtures.items():
        parts = repeat(attacker, counts, options.repetitions, options.seed)
        estimates[name] = [weighed(part) for part in parts]
    found = {name: figures(told, truth) for name, told in estimates.items()}
    shown = (
        f"brute force: {has_failed.sum():,} of {total:,} episodes fail, {truth:.3%} +- {error:.3%}"
        f"\n\n{_table(found)}\n{options.repetitions} repetitions of {count * num_turns:,} target "
        f"queries each, 95 % intervals; {time.perf_counter() - started:.0f} s"
    )
    values = ("value", "low", "high")
    content = {
        name: {"figures": found[name], "estimates": [[e[v] for v in values] for e in told]}
        for name, told in estimates.items()
    }
    tell({"truth": truth, **content}, options.out, shown=shown)


def _table(found: dict[str, dict[str, float]]) -> str:
    header = ["", "mean", "RMSE", "RMSE/p", "SE told", "width", "cover", "refused", "ESS"]
    percent = ("mean", "rmse", "standard_error", "mean_width", "coverage")
    rows = [
        [name, *(f"{v:.3%}" if key in percent else v for key, v in of_one.items())]
        for name, of_one in found.items()
    ]
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
