"""What a chart is drawn of: lines, and areas between two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """One curve; None breaks it.

    Attributes
    ----------
    color : int
        Which colour of the page's eight.
    is_thin : bool
        Whether it stands behind a mean.
    """

    label: str
    points: Sequence[Point]
    color: int = 0
    is_thin: bool = False
    is_dashed: bool = False
    has_steps: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two curves over the same places."""

    points: Sequence[tuple[float, float, float]]
    color: int = 0
