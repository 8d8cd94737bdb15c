"""Shared benchmark tools: options, timers, interleaved rounds, peak memory, Markdown tables."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nip_astra.utils.processor import peak_memory_bytes

Result = TypeVar("Result")

# ---- options and output


def build_parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """Build the parser of a benchmark's options.

    Parameters
    ----------
    text : str
        The benchmark's docstring.
    options
        By name: the default, which sets the option's type. A list accepts several values, a bool is
        a switch, a type such as `Path` has no default, and a dict is passed to `add_argument`.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in (
        {"out": {"type": Path, "help": "JSON file for the figures"}} | options
    ).items():
        keywords: dict[str, Any] = {"type": type(option), "default": option}
        if isinstance(option, dict):
            keywords = option
        elif isinstance(option, bool):
            keywords = {"action": "store_true"}
        elif isinstance(option, list):
            keywords = {"nargs": "+", "type": type(option[0]), "default": option}
        elif isinstance(option, type):
            keywords = {"type": option}
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    return parser


def report_figures(figures: Any, out: Path | None, *, shown: str | None = None) -> None:
    """Print figures, one per line or as the text `shown`, and write them to `out` as JSON."""
    if shown is None:
        lines = [f"{name.replace('_', ' '):>28}  {_cell(value)}" for name, value in figures.items()]
        shown = "\n".join(lines)
    print(shown, flush=True)
    if out is not None:
        out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


# ---- time


class Cost(NamedTuple):
    """Time and forwarded positions of one part.

    Attributes
    ----------
    seconds : float
        Wall time.
    forwarded, unique : float
        Positions forwarded through models, and the distinct positions among them.
    """

    seconds: float
    forwarded: float = 0.0
    unique: float = 0.0

    def scaled(self, factor: float) -> Cost:
        """The cost of `factor` times the work."""
        return Cost(*(factor * value for value in self))


class Stopwatch:
    """Accumulates seconds by phase, in order of first use."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block, or of each call of a decorated function."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


def wait_for_gpu() -> None:
    """Wait for queued GPU work, without which wall times mean nothing."""
    if torch := _torch_with_gpu():
        torch.cuda.synchronize()


def _torch_with_gpu() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def seconds_of(function: Callable[[], Any]) -> float:
    """Wall time of a call, including the GPU work that it queues."""
    wait_for_gpu()
    started = time.perf_counter()
    function()
    wait_for_gpu()
    return time.perf_counter() - started


def interleaved(
    variants: Mapping[str, Callable[[], Result]], num_rounds: int
) -> dict[str, list[Result]]:
    """Run all variants in each round, in alternating order, and collect their results.

    Other load on the machine affects a whole round, so ratios within rounds are more reliable than
    ratios of medians; see `ratio`.
    """
    results: dict[str, list[Result]] = {name: [] for name in variants}
    for number in range(num_rounds):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            results[name].append(variants[name]())
    return results


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio of two variants' figures."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def median_by_name(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Median of each name over the measurements; a missing name counts as 0."""
    names = dict.fromkeys(name for values in measured for name in values)
    return {name: statistics.median(values.get(name, 0.0) for values in measured) for name in names}


# ---- memory


def resident_memory_bytes() -> int | None:
    """Resident memory of this process; None where the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return None


def reset_peak_memory() -> None:
    """Free unused memory and reset the peak; where the system refuses, the old peak stays."""
    gc.collect()
    if torch := _torch_with_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Peak memory since the last reset: of the GPU if torch uses one, otherwise resident."""
    torch = _torch_with_gpu()
    return int(torch.cuda.max_memory_allocated()) if torch else peak_memory_bytes()


# ---- rows, written as soon as they are measured


class Row(NamedTuple):
    """A measurement in a part of a benchmark; `run` returns figures by name.

    A row is skipped if a package of `needs` is missing, or the GPU that it needs.
    """

    part: str
    name: str
    run: Callable[[Any], dict[str, Any]]
    needs: tuple[str, ...] = ()
    needs_gpu: bool = False
    in_small: bool = True

    def record(self, setting: Any, *, has_gpu: bool) -> dict[str, Any]:
        """Run the row: status, figures or reason, seconds and peak memory.

        A row with a `difference` `agrees` if that is within its `tolerance`.
        """
        record: dict[str, Any] = {"part": self.part, "row": self.name}
        missing = [name for name in self.needs if not (version_of(name) or name in sys.modules)]
        if missing or (self.needs_gpu and not has_gpu):
            reason = f"package {', '.join(missing)} is missing" if missing else "needs a GPU"
            return record | {"status": "skipped", "reason": reason}
        reset_peak_memory()
        try:
            started = time.perf_counter()
            figures = self.run(setting)
            wait_for_gpu()
            record |= {"status": "measured", "seconds": time.perf_counter() - started}
            record["figures"] = figures
            if "difference" in figures:
                record["agrees"] = bool(figures["difference"] <= figures["tolerance"])
        # A benchmark exits where its variants disagree.
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {str(error)[:800]}"
            record |= {"status": "failed", "error": f"{message} ({place.filename}:{place.lineno})"}
        return record | {"peak_bytes": peak_bytes()}


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def measure_rows(
    rows: Sequence[Row], setting: Any, out: Path, *, has_gpu: bool, about: dict[str, Any]
) -> bool:
    """Append a record of each row and `about` to a JSONL file; True if none failed or differed."""
    is_fine = True
    with out.open("a", encoding="utf-8") as file:
        for row in rows:
            record = row.record(setting, has_gpu=has_gpu) | about
            file.write(json.dumps(record, default=str) + "\n")
            file.flush()
            is_fine &= record["status"] != "failed" and record.get("agrees", True)
            note = record.get("reason") or record.get("error") or record.get("figures")
            print(f"{row.part} | {row.name} | {record['status']} | {note}", flush=True)
    return is_fine


# ---- Markdown


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers are rounded and right-aligned."""
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
