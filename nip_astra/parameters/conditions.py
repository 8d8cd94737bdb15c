"""Under which condition a parameter is read.

A field that a run reads only where another parameter has a certain value says so beside its type:

    loss_type: Literal["clip", "kl_penalty"] = "clip"
    kl_target: Annotated[float, where("loss_type", "kl_penalty")] = 0.01

Several conditions must all hold. Whoever gives such a parameter in vain is told
(`nip_astra.resolving.unread_parameters`).
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
        Its dotted path, from the group that has the field, or else from the nearest group around
        that which knows the path's first name.
    is_met : Callable
        Says of its value whether the field is read.
    words : str
        What the value must be, for messages: "is true".
    """

    path: str
    is_met: Callable[[Any], bool]
    words: str


def where(path: str, *values: str | bool | None) -> ReadWhere:
    """Read where another parameter has one of these values."""
    names = [value if isinstance(value, str) else show_value(value) for value in values]
    words = f"is {names[0]}" if len(names) == 1 else f"is one of {', '.join(names)}"
    return ReadWhere(path, lambda value: value in values, words)


def where_given(path: str) -> ReadWhere:
    """Read where another parameter is not null."""
    return ReadWhere(path, lambda value: value is not None, "is not null")


def where_above(path: str, bound: float) -> ReadWhere:
    """Read where another parameter is greater than a number, or null, if it may be."""
    return ReadWhere(
        path, lambda value: value is None or bool(value > bound), f"is above {bound:g}"
    )
