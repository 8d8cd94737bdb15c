"""Layout of the page's charts, which templates draw as SVG, and the learning curves of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from nip_astra.parameters.files import flatten
from nip_astra.report.records import (
    TASK,
    TEST_PREFIX,
    RunRecord,
    mapping,
    number,
    words,
)
from nip_astra.tracking.local import TIMING_PREFIXES
from nip_astra.utils.formatting import count, decimal, interval_of, percent, value_text

NUM_COLORS = 8
"""Number of colours of the style sheet; 0 is for baselines, such as before training."""
WIDTH, HEIGHT = 372, 202
LEFT, RIGHT, TOP, BOTTOM = 44, 46, 10, 36
END_LABEL_HEIGHT = 13
NUM_OF_SPARKLINE = 60
"""Number of segments of a long line in a sparkline."""
MAX_DOTS = 60
"""Maximum points of a line with dots that show their values."""
MAX_POINTS = 200
"""Maximum points of a line that are all drawn."""
NUM_STRETCHES = 120
"""Number of segments of a longer line, about one per two pixels of a chart."""


Point = tuple[float, float | None]


@dataclass(frozen=True)
class Line:
    """A curve in one of the page's colours, broken at None; runs behind a mean are thin."""

    label: str
    points: Sequence[Point]
    color: int = 0
    is_thin: bool = False
    is_dashed: bool = False
    has_steps: bool = False


@dataclass(frozen=True)
class Band:
    """An area between two curves over the same x values."""

    points: Sequence[tuple[float, float, float]]
    color: int = 0


@dataclass(frozen=True)
class Tick:
    """A tick of an axis."""

    place: float
    label: str


@dataclass
class Dot:
    """A point with its hover text."""

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
    """A line chart, ready to draw; `summary` is its text alternative."""

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


def agent_colors(agents: Sequence[str]) -> dict[str, int]:
    """Return a colour for each agent; 0 and 1 are those of the whole run."""
    return {agent: 2 + index % (NUM_COLORS - 2) for index, agent in enumerate(agents)}


def thin_line(
    line: Line, num_stretches: int = NUM_STRETCHES, max_points: int = MAX_POINTS
) -> tuple[Line, list[tuple[float, float, float]], int]:
    """Reduce a line to the means of its segments if it has too many points and is not stepwise.

    Also returns the x value and the minimum and maximum of each segment, and its number of points:
    1 if every point is drawn.
    """
    if len(line.points) <= max(max_points, num_stretches) or line.has_steps:
        return line, [], 1
    means: list[Point] = []
    ranges = []
    stretches = _stretches(line.points, num_stretches)
    for stretch in stretches:
        values = [y for _, y in stretch if y is not None]
        x = (stretch[0][0] + stretch[-1][0]) / 2
        means.append((x, sum(values) / len(values) if values else None))
        if values:
            ranges.append((x, min(values), max(values)))
    return replace(line, points=means), ranges, len(stretches[0])


def _stretches(points: Sequence[Any], num: int) -> list[Sequence[Any]]:
    """Divide points into at most `num` segments, all but the last of the same size."""
    size = math.ceil(len(points) / num)
    return [points[start : start + size] for start in range(0, len(points), size)]


def _thin_band(band: Band) -> Band:
    """Reduce a band with too many points to the minimum and maximum of each segment."""
    if len(band.points) <= MAX_POINTS:
        return band
    parts = (zip(*stretch, strict=True) for stretch in _stretches(band.points, NUM_STRETCHES))
    points = [((xs[0] + xs[-1]) / 2, min(lows), max(highs)) for xs, lows, highs in parts]
    return replace(band, points=points)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    note: str = "",
    kind: str = "number",
    bands: Sequence[Band] = (),
    x_label: str = "iteration",
) -> Chart | None:
    """Lay out a line chart; None if no line has a value.

    Parameters
    ----------
    kind : str
        "percent" (from 0, at most 1), "count" (from 0) or "number".
    """
    lines = [line for line in lines if any(y is not None for _, y in line.points)]
    if not lines:
        return None
    write = {"percent": percent, "count": count}.get(kind, decimal)
    summary = _summary(title, lines, write, x_label)
    lines, ranges, stretches = zip(*map(thin_line, lines), strict=True)
    # Without bands, a line that was thinned shows its range.
    bands = [_thin_band(band) for band in bands] or [
        Band(spread, line.color)
        for line, spread in zip(lines, ranges, strict=True)
        if spread and not line.is_thin
    ]
    if max(stretches) > 1:
        thinned = f"means of {max(stretches)} {x_label}s each, area: lowest to highest"
        note = f"{note}; {thinned}" if note else thinned
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if y is not None]
    ys += [y for band in bands for _, low, high in band.points for y in (low, high)]
    low, high = min(ys), max(ys)
    if kind != "number":
        low, high = 0.0, max(high, 0.01 if kind == "percent" else 1.0)
    high = min(high, 1.0) if kind == "percent" else high
    y_marks = nice_ticks(low, high, whole=kind == "count")
    x_marks = nice_ticks(min(xs), max(xs), num=5, whole=True)
    to_x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    to_y = _scale(y_marks[0], y_marks[-1], HEIGHT - BOTTOM, TOP)
    chart = Chart(title, note, x_label, summary=summary)
    inside = [mark for mark in x_marks if min(xs) <= mark <= max(xs)]
    chart.x_ticks = [Tick(to_x(mark), count(mark)) for mark in inside]
    chart.y_ticks = [Tick(to_y(mark), _tick_label(mark, y_marks, kind)) for mark in y_marks]
    chart.bands = [(_area(band, to_x, to_y), band.color) for band in bands if band.points]
    chart.lines = [_drawn(line, to_x, to_y, write, x_label) for line in lines]
    _part_end_labels([drawn.end for drawn in chart.lines if drawn.end])
    return chart


