"""Geometry of the page's charts; the templates draw it as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nip_astra.utils.formatting import count, decimal, percent

NUM_COLORS = 8
"""Colours of the style sheet; 0 is for what is compared with, such as before training."""
WIDTH, HEIGHT = 372, 202
LEFT, RIGHT, TOP, BOTTOM = 44, 46, 10, 36
END_LABEL_HEIGHT = 13
NUM_OF_SPARKLINE = 60
"""Stretches of a long line in a sparkline."""
MAX_DOTS = 60
"""Points of a line that get a dot with their value; lines with more have none."""
MAX_POINTS = 200
"""Points of a line up to which each is drawn."""
NUM_STRETCHES = 120
"""Stretches of a longer line, about one for two pixels of a chart."""


Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """One curve in one of the page's colours; None breaks it, and one behind a mean is thin."""

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


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    place: float
    label: str


@dataclass
class Dot:
    """A point with the text that is shown on hovering."""

    x: float
    y: float
    label: str


@dataclass
class DrawnLine:
    """A line as SVG path, with its dots and the value at its end."""

    path: str
    dots: list[Dot]
    line: Line
    end: Dot | None


@dataclass
class Chart:
    """A line chart, ready to draw.

    Attributes
    ----------
    summary : str
        What it shows in words, for those who do not see it.
    """

    title: str
    note: str
    x_label: str
    summary: str = ""
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    bands: list[tuple[str, int]] = field(default_factory=list)
    lines: list[DrawnLine] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True)
class Whisker:
    """A share with its interval on a line from 0 to `limit`, in hundredths of the width."""

    value: float
    low: float | None
    high: float | None
    color: int


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


def agent_colors(agents: Sequence[str]) -> dict[str, int]:
    """Return a colour for each agent; 0 and 1 are those of the whole run."""
    return {agent: 2 + place % (NUM_COLORS - 2) for place, agent in enumerate(agents)}


def thin_line(line: Line, num_stretches: int = NUM_STRETCHES) -> Thinned:
    """Return a line's means where it has too many points; one in steps stays as it is."""
    if len(line.points) <= max(MAX_POINTS, num_stretches) or line.has_steps:
        return Thinned(line, [], 1)
    size = math.ceil(len(line.points) / num_stretches)
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
    size = math.ceil(len(band.points) / num_stretches)
    starts = range(0, len(band.points), size)
    return replace(band, points=[_bounds(band.points[start : start + size]) for start in starts])


def _bounds(stretch: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    xs, lows, highs = zip(*stretch, strict=True)
    return (xs[0] + xs[-1]) / 2, min(lows), max(highs)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    note: str = "",
    kind: str = "number",
    bands: Sequence[Band] = (),
    x_label: str = "iteration",
) -> Chart | None:
    """Lay out a line chart; None where no line has a value.

    Parameters
    ----------
    kind : str
        "percent" (from 0, at most 1), "count" (from 0) or "number".
    """
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    if not lines:
        return None
    summary = _summary(title, lines, _writer(kind), x_label)
    thinned = [thin_line(line) for line in lines]
    lines, bands = [one.line for one in thinned], _bands(thinned, bands)
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if y is not None]
    ys += [y for band in bands for _, low, high in band.points for y in (low, high)]
    y_marks = nice_ticks(*_limits(ys, kind), whole=kind == "count")
    x_marks = nice_ticks(min(xs), max(xs), num=5, whole=True)
    to_x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    to_y = _scale(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP)
    write = _writer(kind)
    chart = Chart(title, _note(note, thinned, x_label), x_label, summary=summary)
    inside = [mark for mark in x_marks if min(xs) <= mark <= max(xs)]
    chart.x_ticks = [Tick(to_x(mark), count(mark)) for mark in inside]
    chart.y_ticks = [Tick(to_y(mark), _tick_label(mark, y_marks, kind)) for mark in y_marks]
    chart.bands = [(_area(band, to_x, to_y), band.color) for band in bands if band.points]
    chart.lines = [_drawn(line, to_x, to_y, write, x_label) for line in lines]
    _part_end_labels([drawn.end for drawn in chart.lines if drawn.end])
    return chart


def _writer(kind: str) -> Callable[[float], str]:
    return {"percent": percent, "count": count}.get(kind, decimal)


def _bands(thinned: Sequence[Thinned], bands: Sequence[Band]) -> list[Band]:
    """Return the bands given; without any, the range of each line that was thinned."""
    if bands:
        return [thin_band(band) for band in bands]
    return [
        Band(one.ranges, one.line.color) for one in thinned if one.ranges and not one.line.is_thin
    ]


