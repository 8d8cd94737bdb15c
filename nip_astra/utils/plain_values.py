"""Values of a JSON file that anybody may have written, as what they should be, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: Any) -> float | None:
    """A finite number as float, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def mapping(value: Any) -> dict[str, Any]:
    """A mapping with text keys, empty for anything else."""
    if not isinstance(value, Mapping):
        return {}
    return {str(key): item for key, item in value.items()}


def items(value: Any) -> list[Any]:
    """A list, empty for anything else."""
    return list(value) if isinstance(value, list | tuple) else []


def text(value: Any) -> str:
    """A text, empty for null."""
    return "" if value is None else str(value)
