"""Draw long curves by the mean and the range of equal stretches, which a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from nip_astra.report.lines import Band, Line, Point

MAX_POINTS = 200
"""Points of a line up to which each is drawn."""
NUM_STRETCHES = 120
"""Stretches of a longer one, about one for two pixels of a chart."""


class Thinned(NamedTuple):
    """A line by the means of its stretches.

    Attributes
    ----------
    ranges : list of (x, lowest, highest)
        Of each stretch; empty where every point is drawn.
    stretch : int
        Points of a stretch; 1 where every point is drawn.
    """

    line: Line
    ranges: list[tuple[float, float, float]]
    stretch: int


def thin_line(line: Line, num_stretches: int = NUM_STRETCHES) -> Thinned:
    """Return a line's means where it has too many points; one in steps stays as it is."""
    if len(line.points) <= max(MAX_POINTS, num_stretches) or line.has_steps:
        return Thinned(line, [], 1)
    size = ceil(len(line.points) / num_stretches)
    means: list[Point] = []
    ranges = []
    for start in range(0, len(line.points), size):
        stretch = line.points[start : start + size]
        known = [y for _, y in stretch if y is not None]
        x = (stretch[0][0] + stretch[-1][0]) / 2
        means.append((x, sum(known) / len(known) if known else None))
        if known:
            ranges.append((x, min(known), max(known)))
    return Thinned(replace(line, points=means), ranges, size)


def thin_band(band: Band, num_stretches: int = NUM_STRETCHES) -> Band:
    """Return the lowest and the highest of each stretch of a band with too many places."""
    if len(band.points) <= MAX_POINTS:
        return band
    size = ceil(len(band.points) / num_stretches)
    starts = range(0, len(band.points), size)
    return replace(band, points=[_bounds(band.points[start : start + size]) for start in starts])


def _bounds(stretch: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    xs, lows, highs = zip(*stretch, strict=True)
    return (xs[0] + xs[-1]) / 2, min(lows), max(highs)