def whisker(
    value: float | None, low: float | None, high: float | None, *, limit: float, color: int = 0
) -> Whisker | None:
    """Lay out an interval on a line from 0 to `limit`."""
    if value is None or limit <= 0:
        return None
    percentages = [
        None if bound is None else round(100.0 * bound / limit, 1) for bound in (value, low, high)
    ]
    return Whisker(percentages[0] or 0.0, percentages[1], percentages[2], color)


def sparkline(lines: Sequence[Line]) -> list[tuple[str, int]]:
    """Return paths, each with its colour, in a box of 120 by 24."""
    lines = [thin_line(line, NUM_OF_SPARKLINE)[0] for line in lines]
    points = [(x, y) for line in lines for x, y in line.points if y is not None]
    if not points:
        return []
    xs, ys = zip(*points, strict=True)
    to_x, to_y = _scale(min(xs), max(xs), 2, 118), _scale(min(ys), max(ys), 22, 2)
    return [(_path(line, to_x, to_y), line.color) for line in lines]


def nice_ticks(low: float, high: float, num: int = 4, *, whole: bool = False) -> list[float]:
    """Return about `num` round values that enclose [low, high], in steps of 1, 2, 2.5 or 5."""
    if high <= low:
        low, high = low - (abs(low) * 0.1 or 0.5), high + (abs(high) * 0.1 or 0.5)
    raw = (high - low) / num
    power = 10.0 ** math.floor(math.log10(raw))
    factors = (1, 2, 5, 10) if whole else (1, 2, 2.5, 5, 10)
    step = next(factor * power for factor in factors if factor * power >= raw * 0.999)
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [multiple * step for multiple in range(first, last + 1)]


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
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def _path(line: Line, to_x: Callable[[float], float], to_y: Callable[[float], float]) -> str:
    parts: list[str] = []
    is_started = False
    for x, y in line.points:
        if y is None:
            is_started = False
            continue
        position = f"{to_x(x):g} {to_y(y):g}"
        if not is_started:
            parts.append(f"M{position}")
        elif line.has_steps:
            parts.append(f"H{to_x(x):g}V{to_y(y):g}")
        else:
            parts.append(f"L{position}")
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
    points = [(x, y) for x, y in line.points if y is not None]
    dots = [
        Dot(to_x(x), to_y(y), f"{line.label}, {x_label} {count(x)}: {write(y)}") for x, y in points
    ]
    end = None if line.is_thin else Dot(dots[-1].x, dots[-1].y, write(points[-1][1]))
    is_dotted = (len(dots) <= MAX_DOTS and not line.is_thin) or len(dots) == 1
    return DrawnLine(_path(line, to_x, to_y), dots if is_dotted else [], line, end)


def _part_end_labels(ends: Sequence[Dot]) -> None:
    """Move the labels at the ends of lines apart, and into the chart, in the order of the lines."""
    ends = sorted(ends, key=lambda end: end.y)
    highest = HEIGHT - BOTTOM - END_LABEL_HEIGHT * (len(ends) - 1)
    lowest = float(TOP)
    for end in ends:
        end.y = max(lowest, min(end.y, highest))
        lowest, highest = end.y + END_LABEL_HEIGHT, highest + END_LABEL_HEIGHT


