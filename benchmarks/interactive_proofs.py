"""How fast agents play interaction protocols and learn from it, beside the usual way.

    python benchmarks/interactive_proofs.py --rounds 5 --num-threads 1 2

Graph isomorphism at the published shapes, 2,048 frames an iteration and 10 epochs of minibatches of
256: ours beside the usual way with TorchRL (`plain`, see `plain_proofs.py`), which is run for one
epoch and told as if for all. They take turns in one process. Before anything is timed, loss and
gradients of both are compared for equal weights and frames. Prints tables of medians; where
"processors had" is below the number of threads that work, others used the machine too.
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
from measuring import in_turns, markdown_table, median_by_name, options_of, ratio, tell
from our_proofs import COLLECT, PARTS, WHOLE, graph_trainer
from plain_proofs import PlainWay, compare

from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.processor import keep_freed_memory

TOLERANCES = {"losses": 1e-4, "gradients": 1e-3}
"""Differences, as shares of the largest value, up to which two ways count as one in float32."""
PROCESSORS = "processors had"
BOTH = ("plain", "ours")

Seconds = dict[str, float]


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch so many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(iterate: Callable[[], Seconds], num_threads: int) -> Seconds:
    """Run an iteration, and add how much of the processor it had.

    Torch has so many threads, in place of which ours has processes.
    """
    started, busy_before = time.perf_counter(), sum(os.times()[:4])
    with torch_threads(num_threads):
        seconds = iterate()
    had = (sum(os.times()[:4]) - busy_before) / (time.perf_counter() - started)
    return {**seconds, PROCESSORS: had}


def check(differences: Mapping[str, float]) -> None:
    """Stop where two ways do not compute the same."""
    for name, difference in differences.items():
        if not difference <= TOLERANCES[name]:
            raise SystemExit(
                f"two ways were to compute the same {name}, but they differ by {difference:.1e} "
                f"of the largest, more than {TOLERANCES[name]:.0e}. Nothing was timed."
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(
        __doc__,
        rounds={"type": int, "default": 5, "help": "iterations timed of each way"},
        num_threads=[1, 2],
        frames=2048,
        minibatch=256,
        epochs=10,
    ).parse_args(arguments)
    warnings.simplefilter("ignore")
    keep_freed_memory()
    agreement: dict[str, float] = {}
    ways: dict[str, Callable[[], Seconds]] = {}
    for count in options.num_threads:
        trainer = graph_trainer(options.frames, options.minibatch, options.epochs, count)
        plain = PlainWay(trainer)
        agreement = compare(trainer, plain)
        check(agreement)
        ways[f"plain, {count}"] = partial(timed, plain.iterate, count)
        ways[f"ours, {count}"] = partial(timed, partial(our_proofs.iterate, trainer), count)
    for way in ways.values():
        way()
    runs = in_turns(ways, options.rounds)
    figures = {name: median_by_name(seconds) for name, seconds in runs.items()}
    for medians in figures.values():
        medians["collected frames per second"] = options.frames / medians[COLLECT]
        medians["trained frames per second"] = options.frames / medians[WHOLE]
    ratios = {
        str(count): {
            part: ratio(*([run[part] for run in runs[f"{way}, {count}"]] for way in BOTH))
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
    tell(report, options.out, shown=markdown(report))


def markdown(report: Mapping[str, Any]) -> str:
    """All figures as Markdown tables."""
    figures, agreement = report["figures"], report["agreement"]
    names = list(next(iter(figures.values())))
    rows = [
        [f"{name}, ms" if name in PARTS else name]
        + [of[name] * (1e3 if name in PARTS else 1) for of in figures.values()]
        for name in names
    ]
    ratios = [[count, *of.values()] for count, of in report["ratios"].items()]
    return "\n".join(
        [
            markdown_table(["way, threads", *figures], rows),
            markdown_table(["plain by ours, threads", *PARTS], ratios),
            f"Equal weights and frames: losses differ by {agreement['losses']:.0e} of the largest, "
            f"gradients by {agreement['gradients']:.0e}.",
        ]
    )


if __name__ == "__main__":
    main()
