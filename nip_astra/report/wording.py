"""How the report writes numbers and texts."""

from __future__ import annotations

import json
from typing import Any

from nip_astra.evaluation.run_results import is_share
from nip_astra.evaluation.tables import counts_text
from nip_astra.report.records import mapping, number

NOTHING = "\N{EN DASH}"
"""Stands where there is no figure."""


def percent(value: Any, digits: int = 1) -> str:
    """A share of 1 as a percentage."""
    share = number(value)
    return NOTHING if share is None else f"{share:.{digits}%}"


def decimal(value: Any, digits: int = 3) -> str:
    """A number with so many significant digits; a whole one from 1,000 on is not cut."""
    figure = number(value)
    if figure is None:
        return NOTHING
    if figure == int(figure) and abs(figure) < 1e9:
        return f"{int(figure):,}".replace("-", "\N{MINUS SIGN}")
    size = abs(figure)
    written = f"{figure:,.0f}" if 10**digits <= size < 1e9 else f"{figure:.{digits}g}"
    return written.replace("-", "\N{MINUS SIGN}") if "e" not in written else written


def count(value: Any) -> str:
    """A whole number with separators."""
    figure = number(value)
    return NOTHING if figure is None else f"{figure:,.0f}"


def one_in(value: Any) -> str:
    """A small share as one in so many."""
    share = number(value)
    return NOTHING if not share else f"1 in {1.0 / share:,.0f}"


def duration(seconds: Any) -> str:
    """Seconds as a person says them."""
    figure = number(seconds)
    if figure is None:
        return NOTHING
    if figure < 120:
        return f"{figure:.3g} s"
    minutes, hours = figure / 60, figure / 3600
    return f"{minutes:.0f} min" if minutes < 120 else f"{hours:.1f} h"


def interval(low: Any, high: Any) -> str:
    """An interval of shares, empty where there is none."""
    if number(low) is None or number(high) is None:
        return ""
    return f"[{percent(low)}, {percent(high)}]"


def value_text(value: Any) -> str:
    """A parameter's value as it stands in a file."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def figure_text(name: str, value: Any) -> str:
    """A figure of any kind, a share of 1 as a percentage where its name says so."""
    rate = mapping(value)
    counted = counts_text(rate)
    if number(rate.get("value")) is not None or counted:
        told = f"{percent(rate.get('value'))} {interval(rate.get('low'), rate.get('high'))}".strip()
        return f"{told}, {counted}" if counted else told
    if number(value) is not None:
        return percent(value) if is_share(name) else decimal(value)
    return NOTHING if value is None else value_text(value)
