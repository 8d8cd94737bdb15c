"""Figures as plain numbers, which every tracker and file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.errors import TrackingError


def plain_numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, those of NumPy and torch as numbers of Python.

    Raises
    ------
    TrackingError
        When one is no single number, or a name is no text.
    """
    if not isinstance(figures, Mapping):
        raise TrackingError(
            f"figures to log are a {type(figures).__name__}. Give a dict of numbers by name."
        )
    return {name: _plain(name, value) for name, value in figures.items()}


def _plain(name: str, value: Any) -> Any:
    if not isinstance(name, str):
        raise TrackingError(
            f"the name of a figure is {name!r}, a {type(name).__name__}. Give a text as name."
        )
    # By its own class: a float64 of NumPy is a float, too.
    if value is None or type(value) in (bool, int, float):
        return value
    try:
        number = value.item()
    except (AttributeError, RuntimeError, ValueError):
        number = None
    if not isinstance(number, bool | int | float):
        raise TrackingError(
            f"the figure {name!r} was to be logged, but it is a {type(value).__name__}. Give one "
            "number, for instance float(value.mean())."
        )
    return number
