"""How long novelty takes beside NLTK's sentence_bleu, which compares with every reference anew.

    pip install nltk
    python benchmarks/novelty.py --out novelty.json

Prints, for probes of 4 to 20 words out of 300: seconds to ask for the mean of BLEU-3, -4 and -5 of
100 probes against a history of 5,000 that is kept; to take these 100 in and forget as many; to do
the same with nothing kept; NLTK's time for a few of the 100, as if for all; and cosine novelty.
The least of several repetitions; values of both are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from nip_astra.reward_terms.base import RatedProbes
from nip_astra.reward_terms.registry import REWARD_TERMS, build_reward_term
from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.diversity import BleuReferences, bleu_against
from nip_astra.utils.ngrams import word_tokens

ORDERS = (3, 4, 5)


def make_probes(count: int, seed: int) -> list[str]:
    """Distinct-looking probes of common and rare words."""
    rng = random.Random(seed)
    words = [f"word{number}" for number in range(300)]
    weights = [1 / (number + 1) for number in range(300)]
    return [" ".join(rng.choices(words, weights, k=rng.randint(4, 20))) for _ in range(count)]


def seconds(work: Callable[[], Any], repetitions: int = 5) -> float:
    """The least time of several."""
    found = []
    for _ in range(repetitions):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


def nltk_bleu(probes: list[str], references: list[str]) -> list[float]:
    """The mean BLEU of the orders, by NLTK with the same smoothing and tokens."""
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    smoothing = SmoothingFunction().method1
    split = [word_tokens(reference) for reference in references]
    scores = []
    for probe in probes:
        values = [
            sentence_bleu(
                split, word_tokens(probe), weights=[1 / n] * n, smoothing_function=smoothing
            )
            for n in ORDERS
        ]
        scores.append(sum(values) / len(values))
    return scores


def rollout_of(probes: list[str]) -> RatedProbes:
    """A rollout of which only the texts matter."""
    zeros = torch.zeros(len(probes), 1)
    return RatedProbes(probes, probes, probes, zeros.bool(), zeros, zeros, zeros[:, 0], 1)


def measure(num_probes: int, num_history: int, num_by_nltk: int) -> dict[str, Any]:
    """All times, in seconds, and how far the values are apart."""
    history, probes = make_probes(num_history, 0), make_probes(num_probes, 1)
    kept = BleuReferences(max_order=max(ORDERS))
    kept.add(history)

    def turn_over() -> None:
        kept.add(probes)
        kept.remove(probes)

    parameters = REWARD_TERMS.get("cosine_novelty").Parameters(max_history=num_history)
    term = build_reward_term(parameters, device=torch.device("cpu"), scenario_dir=None)
    term.observe(rollout_of(history))
    # Another list each time, so that nothing is remembered from the last.
    asked = [rollout_of(make_probes(num_probes, seed)) for seed in range(2, 7)]
    figures: dict[str, Any] = {
        "num_probes": num_probes,
        "num_history": num_history,
        "kept": seconds(lambda: kept.bleu(probes, orders=ORDERS)),
        "turn_over": seconds(turn_over),
        "anew": seconds(lambda: bleu_against(probes, history, orders=ORDERS)),
        "cosine": seconds(lambda: term.values(asked.pop())),
    }
    if num_by_nltk:
        part = probes[:num_by_nltk]
        started = time.perf_counter()
        expected = nltk_bleu(part, history)
        figures["nltk"] = (time.perf_counter() - started) * num_probes / num_by_nltk
        found = kept.bleu(part, orders=ORDERS).tolist()
        figures["largest_difference"] = max(
            abs(a - b) for a, b in zip(found, expected, strict=True)
        )
        figures["nltk_over_kept"] = figures["nltk"] / figures["kept"]
        figures["nltk_over_anew"] = figures["nltk"] / figures["anew"]
    return figures


def main() -> None:
    """Measure, print a table and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--history", type=int, default=5000)
    parser.add_argument("--by-nltk", type=int, default=4, help="0 where NLTK is not installed")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(arguments.probes, arguments.history, arguments.by_nltk)
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if arguments.out:
        figures["environment"] = describe_environment()
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
