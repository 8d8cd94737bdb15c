"""Results of a run as objects, pandas frames and plots, for notebooks and scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from rich.text import Text

from nip_astra.errors import UnknownNameError, counted
from nip_astra.evaluation.storage import Row, read_rows
from nip_astra.evaluation.tables import Shown, as_text, plain_table
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.lazy import import_extra
from nip_astra.tracking.figure_names import current_figure_name
from nip_astra.tracking.run_directory import FAILED, RESULTS, RunDirectory
from nip_astra.tracking.tracker import INTERVAL, METRICS_FILE, TIMINGS_FILE, flat_figures
from nip_astra.utils.formatting import counts_text, format_figure, number

if TYPE_CHECKING:
    import pandas as pd

MEASUREMENTS = ("before", "after", "random_search")
"""Parts of results.json that hold figures, in order."""
PLOTS_PER_ROW = 3
Status: TypeAlias = Literal["finished", "failed", "unfinished"]


class Figure(NamedTuple):
    """A measured number of a run.

    Attributes
    ----------
    when : str
        "before" or "after" training, or "random_search".
    name : str
        As in results.json: `failure_rate`, or `verifier/mean_value` of an agent.
    low, high : float or None
        Ends of its interval; None if it has none.
    counts : str
        Of a share: "3 of 10"; empty if they are not stored.
    """

    when: str
    name: str
    value: float
    low: float | None = None
    high: float | None = None
    counts: str = ""


@dataclass(frozen=True)
class RunResults(Shown):
    """Results, metrics and tables of a run. Prints its figures, also in a notebook.

    Attributes
    ----------
    results : dict
        The content of results.json; empty if the run has not ended.
    metrics, timings : list[dict]
        Rows of metrics.jsonl and timings.jsonl, each with its `step`.
    """

    path: Path
    results: dict[str, Any] = field(repr=False)
    metrics: list[Row] = field(repr=False)
    timings: list[Row] = field(repr=False)

    @property
    def status(self) -> Status:
        """Status of the run; the reason of a failure is under `error` in `results`."""
        return status_of(self.results)

    def __str__(self) -> str:
        """Return the figures of each measurement, side by side."""
        reports = {when: self.results.get(when) or {} for when in MEASUREMENTS}
        shown = {when: report for when, report in reports.items() if report}
        heading = f"{self.path.name}, {self.status}, {counted(len(self.metrics), 'row')} of metrics"
        table = plain_table(heading, "", *shown)
        for name in dict.fromkeys(one.name for one in self.figures):
            cells = (format_figure(report, name) for report in shown.values())
            table.add_row(Text(name), *cells)
        return as_text([table])

    def plot(self, *names: str) -> Any:
        """Plot metrics by iteration with matplotlib; without names, those of the report.

        Raises
        ------
        MissingDependencyError
            When matplotlib is not installed.
        UnknownNameError
            When no such metric exists.
        """
        return plot_curves((*self.metrics, *self.timings), names)

    @property
    def figures(self) -> list[Figure]:
        """Return all numbers measured before and after training, and by random search."""
        return [
            figure
            for when in MEASUREMENTS
            for figure in _figures(when, self.results.get(when) or {})
        ]

    def figure(self, name: str, when: str = "after") -> Figure:
        """Return one of the figures.

        Raises
        ------
        UnknownNameError
            When no such figure exists.
        """
        name = current_figure_name(name)
        of_that_time = {one.name: one for one in self.figures if one.when == when}
        if name not in of_that_time:
            advice = f"They are under {when!r} in {self.path / RESULTS}."
            raise UnknownNameError("figure", name, of_that_time, advice)
        return of_that_time[name]

    @property
    def tables(self) -> list[str]:
        """Return names of tables of conversations, `rollouts/<name>` or `evaluations/<name>`."""
        rollouts = (f"rollouts/{file.stem}" for file in self.path.glob("rollouts/*.jsonl"))
        evaluated = self.path.glob("evaluations/*/rows.jsonl")
        return sorted([*rollouts, *(f"evaluations/{file.parent.name}" for file in evaluated)])

    def conversations(self, table: str) -> list[Row]:
        """Return the rows of one of the `tables`.

        Raises
        ------
        UnknownNameError
            When no such table exists.
        """
        if table not in self.tables:
            raise UnknownNameError("table", table, self.tables, f"They are in {self.path}.")
        file = f"{table}.jsonl" if table.startswith("rollouts/") else f"{table}/rows.jsonl"
        return read_rows(self.path / file)

    def figures_frame(self) -> pd.DataFrame:
        """Return the figures, one per row: `when`, `name`, `value`, `low`, `high`, `counts`."""
        return frame_of(self.figures, Figure._fields)

    def metrics_frame(self) -> pd.DataFrame:
        """Return metrics and timings by `step`, one column per name; NaN where missing."""
        by_step: dict[Any, Row] = {}
        for row in (*self.metrics, *self.timings):
            by_step.setdefault(row["step"], {}).update(row)
        rows = [by_step[step] for step in sorted(by_step)]
        return frame_of(rows or [{"step": None}]).set_index("step").iloc[: len(rows)]

    def conversations_frame(self, table: str) -> pd.DataFrame:
        """Return the rows of one of the `tables`; groups in a row become columns `a.b`."""
        return frame_of(self.conversations(table))


def read_results(run: str | Path, runs_dir: str | Path | None = None) -> RunResults:
    """Read the results of a run, which may be unfinished.

    Parameters
    ----------
    run : str or Path
        The run directory, or its name in `runs_dir`.
    runs_dir : str or Path, optional
        In place of the setting's default.

    Raises
    ------
    RunDirectoryError
        When it is not a run, or its results are broken.
    DataError
        When rows are broken.
    """
    directory = RunDirectory.find(run, runs_dir or ExperimentSettings().runs_dir)
    return RunResults(
        directory.path,
        results_of(directory),
        read_rows(directory.path / METRICS_FILE),
        read_rows(directory.path / TIMINGS_FILE),
    )


def status_of(results: Mapping[str, Any]) -> Status:
    """Return the status of a run from the content of results.json, empty without the file."""
    if results.get("status") == FAILED:
        return "failed"
    return "finished" if results else "unfinished"


def results_of(directory: RunDirectory) -> dict[str, Any]:
    """Return the content of results.json; empty if the run has not ended."""
    has_ended = (directory.path / RESULTS).is_file()
    return directory.read_json(RESULTS) if has_ended else {}


def _figures(when: str, report: Mapping[str, Any]) -> Iterable[Figure]:
    for name, value in flat_figures(report).items():
        if name in report:
            low, high = report.get(f"{name}{INTERVAL}") or (None, None)
            yield Figure(when, name, float(value), low, high, counts_text(report, name))


def frame_of(rows: Sequence[Any], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return rows as a pandas frame; without `columns`, groups in a row become columns `a.b`.

    Raises
    ------
    MissingDependencyError
        When pandas is not installed.
    """
    pandas = import_extra("pandas", "a frame", "pandas")
    frame: pd.DataFrame = (
        pandas.json_normalize(rows) if columns is None else pandas.DataFrame(rows, columns=columns)
    )
    return frame


# ---- plots with matplotlib


class Estimate(NamedTuple):
    """A figure and the ends of its interval, None without one."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None


def plot_curves(rows: Iterable[Mapping[str, Any]], names: Sequence[str] = ()) -> Any:
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
        for name in map(current_figure_name, names):
            charts[name] = _matching(name, series)
            if not charts[name]:
                raise UnknownNameError("metric", name, series, "Names are those of metrics.jsonl.")
    else:
        for curve in CURVES:
            matching = (_matching(name, series) for name in curve.names)
            charts[curve.title] = next(filter(None, matching), {})
        charts = {title: own for title, own in charts.items() if own}
    width = min(PLOTS_PER_ROW, max(len(charts), 1))
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


def estimates_of(values: Mapping[str, Any], prefix: str = "") -> list[Estimate]:
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
