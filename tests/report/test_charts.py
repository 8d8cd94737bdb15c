"""Tests of the geometry of charts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from nip_astra.report.charts import Band, Line, line_chart, nice_ticks, sparkline, whisker


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 0.04, [0.0, 0.01, 0.02, 0.03, 0.04]),
        (-1.2, 1.1, [-2.0, -1.0, 0.0, 1.0, 2.0]),
    ],
)
def test_ticks_are_round_and_enclose_what_is_shown(
    low: float, high: float, ticks: list[float]
) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-9, 1e12])
def test_equal_values_have_an_axis(value: float) -> None:
    ticks = nice_ticks(value, value)
    assert ticks[0] <= value <= ticks[-1]
    assert ticks[0] < ticks[-1]


def test_whole_numbers_have_whole_ticks() -> None:
    assert nice_ticks(1, 2, whole=True) == [1, 2]


def test_larger_values_are_higher_and_later_steps_further_right() -> None:
    chart = line_chart("a", [Line("run", [(1, 0.1), (2, 0.9)])], kind="percent")
    assert chart is not None
    first, second = chart.lines[0].dots
    assert (first.x, second.x) == (chart.left, chart.right)
    assert second.y < first.y
    assert [tick.label for tick in chart.y_ticks] == ["0%", "25%", "50%", "75%", "100%"]
    assert "run: 10.0% at iteration 1, 90.0% at 2" in chart.summary


def test_a_missing_value_breaks_the_line() -> None:
    chart = line_chart("a", [Line("run", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)])])
    assert chart is not None
    assert chart.lines[0].path.count("M") == 2
    assert len(chart.lines[0].dots) == 3


def test_one_value_is_a_dot() -> None:
    chart = line_chart("a", [Line("run", [(1, 0.5)], is_thin=True)])
    assert chart is not None
    assert len(chart.lines[0].dots) == 1


def test_no_values_give_no_chart() -> None:
    assert line_chart("a", []) is None
    assert line_chart("a", [Line("run", [(1, None)])]) is None
    assert sparkline([Line("run", [])]) == []


def test_a_band_is_closed_and_within_the_axis() -> None:
    band = Band([(1, 0.0, 4.0), (2, 1.0, 2.0)])
    chart = line_chart("a", [Line("mean", [(1, 2.0), (2, 1.5)])], bands=[band])
    assert chart is not None
    path, _ = chart.bands[0]
    assert path.startswith("M")
    assert path.endswith("Z")
    assert [tick.label for tick in chart.y_ticks][-1] == "4"


def test_a_step_line_goes_across_before_it_goes_up() -> None:
    chart = line_chart("a", [Line("run", [(0, 0.0), (5, 1.0)], has_steps=True)], kind="count")
    assert chart is not None
    assert chart.lines[0].path == f"M{chart.left} {chart.bottom}H{chart.right}V{chart.top}"


def test_an_interval_is_drawn_in_hundredths() -> None:
    drawn = whisker(0.5, 0.25, 0.75, limit=1.0)
    assert drawn is not None
    assert (drawn.value, drawn.low, drawn.high) == (50.0, 25.0, 75.0)
    assert whisker(None, None, None, limit=1.0) is None


def test_values_at_the_ends_of_lines_that_meet_stand_apart() -> None:
    lines = [Line(name, [(0, 0.0), (1, y)]) for name, y in (("a", 1.0), ("b", 0.999), ("c", 0.998))]
    chart = line_chart("rates", lines, kind="percent")
    assert chart is not None
    places = [drawn.end.y for drawn in chart.lines if drawn.end]
    assert places == sorted(places)
    assert min(after - before for before, after in pairwise(places)) >= 12
    at_the_bottom = [Line(name, [(0, 1.0), (1, 0.0)]) for name in "abc"]
    low = line_chart("rates", at_the_bottom, kind="percent")
    assert low is not None
    assert max(drawn.end.y for drawn in low.lines if drawn.end) <= low.bottom


def noisy(num: int) -> list[tuple[float, float | None]]:
    return [(step, 1.0 + (-1.0) ** step * (1.0 - step / num)) for step in range(1, num + 1)]


def test_a_long_line_is_drawn_by_means_over_the_range_that_it_went_through() -> None:
    chart = line_chart("a", [Line("run", noisy(5000), 3)], note="mean of a turn")
    assert chart is not None
    (drawn,) = chart.lines
    assert drawn.path.count("L") == 119
    assert chart.note == "mean of a turn; means of 42 iterations each, area: lowest to highest"
    ((area, color),) = chart.bands
    assert color == 3
    heights = [float(place.split()[1]) for place in area.strip("MZ").split("L")]
    middle = [float(place.split()[1]) for place in drawn.path.strip("M").split("L")]
    assert max(middle) - min(middle) < 2.0, "noise that goes up and down is smooth"
    assert max(heights) - min(heights) > 140.0, "and its extremes are there"
    assert "run: 0.0002 at iteration 1" in chart.summary, "words keep the single values"


def test_a_line_that_fits_is_drawn_whole() -> None:
    chart = line_chart("a", [Line("run", noisy(200))])
    assert chart is not None
    assert chart.lines[0].path.count("L") == 199
    assert (chart.note, chart.bands) == ("", [])


def test_several_seeds_keep_their_own_area_and_a_gap_stays_a_gap() -> None:
    gap: list[tuple[float, float | None]] = [(step, None) for step in range(2001, 3001)]
    points = [*noisy(2000), *gap, *((x + 3000, y) for x, y in noisy(2000))]
    band = Band([(x, -1.0, 3.0) for x in range(1, 5001)])
    chart = line_chart("a", [Line("mean", points)], bands=[band])
    assert chart is not None
    assert chart.lines[0].path.count("M") == 2
    ((area, _),) = chart.bands
    assert area.count("L") < 250


def test_the_course_of_a_long_metric_is_short() -> None:
    ((path, _),) = sparkline([Line("run", noisy(5000))])
    assert path.count("L") == 59