def _summary(title: str, lines: Iterable[Line], write: Callable[[float], str], x_label: str) -> str:
    parts = []
    for line in lines:
        points = [(x, y) for x, y in line.points if y is not None]
        (first_x, first), (last_x, last) = points[0], points[-1]
        parts.append(
            f"{line.label}: {write(first)} at {x_label} {count(first_x)}, "
            f"{write(last)} at {count(last_x)}"
        )
    return f"{title}. {'; '.join(parts)}"


class Curve(NamedTuple):
    """A metric with a chart: the first of the space-separated names that a run has.

    `{}` in a name stands for an agent. The metric `beside` is drawn thin and dashed. A curve with
    `kinds` applies only to such runs.
    """

    metrics: str
    title: str
    note: str
    kind: str = "number"
    beside: str = ""
    beside_label: str = ""
    x_label: str = "iteration"
    kinds: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the metric, in order of preference."""
        return self.metrics.split()


HELD_OUT = "held_out/"
"""Prefix of figures on test data before and after training."""
ENDS = ("_low", "_high")
"""Suffixes of a metric's interval."""
_share = partial(Curve, kind="percent")
CURVES = (
    _share(
        "dev/accuracy held_out/accuracy",
        "Right answers, held out",
        "share, dev problems, or test problems before and after",
        kinds=(TASK,),
    ),
    _share("failure_rate", "Failing responses", "share, training prompts"),
    _share("episode_failure_rate", "Episodes with a failure", "share, training prompts"),
    _share(
        "dev/failure_rate held_out/failure_rate",
        "Episodes with a failure, held out",
        "share, dev prompts, or test prompts before and after",
    ),
    _share("mean_accuracy accuracy", "Right decisions", "share of training episodes"),
    _share(
        "test_mean_accuracy test_accuracy held_out/mean_accuracy", "Right decisions, test", "share"
    ),
    _share("worst_datapoint_accuracy", "Worst datapoint", "its share of right decisions"),
    _share("share_undecided", "Undecided episodes", "share whose rounds ran out"),
    Curve("mean_episode_length", "Episode length", "rounds, mean"),
    Curve("mean_reward", "Reward", "mean of a turn"),
    Curve("rollout/reward_mean", "Reward of trajectories", "mean, training problems"),
    Curve("rollout/response_tokens_mean", "Length of answers", "tokens, mean"),
    Curve("probe_length", "Length of probes", "tokens, mean"),
    Curve("{}/mean_message_words", "Length of messages", "words, mean"),
    Curve("rollout/entropy entropy", "Entropy", "nats per token, of samples"),
    Curve(
        "kl/reference rollout/kl opd/reverse_kl",
        "KL from the reference",
        "or teacher; nats per token",
    ),
    Curve("kl", "KL", "of the loss, nats"),
    Curve("approx_kl", "KL of the updates", "from the policy that sampled, nats per token"),
    _share("clip_fraction", "Clip fraction", "share of tokens or moves"),
    Curve("grad_norm", "Gradient norm", "before clipping"),
    _share("grpo/zero_variance_fraction", "Groups of equal rewards", "share of the groups"),
    _share("rollout/truncated_fraction", "Answers cut off", "share"),
    Curve("preference_margin", "Preference margin", "chosen less rejected, mean"),
    _share("preference_accuracy", "Preferences met", "share of pairs"),
    Curve("mean_score", "Score of responses", "mean of a turn"),
    Curve("probe_nll", "Unlikeliness of probes", "NLL, nats per token"),
    _share("distinct_share", "Distinct successful probes", "share of successful ones"),
    Curve("plants_found", "Planted failures found", "so far", "count"),
    Curve("loss", "Loss", "mean of the iteration's steps"),
    Curve("{}/mean_episode_reward", "Reward of an episode", "mean"),
    _share("{}/mean_message_entropy", "Entropy of messages", "share of the greatest possible"),
    _share("{}/mean_decision_entropy", "Entropy of decisions", "share of the greatest possible"),
    Curve(
        "{}/residual_critic_variance",
        "Residual variance of critics",
        "as a share of the variance of the targets",
    ),
    _share(
        "message_regression/{}",
        "Label predicted from the first message",
        "accuracy",
        beside="message_regression/{}_baseline",
        beside_label="without the message",
    ),
    _share(
        "{}/held_out_accuracy",
        "Right without a conversation",
        "share, data held out of training",
        beside="{}/train_accuracy",
        beside_label="training data",
        x_label="epoch",
    ),
    Curve(
        "{}/held_out_loss",
        "Loss without a conversation",
        "cross entropy in nats, data held out of training",
        beside="{}/train_loss",
        beside_label="training data",
        x_label="epoch",
    ),
)
"""The metrics with charts, of all families; other metrics are in a table."""
_NOT_COMPARED = ("seed", "package_version", "plugins")


