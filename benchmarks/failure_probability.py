"""Accuracy of the estimates of the probability of failure, on pocket_chat.

    nip-astra --trainer ast_dpo --run-id trained
    python benchmarks/failure_probability.py runs/trained

The true value is a brute-force estimate from many episodes of the reference. Each estimator is
then repeated with an equal number of target queries: Monte Carlo, on subsets of the brute force;
importance sampling as in `nip-astra evaluate`, with half of the episodes from the reference and
half with one turn of the attacker; and a mixture in which the attacker plays all turns of the
second half. Reports the error, and the width and coverage of the intervals.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from measuring import build_parser, markdown_table, report_figures

from nip_astra.evaluation.failure_probability import (
    ATTACKER,
    REFERENCE,
    WeighedEpisodes,
    defensive_shares,
    importance_sampling,
    monte_carlo,
)
from nip_astra.evaluation.families.attackers import LoadedAttacker, load_attacker
from nip_astra.evaluation.families.base import EvaluationRequest
from nip_astra.evaluation.outcomes import Outcome
from nip_astra.evaluation.playing import sampled_logprobs, sampler_of
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.utils.statistics import FollowUp

BATCH = 600


class Episodes(NamedTuple):
    """Episodes of one proposal: log-ratios, turns of first failure (-1: none) and prompts."""

    log_ratio: Any
    first: Any
    prompts: Any

    def part(self, start: int, count: int) -> Episodes:
        return Episodes(*(column[start : start + count] for column in self))


@torch.no_grad()
def play(
    attacker: LoadedAttacker, proposal: str, prompts: Sequence[int], key: Any, *, weigh: bool
) -> Episodes:
    """Play one episode per prompt number."""
    depth, threshold = attacker.section.tree_depth, attacker.section.failure_threshold
    texts = attacker.instance.datasets["test"]
    sampler = sampler_of(proposal, attacker.instance.sampler, num_turns=depth)
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
        log_ratio = torch.zeros(depth * len(numbers))
        if weigh:
            loaded: Any = attacker.instance.sampler
            attacker_logprobs, reference_logprobs = (
                sampled_logprobs(agent.language_model, tree, agent.sampling)
                for agent in (loaded.attacker, loaded.reference)
            )
            log_ratio = attacker_logprobs - reference_logprobs
        ratios.append(log_ratio.view(depth, -1).T.numpy())
    return Episodes(np.concatenate(ratios), np.concatenate(first), np.asarray(prompts))


def mixture_estimates(
    attacker: LoadedAttacker, counts: dict[str, int], repetitions: int, seed: int
) -> list[dict[str, Any]]:
    """Estimates of repeated mixtures; a repetition cycles through shuffled prompts."""
    num_prompts, generator = len(attacker.instance.datasets["test"]), np.random.default_rng(seed)
    orders = [generator.permutation(num_prompts) for _ in range(repetitions)]
    pools: dict[str, Episodes] = {}
    offset = 0
    for name, count in counts.items():
        positions = [i % num_prompts for i in range(offset, offset + count)]
        numbers = [int(order[i]) for order in orders for i in positions]
        pools[name] = play(attacker, name, numbers, (seed, "mixture", name), weigh=True)
        offset += count
    results = []
    for number in range(repetitions):
        parts = [pools[name].part(number * count, count) for name, count in counts.items()]
        log_ratio, first, prompts = (
            np.concatenate(columns) for columns in zip(*parts, strict=True)
        )
        names = [name for name, count in counts.items() for _ in range(count)]
        horizon = log_ratio.shape[1]
        turns = np.where(first >= 0, first + 1, horizon).tolist()
        follow_up = FollowUp(turns, (first >= 0).tolist(), horizon)
        weighed = WeighedEpisodes(log_ratio, follow_up, names, prompts.tolist())
        results.append(importance_sampling(weighed).to_dict())
    return results


def monte_carlo_estimates(
    attacker: LoadedAttacker, episodes: Episodes, count: int, repetitions: int
) -> list[dict[str, Any]]:
    """A Monte Carlo estimate from each subset of the brute force."""
    parts = [episodes.part(number * count, count) for number in range(repetitions)]
    return [
        monte_carlo(
            [[Outcome.FAILURE if first >= 0 else Outcome.NONE] for first in part.first],
            part.prompts.tolist(),
            num_turns=attacker.section.tree_depth,
        )
        for part in parts
    ]


def figures(estimates: Sequence[dict[str, Any]], truth: float) -> dict[str, float]:
    """Error, width and coverage of repeated estimates; refused estimates are only counted."""
    known = [e for e in estimates if e["value"] is not None]
    values = np.array([e["value"] for e in known])
    low, high = np.array([e["low"] for e in known]), np.array([e["high"] for e in known])
    error = np.sqrt(((values - truth) ** 2).mean())
    return {
        "mean": float(values.mean()),
        "rmse": float(error),
        "relative_rmse": float(error / truth),
        "standard_error": float(np.sqrt(np.mean([e["standard_error"] ** 2 for e in known]))),
        "mean_width": float((high - low).mean()),
        "coverage": float(((low <= truth) & (truth <= high)).mean()),
        "refused": len(estimates) - len(known),
        "effective_sample_size": float(
            np.mean([e.get("effective_sample_size", np.nan) for e in known])
        ),
    }


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = build_parser(
        __doc__,
        episodes={"type": int, "default": 300, "help": "episodes per estimate"},
        repetitions=100,
        brute_force={"type": int, "default": 120_000, "help": "episodes for the true value"},
        seed=77,
    )
    parser.add_argument("run", help="a finished run on pocket_chat")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attacker = load_attacker(options.run, ExperimentSettings(), EvaluationRequest())
    started = time.perf_counter()
    num_prompts = len(attacker.instance.datasets["test"])
    numbers = [i % num_prompts for i in range(options.brute_force)]
    brute_force = play(attacker, REFERENCE, numbers, (options.seed, "brute"), weigh=False)
    total, num_failed = len(numbers), int((brute_force.first >= 0).sum())
    truth = num_failed / total
    error = (truth * (1 - truth) / total) ** 0.5
    num_turns, count = attacker.section.tree_depth, options.episodes
    estimates = {
        "Monte Carlo": monte_carlo_estimates(attacker, brute_force, count, options.repetitions)
    }
    mixtures = {
        "importance sampling, one turn": defensive_shares(count, num_turns),
        "importance sampling, all turns": {REFERENCE: count - count // 2, ATTACKER: count // 2},
    }
    for name, counts in mixtures.items():
        estimates[name] = mixture_estimates(attacker, counts, options.repetitions, options.seed)
    results = {name: figures(repeated, truth) for name, repeated in estimates.items()}
    shown = (
        f"brute force: {num_failed:,} of {total:,} episodes fail, {truth:.3%} +- {error:.3%}"
        f"\n\n{_table(results)}\n{options.repetitions} repetitions of {count * num_turns:,} target "
        f"queries each, 95 % intervals; {time.perf_counter() - started:.0f} s"
    )
    content = {"truth": truth, "figures": results, "estimates": estimates}
    report_figures(content, options.out, shown=shown)


def _table(results: dict[str, dict[str, float]]) -> str:
    header = ["", "mean", "RMSE", "RMSE/p", "reported SE", "width", "cover", "refused", "ESS"]
    percent = ("mean", "rmse", "standard_error", "mean_width", "coverage")
    rows = [
        [name, *(f"{v:.3%}" if key in percent else v for key, v in values.items())]
        for name, values in results.items()
    ]
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
