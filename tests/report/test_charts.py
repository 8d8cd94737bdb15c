"""Geometry of charts, and the learning curves of one or more runs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nip_astra.report.charts import (
    Band,
    Chart,
    Line,
    charts_of,
    group_runs,
    line_chart,
    metric_rows,
    nice_ticks,
    parameter_differences,
    run_label,
    sparkline,
    whisker,
)
from nip_astra.report.records import RunRecord, read_run
from tests.kit.messages import says
from tests.report.runs import metrics, write_run


def test_ticks_are_round_and_enclose_the_values() -> None:
    for low, high, ticks in (
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 0.04, [0.0, 0.01, 0.02, 0.03, 0.04]),
        (-1.2, 1.1, [-2.0, -1.0, 0.0, 1.0, 2.0]),
    ):
        assert nice_ticks(low, high) == pytest.approx(ticks)
    assert nice_ticks(1, 2, whole=True) == [1, 2]
    for value in (0.0, 3.0, -1e-9, 1e12):
        first, *_, last = nice_ticks(value, value)
        assert first <= value <= last != first


def chart_of(*lines: Line, **options: Any) -> Chart:
    return line_chart("a", lines, **options)


def test_larger_values_are_higher_and_later_steps_further_right() -> None:
    chart = chart_of(Line("run", [(1, 0.1), (2, 0.9)]), kind="percent")
    first, second = chart.lines[0].dots
    assert (first.x, second.x) == (chart.left, chart.right)
    assert second.y < first.y
    assert [tick.label for tick in chart.y_ticks] == ["0%", "25%", "50%", "75%", "100%"]
    assert says(chart.summary, "run", "10.0%", "90.0%")
    tiny = chart_of(Line("run", [(1, 0.0), (2, 1e-5)]))
    assert [tick.label for tick in tiny.y_ticks][-1] == "1e-05"
    # Values at the ends of lines that meet are apart, and within the chart.
    near = [Line(name, [(0, 0.0), (1, y)]) for name, y in (("a", 1.0), ("b", 0.999), ("c", 0.998))]
    low = [Line(name, [(0, 1.0), (1, 0.0)]) for name in "abc"]
    for lines in (near, low):
        chart = chart_of(*lines, kind="percent")
        places = [drawn.end.y for drawn in chart.lines if drawn.end]
        assert places == sorted(places)
        assert min(after - before for before, after in pairwise(places)) >= 12
        assert places[-1] <= chart.bottom


def noisy(num: int) -> list[tuple[float, float | None]]:
    return [(step, 1.0 + (-1.0) ** step * (1.0 - step / num)) for step in range(1, num + 1)]


def test_gaps_single_values_steps_bands_and_intervals_are_drawn() -> None:
    (drawn,) = chart_of(Line("run", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)])).lines
    assert (drawn.path.count("M"), len(drawn.dots)) == (2, 3)
    assert len(chart_of(Line("run", [(1, 0.5)], is_thin=True)).lines[0].dots) == 1
    for lines in ([], [Line("run", [(1, None)])]):
        assert line_chart("a", lines) is None
    assert sparkline([Line("run", [])]) == []
    band = Band([(1, 0.0, 4.0), (2, 1.0, 2.0)])
    chart = chart_of(Line("mean", [(1, 2.0), (2, 1.5)]), bands=[band])
    path, _ = chart.bands[0]
    assert (path[0], path[-1], chart.y_ticks[-1].label) == ("M", "Z", "4")
    chart = chart_of(Line("run", [(0, 0.0), (5, 1.0)], has_steps=True), kind="count")
    assert chart.lines[0].path == f"M{chart.left} {chart.bottom}H{chart.right}V{chart.top}"
    share = whisker(0.5, 0.25, 0.75, limit=1.0)
    assert (share.value, share.low, share.high) == (50.0, 25.0, 75.0)
    assert whisker(None, None, None, limit=1.0) is None


def test_a_long_line_is_drawn_by_means_over_its_range() -> None:
    chart = chart_of(Line("run", noisy(5000), 3), note="mean of a turn")
    (drawn,) = chart.lines
    assert drawn.path.count("L") == 119
    assert says(chart.note, "mean of a turn", "42")
    ((area, color),) = chart.bands
    assert color == 3
    heights = [float(place.split()[1]) for place in area.strip("MZ").split("L")]
    middle = [float(place.split()[1]) for place in drawn.path.strip("M").split("L")]
    assert max(middle) - min(middle) < 2.0, "noise that goes up and down is smooth"
    assert max(heights) - min(heights) > 140.0, "and its extremes are there"
    assert "0.0002" in chart.summary, "words keep the single values"
    ((path, _),) = sparkline([Line("run", noisy(5000))])
    assert path.count("L") == 59
    chart = chart_of(Line("run", noisy(200)))
    assert (chart.lines[0].path.count("L"), chart.note, chart.bands) == (199, "", [])
    # A gap stays a gap, and given bands are kept.
    points = [(x, y if x < 2000 or x > 3000 else None) for x, y in noisy(5000)]
    band = Band([(x, -1.0, 3.0) for x in range(1, 5001)])
    chart = chart_of(Line("mean", points), bands=[band])
    assert chart.lines[0].path.count("M") == 2
    assert chart.bands[0][0].count("L") < 250


# ---- learning curves


def runs(tmp_path: Path, *changes: dict[str, Any]) -> list[RunRecord]:
    return [
        read_run(write_run(tmp_path / str(number), **change))
        for number, change in enumerate(changes)
    ]


def test_runs_that_differ_in_the_seed_are_a_group(tmp_path: Path) -> None:
    other = {"parameters": {"lr": 0.1}}
    groups = group_runs(runs(tmp_path / "a", {"seed": 0}, {"seed": 1}, other))
    assert [(group.name, len(group.runs)) for group in groups] == [("A", 2), ("B", 1)]
    assert groups[0].color != groups[1].color
    assert groups[1].label == "ast_dpo · lr 0.1"
    assert [run_label(run, groups[0]) for run in groups[0].runs] == ["A, seed 0", "A, seed 1"]
    both = runs(tmp_path / "b", {}, {})
    (group,) = group_runs(both)
    assert [run_label(run, group) for run in group.runs] == ["0", "1"]
    for run in both:
        run.hyper_params = {}
    assert len(group_runs(both)) == 2
    both = runs(tmp_path / "c", {"seed": 0}, {"seed": 1, "parameters": {"beta": 0.1}})
    assert parameter_differences(both) == [("seed", ["0", "1"]), ("training.beta", ["", "0.1"])]


def test_seeds_are_overlaid_with_their_mean_and_range(tmp_path: Path) -> None:
    low = {"seed": 0, "metrics": metrics(mean_reward=1.0)}
    high = {"seed": 1, "metrics": metrics(2, mean_reward=3.0)}
    groups = group_runs(runs(tmp_path, low, high))
    (reward,) = (chart for chart in charts_of(groups) if chart.title == "Reward")
    assert [drawn.line.is_thin for drawn in reward.lines] == [True, True, False]
    # Where every seed has a value.
    assert reward.lines[2].line.points == [(1, 2.0), (2, 2.0)]
    assert len(reward.bands) == 1
    rows = {row.name: row for row in metric_rows(groups[:1])}
    assert set(rows) == {"failure_rate", "loss", "mean_reward", "time/collect_seconds"}
    assert rows["failure_rate"].first == "0.1"


def test_held_out_accuracy_has_its_interval_as_area(tmp_path: Path) -> None:
    results: dict[str, Any] = {"kind": "task", "training": {"num_iterations": 9}}
    for part, share in (("before", 0.25), ("after", 0.75)):
        results[part] = {"accuracy": share, "accuracy_interval": [share - 0.1, share + 0.1]}
    dev = [{"step": 3, "dev/accuracy": 0.5, "dev/accuracy_low": 0.3, "dev/accuracy_high": 0.6}]
    for name, rows, points in (
        ("test", metrics(3), [(0.0, 0.25), (9.0, 0.75)]),
        ("dev", [*metrics(3), *dev], [(3.0, 0.5)]),
    ):
        (run,) = runs(tmp_path / name, {"metrics": rows, "results": results})
        charts = charts_of(group_runs([run]))
        (held_out,) = (chart for chart in charts if chart.title == "Right answers, held out")
        assert list(held_out.lines[0].line.points) == points
        assert len(held_out.bands) == 1
