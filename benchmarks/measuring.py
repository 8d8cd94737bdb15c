"""What the benchmarks measure with: options, clocks, turns, peak memory, tables in Markdown."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

# ---- options, and what is told


def options_of(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser of a benchmark's options.

    Parameters
    ----------
    text : str
        The benchmark's docstring.
    options
        By name: the default, of whose type the option is; a list takes several words; True or False
        a switch; a type, such as `Path`, has no default; a dict is what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in (
        {"out": {"type": Path, "help": "JSON file for the figures"}} | options
    ).items():
        keywords: dict[str, Any] = {"type": type(given), "default": given}
        if isinstance(given, dict):
            keywords = given
        elif isinstance(given, bool):
            keywords = {"action": "store_true"}
        elif isinstance(given, list):
            keywords = {"nargs": "+", "type": type(given[0]), "default": given}
        elif isinstance(given, type):
            keywords = {"type": given}
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    return parser


def tell(figures: Any, out: Path | None, *, shown: str | None = None) -> None:
    """Print figures, a line each or as they are `shown`, and write them where `out` says."""
    if shown is None:
        lines = [f"{name.replace('_', ' '):>28}  {_cell(value)}" for name, value in figures.items()]
        shown = "\n".join(lines)
    print(shown, flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# ---- time


class Spent(NamedTuple):
    """The time and the work of a part.

    Attributes
    ----------
    forwarded, unique : float
        Positions that models have read, and those that they had to read at least once.
    """

    seconds: float
    forwarded: float = 0.0
    unique: float = 0.0

    def scaled(self, share: float) -> Spent:
        """What so many times as much would have taken."""
        return Spent(*(share * value for value in self))


class Stopwatch:
    """Adds up seconds by phase, in the order of their first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block, or each call of the function decorated with it, takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def seconds_of(function: Callable[[], Any]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_turns(ways: Mapping[str, Callable[[], Result]], num_rounds: int) -> dict[str, list[Result]]:
    """What each way gives in each round; the ways take turns, and each is first as often.

    What else runs on a machine weighs on all of a round, so that ratios of a round mean more than
    those of medians; see `ratio`.
    """
    found: dict[str, list[Result]] = {name: [] for name in ways}
    for number in range(num_rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(ways[name]())
    return found


def ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one way's figure by another's of the same round."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def median_by_name(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each name; a name that is missing somewhere counts as 0 there."""
    names = dict.fromkeys(name for values in measured for name in values)
    return {name: statistics.median(values.get(name, 0.0) for values in measured) for name in names}


# ---- memory


def held_memory_bytes() -> int | None:
    """The memory that this process holds now; None where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return None


def forget_peak_memory() -> None:
    """Start a new peak at what is held now; where the system refuses, the peak stays."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


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