@dataclass
class RunGroup:
    """Runs whose parameters differ only in the seed."""

    name: str  # a letter; empty for a single group
    label: str  # its difference from the other groups
    color: int
    runs: list[RunRecord] = field(default_factory=list)


class MetricRow(NamedTuple):
    """A metric in the table of all metrics; figures are those of the first run."""

    name: str
    paths: list[tuple[str, int]]
    first: str
    last: str
    low: str
    high: str


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by their parameters without the seed, in the order given."""
    keys = []
    for run in runs:
        compared = {
            name: value for name, value in run.hyper_params.items() if name not in _NOT_COMPARED
        }
        # A run without readable parameters is like no other.
        keys.append(json.dumps(compared, sort_keys=True, default=str) if compared else run.run_id)
    distinct = list(dict.fromkeys(keys))
    groups: dict[str, RunGroup] = {}
    for run, key in zip(runs, keys, strict=True):
        if key not in groups:
            name = letter(len(groups)) if len(distinct) > 1 else ""
            label = _group_label(run, runs if len(distinct) > 1 else [run])
            groups[key] = RunGroup(name, label, 1 + len(groups) % (NUM_COLORS - 1))
        groups[key].runs.append(run)
    return list(groups.values())


def run_label(run: RunRecord, group: RunGroup) -> str:
    """Return a short name of a run: its group and seed, and its id if these are ambiguous."""
    seeds = [member.hyper_params.get("seed") for member in group.runs]
    seed = run.hyper_params.get("seed")
    name = run.run_id if seed is None or seeds.count(seed) > 1 else f"seed {seed}"
    return f"{group.name}, {name}" if group.name else name


def parameter_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return the parameters in which runs differ, with their values in every run."""
    flat = [dict(flatten(run.hyper_params)) for run in runs]
    paths = dict.fromkeys(path for values in flat for path in values)
    rows = [
        (path, [value_text(values[path]) if path in values else "" for values in flat])
        for path in paths
    ]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def charts_of(groups: Sequence[RunGroup], *, means_only: bool = False) -> list[Chart]:
    """Return the charts of the `CURVES` that runs have.

    A single run has a line for each agent in a chart, several runs a chart for each agent. With
    `means_only`, a group has its mean and an area for its runs.
    """
    runs = [run for group in groups for run in group.runs]
    agents = list(dict.fromkeys(agent for run in runs for agent in run.agents))
    charts: list[Chart | None] = []
    for curve in CURVES:
        if "{}" not in curve.names[0]:
            drawn = (_chart(curve, name, curve.title, groups, means_only) for name in curve.names)
            charts.append(next((chart for chart in drawn if chart is not None), None))
        elif len(runs) == 1:
            charts.append(_chart_of_agents(curve, runs[0]))
        else:
            for agent in agents:
                title = f"{curve.title}, {agent.replace('_', ' ')}"
                name = curve.names[0].format(agent)
                charts.append(_chart(curve, name, title, groups, means_only))
    return [chart for chart in charts if chart is not None]


def _chart(
    curve: Curve, name: str, title: str, groups: Sequence[RunGroup], means_only: bool
) -> Chart | None:
    lines = [list(lines_of(group, name)) for group in groups]
    if curve.kinds and not any(run.kind in curve.kinds for group in groups for run in group.runs):
        return None
    # The test at the end is one point, which the summary shows.
    is_test = name.startswith((TEST_PREFIX, HELD_OUT))
    if is_test and all(len(line.points) < 2 for lines_of_group in lines for line in lines_of_group):
        return None
    bands = [Band(band, group.color) for group in groups if (band := band_of(group, name))]
    interval = _interval_of(groups, name)
    note = f"{curve.note}; area: lowest to highest seed" if means_only and bands else curve.note
    if interval:
        bands, note = [Band(interval, groups[0].color)], f"{note}; area: 95 % interval"
    drawn = [
        line
        for lines_of_group in lines
        for line in (lines_of_group[-1:] if means_only else lines_of_group)
    ]
    return line_chart(title, drawn, note=note, kind=curve.kind, bands=bands, x_label=curve.x_label)


def _interval_of(groups: Sequence[RunGroup], name: str) -> list[tuple[float, float, float]]:
    """Return the 95 % interval of a metric of a single run; empty if it has none."""
    runs = [run for group in groups for run in group.runs]
    if len(runs) > 1:
        return []
    lows, highs = (dict(points_of(runs[0], f"{name}{end}")) for end in ENDS)
    ends = ((x, lows[x], highs.get(x)) for x in lows)
    return [(x, low, high) for x, low, high in ends if low is not None and high is not None]


