"""Speed of rollouts and updates of interaction protocols compared with a TorchRL baseline.

    python benchmarks/interactive_proofs.py --rounds 5 --num-threads 1 2

Graph isomorphism with the published shapes, 2,048 frames per iteration and 10 epochs of minibatches
of 256. The baseline (`plain`, see `plain_proofs.py`) runs one epoch, whose time is scaled to all.
Rounds are interleaved in one process. Before timing, losses and gradients are compared for equal
weights and frames. Prints tables of medians; if "processors had" is below the number of working
threads, the machine had other load.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import our_proofs
import torch
from measuring import (
    build_parser,
    interleaved,
    markdown_table,
    median_by_name,
    ratio,
    report_figures,
)
from our_proofs import COLLECT, PARTS, WHOLE, graph_trainer
from plain_proofs import TorchRlBaseline, compare

from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.processor import keep_freed_memory

TOLERANCES = {"losses": 1e-4, "gradients": 1e-3}
"""Accepted differences in float32, relative to the largest value."""
PROCESSORS = "processors had"
BOTH = ("plain", "ours")

Seconds = dict[str, float]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(iterate: Callable[[], Seconds], num_threads: int) -> Seconds:
    """Run an iteration, and add the average number of busy processors.

    `num_threads` is the number of torch threads; ours uses as many processes instead.
    """
    started, busy_before = time.perf_counter(), sum(os.times()[:4])
    with torch_threads(num_threads):
        seconds = iterate()
    processors = (sum(os.times()[:4]) - busy_before) / (time.perf_counter() - started)
    return {**seconds, PROCESSORS: processors}


def check(differences: Mapping[str, float]) -> None:
    """Exit if the two implementations disagree."""
    for name, difference in differences.items():
        if not difference <= TOLERANCES[name]:
            raise SystemExit(
                f"{name} of baseline and ours differ by {difference:.1e} of the largest, more than "
                f"{TOLERANCES[name]:.0e}. Nothing was timed."
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the figures."""
    options = build_parser(
        __doc__,
        rounds={"type": int, "default": 5, "help": "timed iterations of each variant"},
        num_threads=[1, 2],
        frames=2048,
        minibatch=256,
        epochs=10,
    ).parse_args(arguments)
    warnings.simplefilter("ignore")
    keep_freed_memory()
    agreement: dict[str, float] = {}
    variants: dict[str, Callable[[], Seconds]] = {}
    for count in options.num_threads:
        trainer = graph_trainer(options.frames, options.minibatch, options.epochs, count)
        plain = TorchRlBaseline(trainer)
        agreement = compare(trainer, plain)
        check(agreement)
        variants[f"plain, {count}"] = partial(timed, plain.iterate, count)
        variants[f"ours, {count}"] = partial(timed, partial(our_proofs.iterate, trainer), count)
    for run_once in variants.values():
        run_once()
    runs = interleaved(variants, options.rounds)
    figures = {name: median_by_name(seconds) for name, seconds in runs.items()}
    for medians in figures.values():
        medians["collected frames per second"] = options.frames / medians[COLLECT]
        medians["trained frames per second"] = options.frames / medians[WHOLE]
    ratios = {
        str(count): {
            part: ratio(*([run[part] for run in runs[f"{name}, {count}"]] for name in BOTH))
            for part in PARTS
        }
        for count in options.num_threads
    }
    report = {
        "agreement": agreement,
        "figures": figures,
        "ratios": ratios,
        "runs": runs,
        "environment": describe_environment(),
    }
    report_figures(report, options.out, shown=markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """All figures as Markdown tables."""
    figures, agreement = report["figures"], report["agreement"]
    names = list(next(iter(figures.values())))
    rows = [
        [f"{name}, ms" if name in PARTS else name]
        + [medians[name] * (1e3 if name in PARTS else 1) for medians in figures.values()]
        for name in names
    ]
    ratios = [[count, *by_part.values()] for count, by_part in report["ratios"].items()]
    return "\n".join(
        [
            markdown_table(["variant, threads", *figures], rows),
            markdown_table(["plain / ours, threads", *PARTS], ratios),
            f"Equal weights and frames: losses differ by {agreement['losses']:.0e} of the largest, "
            f"gradients by {agreement['gradients']:.0e}.",
        ]
    )


if __name__ == "__main__":
    main()
