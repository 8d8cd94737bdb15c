"""What the benchmarks measure with: options, clocks, turns, peak memory, tables in Markdown."""

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


def wait_for_gpu() -> None:
    """Wait until a GPU that torch uses has done its work, without which times mean nothing."""
    if torch := _torch_with_gpu():
        torch.cuda.synchronize()


def _torch_with_gpu() -> Any:
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def seconds_of(function: Callable[[], Any]) -> float:
    """How long a call takes, with the work that it gives to a GPU."""
    wait_for_gpu()
    started = time.perf_counter()
    function()
    wait_for_gpu()
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
    """Free what is not held, and start a new peak; where the system refuses, the peak stays."""
    gc.collect()
    if torch := _torch_with_gpu():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Most memory since the last peak was forgotten: of the GPU if one is used, or resident."""
    torch = _torch_with_gpu()
    return int(torch.cuda.max_memory_allocated()) if torch else peak_memory_bytes()


# ---- rows that are written as soon as they are measured


class Row(NamedTuple):
    """Something to measure, in a part of a benchmark; `run` gives figures by name.

    `needs` are packages; a row without one of them, or without a GPU that it needs, is skipped.
    """

    part: str
    name: str
    run: Callable[[Any], dict[str, Any]]
    needs: tuple[str, ...] = ()
    needs_gpu: bool = False
    in_small: bool = True

    def record(self, setting: Any, *, has_gpu: bool) -> dict[str, Any]:
        """Run it: status, figures or reason, seconds, peak memory, device and versions.

        Figures with a `difference` also have the `tolerance` within which it `agrees`.
        """
        found: dict[str, Any] = {"part": self.part, "row": self.name}
        missing = [one for one in self.needs if not (version_of(one) or one in sys.modules)]
        if missing or (self.needs_gpu and not has_gpu):
            reason = f"package {', '.join(missing)} is missing" if missing else "needs a GPU"
            return found | {"status": "skipped", "reason": reason}
        forget_peak_memory()
        try:
            started = time.perf_counter()
            figures = self.run(setting)
            wait_for_gpu()
            found |= {"status": "measured", "seconds": time.perf_counter() - started}
            found["figures"] = figures
            if "difference" in figures:
                found["agrees"] = bool(figures["difference"] <= figures["tolerance"])
        # Benchmarks whose ways differ exit.
        except (Exception, SystemExit) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error)[:800]}"
            found |= {"status": "failed", "error": f"{said} ({place.filename}:{place.lineno})"}
        return found | {"peak_bytes": peak_bytes()}


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def measure_rows(
    rows: Sequence[Row], setting: Any, out: Path, *, has_gpu: bool, about: Mapping[str, Any]
) -> bool:
    """Append a record of each row, and `about`, to a JSONL file; whether none failed or differs."""
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