def _note(note: str, thinned: Sequence[Thinned], x_label: str) -> str:
    """Say in a chart's note what was drawn in place of single points."""
    stretch = max(one.stretch for one in thinned)
    if stretch == 1:
        return note
    written = f"means of {stretch} {x_label}s each, area: lowest to highest"
    return f"{note}; {written}" if note else written


def whisker(
    value: float | None, low: float | None, high: float | None, *, limit: float, color: int = 0
) -> Whisker | None:
    """Lay out an interval on a line from 0 to `limit`."""
    if value is None or limit <= 0:
        return None
    places = [None if one is None else _round(100.0 * one / limit) for one in (value, low, high)]
    return Whisker(places[0] or 0.0, places[1], places[2], color)


def sparkline(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Paths, each with its colour, in a box of 120 by 24."""
    lines = [thin_line(line, NUM_OF_SPARKLINE).line for line in lines]
    points = [(x, y) for line in lines for x, y in line.points if y is not None]
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    to_x, to_y = _scale(min(xs), max(xs), 2, 118), _scale(min(ys), max(ys), 22, 2)
    return [(_path(line, to_x, to_y), line.color) for line in lines]


def nice_ticks(low: float, high: float, num: int = 4, *, whole: bool = False) -> list[float]:
    """About `num` round places that enclose [low, high], in steps of 1, 2, 2.5 or 5."""
    if high <= low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def _limits(ys: Sequence[float], kind: str) -> tuple[float, float]:
    if kind == "number":
        return min(ys), max(ys)
    top = max(max(ys), 0.01 if kind == "percent" else 1.0)
    return 0.0, min(top, 1.0) if kind == "percent" else top


def _tick_label(mark: float, marks: Sequence[float], kind: str) -> str:
    step = marks[1] - marks[0]
    if kind == "percent":
        return percent(mark, 0 if round(step, 9) == round(step, 2) else 1)
    if kind == "count":
        return count(mark)
    if abs(step) >= 1e5 or abs(step) < 1e-4:
        return f"{mark:.2g}"
    digits = next(digits for digits in range(6) if round(step, digits) == round(step, 9))
    written = f"{mark:,.{digits}f}"
    return written.replace("-", "\N{MINUS SIGN}") if float(mark) != 0.0 else f"{0:.{digits}f}"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    if high <= low:
        return lambda _: (start + end) / 2
    return lambda value: _round(start + (value - low) / (high - low) * (end - start))


def _round(value: float) -> float:
    return round(value, 1)


def _path(line: Line, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    parts: list[str] = []
    is_started = False
    for x, y in line.points:
        if y is None:
            is_started = False
            continue
        place = f"{to_x(x):g} {to_y(y):g}"
        if not is_started:
            parts.append(f"M{place}")
        elif line.has_steps:
            parts.append(f"H{to_x(x):g}V{to_y(y):g}")
        else:
            parts.append(f"L{place}")
        is_started = True
    return "".join(parts)


def _area(band: Band, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    upper = [f"{to_x(x):g} {to_y(high):g}" for x, _, high in band.points]
    lower = [f"{to_x(x):g} {to_y(low):g}" for x, low, _ in reversed(band.points)]
    return "M" + "L".join([*upper, *lower]) + "Z"


def _drawn(
    line: Line,
    to_x: Callable[[float], float],
    to_y: Callable[[float], float],
    write: Callable[[float], str],
    x_label: str,
) -> DrawnLine:
    known = [(x, y) for x, y in line.points if y is not None]
    dots = [
        Dot(to_x(x), to_y(y), f"{line.label}, {x_label} {count(x)}: {write(y)}") for x, y in known
    ]
    end = None if line.is_thin else Dot(dots[-1].x, dots[-1].y, write(known[-1][1]))
    is_dotted = (len(dots) <= MAX_DOTS and not line.is_thin) or len(dots) == 1
    return DrawnLine(_path(line, to_x, to_y), dots if is_dotted else [], line, end)


def _part_end_labels(ends: Sequence[Dot]) -> None:
    """Move the values at the ends of lines apart, and into the chart, in the order of the lines."""
    ends = sorted(ends, key=lambda end: end.y)
    highest = HEIGHT - BOTTOM - END_LABEL_HEIGHT * (len(ends) - 1)
    lowest = float(TOP)
    for end in ends:
        end.y = max(lowest, min(end.y, highest))
        lowest, highest = end.y + END_LABEL_HEIGHT, highest + END_LABEL_HEIGHT


def _summary(title: str, lines: Iterable[Line], write: Callable[[float], str], x_label: str) -> str:
    parts = []
    for line in lines:
        known = [(x, y) for x, y in line.points if y is not None]
        (first_x, first), (last_x, last) = known[0], known[-1]
        parts.append(
            f"{line.label}: {write(first)} at {x_label} {count(first_x)}, "
            f"{write(last)} at {count(last_x)}"
        )
    return f"{title}. {'; '.join(parts)}"
