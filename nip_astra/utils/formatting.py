"""Formatting of numbers and figures, shared by reports and terminal."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

NOTHING = "\N{EN DASH}"
"""Text for a missing figure."""
COUNTS = {
    "failure_rate": ("num_failed", "num_known", "num_episodes"),
    "value": ("num_failed", "num_known", "num_episodes"),
    "accuracy": ("num_correct", "num_answers", ""),
    "distinct_share": ("num_distinct", "num_probes", ""),
    "self_bleu_complement": ("", "self_bleu_num_probes", ""),
    "cosine_distance": ("", "num_probes", ""),
    "vendi": ("", "num_probes", ""),
    "share_below": ("num_below", "num_probes", ""),
    "recall": ("found", "total", ""),
    "pass_at": ("", "num_complete_problems", ""),
}
"""Names of the counts of a figure: events, known units and all units."""
_SHARE = re.compile(
    r"(rate|share|share_below|recall|fraction|accuracy|(message|decision)_(entropy|prob)|"
    r"message_regression(_baseline)?)$|(^|/)(pass_at_\d+$|share_|\w*accuracy_(of|where|wl)_)"
)


def is_share(name: str) -> bool:
    """Return whether this is the name of a share between 0 and 1."""
    return _SHARE.search(name) is not None and not name.rpartition("/")[2].startswith("std_")


def percent(value: Any, digits: int = 1) -> str:
    """Format a share of 1 as a percentage."""
    share = number(value)
    return NOTHING if share is None else f"{share:.{digits}%}"


def decimal(value: Any, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, or all digits of a whole part above."""
    figure = number(value)
    if figure is None:
        return NOTHING
    if figure == int(figure) and abs(figure) < 1e9:
        return f"{int(figure):,}".replace("-", "\N{MINUS SIGN}")
    size = abs(figure)
    written = f"{figure:,.0f}" if 10**digits - 0.5 <= size < 1e9 else f"{figure:.{digits}g}"
    return written.replace("-", "\N{MINUS SIGN}") if "e" not in written else written


def count(value: Any) -> str:
    """Format a whole number with separators."""
    figure = number(value)
    return NOTHING if figure is None else f"{figure:,.0f}"


def one_in(value: Any) -> str:
    """Format a small share as "1 in N"."""
    share = number(value)
    return NOTHING if not share else f"1 in {1.0 / share:,.0f}"


def duration(seconds: Any) -> str:
    """Format a duration in seconds, minutes or hours."""
    figure = number(seconds)
    if figure is None:
        return NOTHING
    if figure < 120:
        return f"{figure:.3g} s"
    minutes, hours = figure / 60, figure / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def value_text(value: Any) -> str:
    """Format a parameter value as in a YAML file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def format_value(name: str, value: Any) -> str:
    """Format a value, as a percentage if its name is that of a share."""
    if number(value) is not None:
        return percent(value) if is_share(name) else decimal(value)
    return NOTHING if value is None else value_text(value)


def interval_of(report: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    """Return the bounds `<name>_interval` of a report."""
    ends = [number(end) for end in items(report.get(f"{name}_interval"))]
    return (ends[0], ends[1]) if len(ends) == 2 else (None, None)


def interval(low: Any, high: Any, name: str = "share") -> str:
    """Format the interval of a figure; empty if there is none."""
    if number(low) is None or number(high) is None:
        return ""
    return f"[{format_value(name, low)}, {format_value(name, high)}]"


def counts_text(report: Mapping[str, Any], name: str = "failure_rate") -> str:
    """Format the counts of a figure, "3 of 10, 2 unknown"; empty if they are not stored."""
    name = "pass_at" if name.startswith("pass_at_") else name
    if name == "mean_accuracy":
        accuracy, num_episodes = number(report.get(name)), number(report.get("num_episodes"))
        if accuracy is None or not num_episodes:
            return ""
        return f"{accuracy * num_episodes:,.0f} of {num_episodes:,.0f}"
    keys = COUNTS.get(name, ("", "", ""))
    num_hits, num_known, total = (number(report.get(key)) for key in keys)
    has_hits = bool(keys[0])
    if num_known is None or (num_hits is None and has_hits):
        return ""
    if num_hits is None:
        return f"of {num_known:,.0f}"
    if total is None or total == num_known:
        return f"{num_hits:,.0f} of {num_known:,.0f}"
    return f"{num_hits:,.0f} of {total:,.0f}, {total - num_known:,.0f} unknown"


def bounds_text(report: Mapping[str, Any]) -> str:
    """Format the rate if missing verdicts were passes, or failures; empty if none is missing."""
    num_known, total = number(report.get("num_known")), number(report.get("num_episodes"))
    low = number(report.get("if_unknown_passed"))
    high = number(report.get("if_unknown_failed"))
    if num_known is None or num_known == total or low is None or high is None:
        return ""
    return f"{percent(low)} / {percent(high)}"


def format_figure(report: Mapping[str, Any], name: str) -> str:
    """Format a figure of a report with its interval and counts, if stored.

    It is a number beside `<name>_interval` and counts, or a mapping of `value`, `low`, `high` and
    counts.
    """
    estimate = mapping(report.get(name))
    if estimate:
        value, ends = estimate.get("value"), (estimate.get("low"), estimate.get("high"))
        counted, name = counts_text(estimate, "value"), "share"
        if number(value) is None and not counted:
            return NOTHING
    else:
        value, ends, counted = (
            report.get(name),
            interval_of(report, name),
            counts_text(report, name),
        )
    parts = [format_value(name, value), "" if number(value) is None else interval(*ends, name)]
    written = " ".join(part for part in parts if part)
    return f"{written}, {counted}".removeprefix(f"{NOTHING}, ") if counted else written


def number(value: Any) -> float | None:
    """Return a finite number as float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def mapping(value: Any) -> dict[str, Any]:
    """Return a mapping with text keys, empty for anything else."""
    if not isinstance(value, Mapping):
        return {}
    return {str(key): item for key, item in value.items()}


def items(value: Any) -> list[Any]:
    """Return a list, empty for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def text(value: Any) -> str:
    """Return a text, empty for None."""
    return "" if value is None else str(value)
