"""How fast agents play interaction protocols and learn from it, beside two other ways.

    python benchmarks/interactive_proofs.py --repetitions 5 --num-threads 1 2

Graph isomorphism at the published shapes, 2,048 frames an iteration and 10 epochs of minibatches of
256: ours (`ours`) beside the usual way with TorchRL (`plain`, see `plain_proofs.py`). Arms
take turns in one process. Before anything is timed, loss and gradients of both ways are compared
for equal weights and frames. Prints tables of medians; where "processors had" is below the number
of threads that work, others used the machine too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import plain_proofs
from measuring import markdown_table, median_by_name, options_of, ratio, shown_command, tell
from our_proofs import (
    COLLECT,
    GAE,
    PARTS,
    UPDATE,
    WHOLE,
    OurWay,
    Seconds,
    graph_trainer,
    torch_threads,
)

from nip_astra.tracking.environment import describe_environment
from nip_astra.utils.processor import keep_freed_memory

OURS, PLAIN = ARMS = ("ours", "plain")
TOLERANCES = {"losses": 1e-4, "gradients": 1e-3}
"""Differences, as shares of the largest value, up to which two ways count as one in float32."""
PLAIN_EPOCHS = 1
"""Epochs that the plain way is run for; the seconds of an update are those times all epochs."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Frames of an iteration and of a minibatch, and epochs of each task."""

    num_frames: int = 2048
    minibatch_size: int = 256
    num_graph_epochs: int = 10


QUICK = Sizes(num_frames=64, minibatch_size=32, num_graph_epochs=2)


@dataclass
class Arm:
    """One way of doing one task with a number of threads, and what it took so far."""

    name: str
    num_threads: int
    iterate: Callable[[], Seconds]
    seconds: list[Seconds] = field(default_factory=list)
    processor_shares: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name and number of threads."""
        return f"{self.name}, {self.num_threads} thread{'s' * (self.num_threads > 1)}"

    def run(self) -> Seconds:
        """Run an iteration; torch has the arm's threads, in place of which ours has processes."""
        with torch_threads(self.num_threads):
            return self.iterate()

    def time(self) -> None:
        """Run an iteration, and keep what it took and how much of the processor it had."""
        started, cpu_started = time.perf_counter(), _processor_seconds()
        self.seconds.append(self.run())
        wall = time.perf_counter() - started
        self.processor_shares.append((_processor_seconds() - cpu_started) / wall)

    def figures(self, num_frames: int) -> Figures:
        """Medians, and rates from them."""
        medians = median_by_name(self.seconds)
        played = medians[COLLECT]
        return {
            "arm": self.name,
            "num_threads": self.num_threads,
            "seconds": medians,
            "collected_frames_per_second": num_frames / played,
            "trained_frames_per_second": num_frames / medians[WHOLE],
            "processors_had": statistics.median(self.processor_shares),
            "runs": self.seconds,
        }


def _processor_seconds() -> float:
    """The processor time of this process and of those that it had and that have ended."""
    return sum(os.times()[:4])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = options_of(
        __doc__,
        repetitions={"type": int, "default": 5, "help": "iterations timed of each arm"},
        num_threads=[1, 2],
        arms={"nargs": "+", "default": list(ARMS), "choices": ARMS, "help": "what to time"},
        quick={"action": "store_true", "help": "tiny sizes, to see that it runs"},
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    keep_freed_memory()
    sizes = QUICK if options.quick else Sizes()
    agreement: dict[str, dict[str, float]] = {}
    arms = _graph_arms(options, sizes, agreement)
    measure(arms, options.repetitions)
    report = {
        "command": shown_command("interactive_proofs.py", arguments),
        "sizes": vars(sizes),
        "plain_epochs": PLAIN_EPOCHS,
        "agreement": agreement,
        "arms": {arm.label: arm.figures(sizes.num_frames) for arm in arms},
        "ratios": ratios(arms),
        "environment": describe_environment(),
    }
    tell(report, options.out, shown=markdown(report, arms))


def _graph_arms(
    options: argparse.Namespace, sizes: Sizes, agreement: dict[str, dict[str, float]]
) -> list[Arm]:
    shape, arms = (sizes.num_frames, sizes.minibatch_size, sizes.num_graph_epochs), []
    for count in options.num_threads:
        trainer = graph_trainer(*shape, count)
        if PLAIN in options.arms:
            plain = plain_proofs.PlainWay(trainer, num_epochs=PLAIN_EPOCHS)
            agreement[f"{OURS} and {PLAIN}"] = _checked(plain_proofs.compare(trainer, plain))
            arms.append(Arm(PLAIN, count, plain.iterate))
        if OURS in options.arms:
            # Agents that learn at the same time share no clock.
            way = OurWay(trainer, has_breakdown=count == 1)
            arms.append(Arm(OURS, count, way.iterate))
    return arms


def _checked(differences: dict[str, float]) -> dict[str, float]:
    """Stop where two ways do not compute the same."""
    for name, difference in differences.items():
        if not difference <= TOLERANCES[name]:
            raise SystemExit(
                f"two ways were to compute the same {name}, but they differ by {difference:.1e} "
                f"of the largest, more than {TOLERANCES[name]:.0e}. Nothing was timed."
            )
    return differences


def measure(arms: Sequence[Arm], num_repetitions: int) -> None:
    """Run each arm once to warm up, then all in turns."""
    for arm in arms:
        arm.run()
    for _ in range(num_repetitions):
        for arm in arms:
            arm.time()


def ratios(arms: Sequence[Arm]) -> list[Figures]:
    """How many times as long the plain way takes as ours, medians over the repetitions."""
    rows = []
    for one, other in itertools.product(arms, arms):
        if (one.name, other.name) == ARMS[::-1] and one.num_threads == other.num_threads:
            found = {
                part: ratio(*([seconds[part] for seconds in arm.seconds] for arm in (one, other)))
                for part in (WHOLE, COLLECT, GAE, UPDATE)
            }
            rows.append({"arm": one.label, "than": other.label, **found})
    return rows


def markdown(report: Figures, arms: Sequence[Arm]) -> str:
    """All figures as Markdown tables."""
    sizes, found = report["sizes"], [report["arms"][arm.label] for arm in arms]
    seconds = [of["seconds"] for of in found]
    rows: list[list[object]] = [
        [f"{part}, ms", *(1e3 * s[part] if part in s else None for s in seconds)]
        for part in PARTS
        if any(part in s for s in seconds)
    ]
    for key in ("collected_frames_per_second", "trained_frames_per_second", "processors_had"):
        rows.append([key.replace("_", " "), *(of[key] for of in found)])
    parts = [
        f"`{report['command']}`\n",
        f"Graph isomorphism, {sizes['num_frames']:,} frames, {sizes['num_graph_epochs']} epochs. "
        f"The update of `{PLAIN}` is the time of {PLAIN_EPOCHS} epoch, measured, times "
        f"{sizes['num_graph_epochs']}.\n",
        markdown_table(["", *(arm.label for arm in arms)], rows),
    ]
    if report["ratios"]:
        header = ["times as long", "as", WHOLE, COLLECT, GAE, UPDATE]
        parts.append(markdown_table(header, [list(row.values()) for row in report["ratios"]]))
    for name, differences in report["agreement"].items():
        parts.append(
            f"Equal weights and frames, {name}: losses differ by {differences['losses']:.0e} of "
            f"the largest, gradients by {differences['gradients']:.0e}.\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    main()
