"""What the benchmarks measure with: clocks, peak memory, counts of work, tables in Markdown."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@dataclass
class Stopwatch:
    """Adds up seconds by phase; on a GPU a phase ends when its kernels have.

    Attributes
    ----------
    seconds : dict[str, float]
        By phase, in the order of their first use.
    """

    device: str = "cpu"
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a phase."""
        self._wait()
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wait()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def undisturbed(run: Callable[[], Result], device: str = "cpu") -> tuple[Result, int]:
    """Run something, again where it was held up, and say how many times that was.

    Held up: this process had the processor for less than four fifths of the time. After three
    times the last run counts nevertheless.
    """
    for num_held_up in range(3):
        started, cpu_started = time.perf_counter(), time.process_time()
        result = run()
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        if device != "cpu" or cpu >= 0.8 * wall:
            return result, num_held_up
    return result, 3


@dataclass
class WorkCount:
    """What went through a model, whatever the machine; padding counts.

    Attributes
    ----------
    forwarded : int
        Positions that were read.
    head_rows : int
        Positions for which the distribution over the whole vocabulary was computed.
    """

    forwarded: int = 0
    head_rows: int = 0


def count_work(module: Any) -> WorkCount:
    """A count that grows with every forward pass of a causal language model."""
    count = WorkCount()

    def read(_: Any, arguments: tuple[Tensor, ...], __: Tensor) -> None:
        count.forwarded += arguments[0].numel()

    def predicted(_: Any, arguments: tuple[Tensor, ...], __: Tensor) -> None:
        count.head_rows += arguments[0].numel() // arguments[0].shape[-1]

    module.get_input_embeddings().register_forward_hook(read)
    module.get_output_embeddings().register_forward_hook(predicted)
    return count


def median_by_name(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each name; a name that is missing somewhere counts as 0 there."""
    names = dict.fromkeys(name for values in measured for name in values)
    return {name: statistics.median(values.get(name, 0.0) for values in measured) for name in names}


def shown_command(script: str, arguments: Sequence[str] | None) -> str:
    """What was called, without the places of files."""
    shown: list[str] = []
    for word in sys.argv[1:] if arguments is None else arguments:
        if shown and shown[-1] in ("--out", "--markdown"):
            shown.pop()
        else:
            shown.append(Path(word).name if Path(word).is_absolute() else word)
    return " ".join([f"python benchmarks/{script}", *shown])


# ---- memory


def held_memory_bytes() -> int | None:
    """The memory that this process holds now; None where the system does not say."""
    return _status_bytes("VmRSS")


def forget_peak_memory() -> None:
    """Start a new peak at what is held now; where the system refuses, the peak stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


# ---- Markdown


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers are short and stand on the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    is_number = [
        bool(rows) and all(isinstance(row[i], int | float | None) for row in rows)
        for i in range(len(header))
    ]
    lines = [header, ["---:" if right else "---" for right in is_number], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
