"""Conditions under which a parameter is read.

A field that a run reads only for certain values of another parameter declares that in its type:

    loss_type: Literal["clip", "kl_penalty"] = "clip"
    kl_target: Annotated[float, where("loss_type", "kl_penalty")] = 0.01

Several conditions must all hold. A parameter that is set and not read is refused
(`nip_astra.resolving.resolution`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nip_astra.errors import show_value


@dataclass(frozen=True)
class ReadWhere:
    """A condition on another parameter.

    Attributes
    ----------
    path : str
        Its dotted path, relative to the group with the field, or else to the nearest enclosing
        group that has the path's first name.
    is_met : Callable
        Whether the field is read for a value of that parameter.
    words : str
        The condition in messages: "is true".
    """

    path: str
    is_met: Callable[[Any], bool]
    words: str


def where(path: str, *values: str | bool | None) -> ReadWhere:
    """Return a condition: another parameter has one of these values."""
    names = [value if isinstance(value, str) else show_value(value) for value in values]
    words = f"is {names[0]}" if len(names) == 1 else f"is one of {', '.join(names)}"
    return ReadWhere(path, lambda value: value in values, words)


def where_not(path: str, *values: str) -> ReadWhere:
    """Return a condition: another parameter has none of these values."""
    return ReadWhere(
        path,
        lambda value: value not in values,
        f"is neither {' nor '.join(values)}" if len(values) > 1 else f"is not {values[0]}",
    )


def where_given(path: str) -> ReadWhere:
    """Return a condition: another parameter is not null."""
    return ReadWhere(path, lambda value: value is not None, "is not null")


def where_above(path: str, bound: float) -> ReadWhere:
    """Return a condition: another parameter is greater than a number, or null."""
    return ReadWhere(
        path, lambda value: value is None or bool(value > bound), f"is above {bound:g}"
    )
