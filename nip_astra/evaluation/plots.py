"""Plots of runs, evaluations and comparisons with matplotlib, for notebooks and scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nip_astra.errors import UnknownNameError
from nip_astra.lazy import import_extra
from nip_astra.utils.formatting import number

Row = Mapping[str, Any]
COLUMNS = 3
"""Charts per row."""


class Estimate(NamedTuple):
    """A figure and the ends of its interval, None without one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def plot_curves(rows: Iterable[Row], names: Sequence[str] = ()) -> Any:
    """Plot each given metric in its own chart; without `names`, the metrics of a report.

    Parameters
    ----------
    rows : iterable of mappings
        Each with its `step`. `<name>_low` and `<name>_high` are drawn as the interval of a metric.
    names : sequence of str
        Names of metrics; `{}` stands for every agent.

    Raises
    ------
    UnknownNameError
        When no row has a metric of that name.
    """
    from nip_astra.report.charts import CURVES, ENDS

    pyplot = import_extra("matplotlib.pyplot", "a plot", "plot")
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(name, []).append((row["step"], value))
    charts: dict[str, dict[str, str]] = {}
    if names:
        for name in names:
            charts[name] = _matching(name, series)
            if not charts[name]:
                raise UnknownNameError("metric", name, series, "Names are those of metrics.jsonl.")
    else:
        for curve in CURVES:
            matching = (_matching(name, series) for name in curve.names)
            charts[curve.title] = next(filter(None, matching), {})
        charts = {title: own for title, own in charts.items() if own}
    width = min(COLUMNS, max(len(charts), 1))
    height = -(-len(charts) // width) or 1
    figure, grid = pyplot.subplots(
        height, width, squeeze=False, figsize=(4.2 * width, 2.8 * height), layout="constrained"
    )
    for axes in grid.flat[len(charts) :]:
        axes.set_visible(False)
    for axes, (title, found) in zip(grid.flat, charts.items(), strict=False):
        for name, label in found.items():
            axes.plot(*zip(*series[name], strict=True), label=label)
            low, high = (dict(series.get(f"{name}{end}", ())) for end in ENDS)
            shared = sorted(low.keys() & high.keys())
            if shared:
                ends = ([low[x] for x in shared], [high[x] for x in shared])
                axes.fill_between(shared, *ends, alpha=0.2, linewidth=0)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration")
        if len(found) > 1:
            axes.legend(fontsize=8)
    # A notebook shows a returned figure once, and not again as the current one.
    pyplot.close(figure)
    return figure


def plot_estimates(estimates: Sequence[Estimate], title: str, *, zero: bool = False) -> Any:
    """Plot a point and an interval for each estimate; `zero` marks no difference."""
    pyplot = import_extra("matplotlib.pyplot", "a plot", "plot")
    size = (6.0, 1.2 + 0.32 * len(estimates))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    for place, one in enumerate(estimates):
        if one.low is not None and one.high is not None:
            axes.plot([one.low, one.high], [place, place], color="tab:blue", alpha=0.5, linewidth=4)
        axes.plot([one.value], [place], "o", color="tab:blue")
    if zero:
        axes.axvline(0.0, color="grey", linewidth=1)
    axes.set_yticks(range(len(estimates)), [one.label for one in estimates])
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10)
    pyplot.close(figure)
    return figure


def estimates_of(values: Row, prefix: str = "") -> list[Estimate]:
    """Return figures with an interval from nested values, such as an evaluation's `values`."""
    found = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            point, low, high = (number(value.get(key)) for key in ("value", "low", "high"))
            if point is not None and low is not None and high is not None:
                found.append(Estimate(f"{prefix}{name}", point, low, high))
            else:
                found += estimates_of(value, f"{prefix}{name}.")
    return found


def _matching(name: str, series: Iterable[str]) -> dict[str, str]:
    """Return the metrics that match a name, each with the text that replaces `{}`."""
    pattern = re.compile(re.escape(name).replace(r"\{\}", "([^/]+)"))
    found = ((one, pattern.fullmatch(one)) for one in series)
    return {one: match[1] if match.groups() else one for one, match in found if match}