def _chart_of_agents(curve: Curve, run: RunRecord) -> Chart | None:
    lines = []
    for agent, color in agent_colors(run.agents).items():
        label = words(agent)
        if curve.beside:
            points = points_of(run, curve.beside.format(agent))
            beside = f"{label}, {curve.beside_label}"
            lines.append(Line(beside, points, color, is_thin=True, is_dashed=True))
        lines.append(Line(label, points_of(run, curve.names[0].format(agent)), color))
    note = f"{curve.note}; dashed: {curve.beside_label}" if curve.beside else curve.note
    return line_chart(curve.title, lines, note=note, kind=curve.kind, x_label=curve.x_label)


def metric_rows(groups: Sequence[RunGroup]) -> list[MetricRow]:
    """Return every metric and timing by name, including those of the charts."""
    runs = [run for group in groups for run in group.runs]
    names = {name for run in runs for name in (*run.metrics, *run.timings)}
    rows = []
    for name in sorted(names):
        values = [y for _, y in points_of(runs[0], name) if y is not None]
        lines = [
            Line("", points_of(run, name), group.color) for group in groups for run in group.runs
        ]
        paths = sparkline(lines)
        if paths:
            ends = (values[0], values[-1], min(values), max(values)) if values else (None,) * 4
            rows.append(MetricRow(name, paths, *(decimal(end) for end in ends)))
    return rows


def points_of(run: RunRecord, name: str) -> list[tuple[float, float | None]]:
    """Return a metric or timing by step; `HELD_OUT` ones have two points, from `results.json`."""
    if not name.startswith(HELD_OUT):
        return (run.timings if name.startswith(TIMING_PREFIXES) else run.metrics).points(name)
    name = name.removeprefix(HELD_OUT)
    last = number(mapping(run.results.get("training")).get("num_iterations"))
    points: list[Point] = []
    for step, part in ((0.0, "before"), (last or 1.0, "after")):
        report = mapping(run.results.get(part))
        stem = name.removesuffix("_low").removesuffix("_high")
        ends = dict(zip(ENDS, interval_of(report, stem), strict=True))
        value = number(report.get(name)) if stem == name else ends[name.removeprefix(stem)]
        points += [] if value is None else [(step, value)]
    return points


def lines_of(group: RunGroup, name: str) -> Iterator[Line]:
    """Yield a line for each run of a group, and their mean."""
    is_overlaid = len(group.runs) > 1
    for run in group.runs:
        label = run_label(run, group)
        yield Line(label, points_of(run, name), group.color, is_thin=is_overlaid)
    if is_overlaid:
        means = [(x, sum(values) / len(values)) for x, values in _shared(group, name)]
        yield Line(f"{group.name} mean of {len(group.runs)}".strip(), means, group.color)


def band_of(group: RunGroup, name: str) -> list[tuple[float, float, float]]:
    """Return the minimum and maximum of a group by step; empty for a single run."""
    if len(group.runs) < 2:
        return []
    return [(x, min(values), max(values)) for x, values in _shared(group, name)]


def _shared(group: RunGroup, name: str) -> list[tuple[float, list[float]]]:
    """Return the steps at which every run of a group has a value, with the values."""
    value_by_step = [{x: y for x, y in points_of(run, name) if y is not None} for run in group.runs]
    steps = sorted(set(value_by_step[0]).intersection(*value_by_step[1:]))
    return [(step, [values[step] for values in value_by_step]) for step in steps]


def letter(index: int) -> str:
    """Return the name of a group or arm: A to Z, then a number."""
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _group_label(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    """Return a run's trainer and its differences from others of it, or if none, from all."""
    trainer = run.hyper_params.get("trainer")
    alike = [candidate for candidate in runs if candidate.hyper_params.get("trainer") == trainer]
    differing: list[str] = []
    for compared in (alike, runs):
        paths = [path for path, _ in parameter_differences(compared) if path != "seed"]
        differing = differing or paths
    values: Mapping[str, Any] = dict(flatten(mapping(run.hyper_params)))
    to_show = [path for path in differing if path in values and path != "trainer"]
    # More than two differences do not fit a legend; the table of parameters has them all.
    parts = [f"{path.rpartition('.')[2]} {value_text(values[path])[:24]}" for path in to_show[:2]]
    return " · ".join([str(trainer or run.run_id), *parts])
