"""Learning curves; runs that differ only in their seed share a colour."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nip_astra.parameters.files import flatten
from nip_astra.report.charts import (
    NUM_COLORS,
    Band,
    Chart,
    Line,
    agent_colors,
    line_chart,
    sparkline,
)
from nip_astra.report.records import REGRESSION, TEST_PREFIX, RunRecord, mapping, number
from nip_astra.tracking.local import TIMING_PREFIXES
from nip_astra.utils.formatting import decimal, value_text


class Curve(NamedTuple):
    """A metric that has a chart of its own.

    Attributes
    ----------
    names : tuple[str, ...]
        Names of the metric, of which the first that a run has counts; `{}` stands for an agent.
    kind : str
        As in `line_chart`.
    beside : str
        Metric that is drawn thin and dashed beside it, labelled `beside_label`; empty for none.
    """

    names: tuple[str, ...]
    title: str
    note: str
    kind: str = "number"
    beside: str = ""
    beside_label: str = ""
    x_label: str = "iteration"


CURVES = (
    Curve(("failure_rate",), "Failing responses", "share, training prompts", "percent"),
    Curve(
        ("episode_failure_rate",), "Episodes with a failure", "share, training prompts", "percent"
    ),
    Curve(("dev/failure_rate",), "Episodes with a failure, dev", "share, dev prompts", "percent"),
    Curve(
        *(("mean_accuracy", "accuracy"), "Right decisions", "share of training episodes"),
        "percent",
    ),
    Curve(("test_mean_accuracy", "test_accuracy"), "Right decisions, test", "share", "percent"),
    Curve(
        *(("worst_datapoint_accuracy",), "Worst datapoint", "its share of right decisions"),
        "percent",
    ),
    Curve(("share_undecided",), "Undecided episodes", "share whose rounds ran out", "percent"),
    Curve(("mean_episode_length",), "Episode length", "rounds, mean"),
    Curve(("mean_reward",), "Reward", "mean of a turn"),
    Curve(("rollout/reward_mean",), "Reward of trajectories", "mean, training problems"),
    Curve(("dev/accuracy",), "Right answers, dev", "share, dev problems", "percent"),
    Curve(("mean_score",), "Score of responses", "mean of a turn"),
    Curve(("probe_nll",), "Unlikeliness of probes", "NLL, nats per token"),
    Curve(("distinct_share",), "Distinct successful probes", "share of successful ones", "percent"),
    Curve(("plants_found",), "Planted failures found", "so far", "count"),
    Curve(("loss",), "Loss", "mean of the iteration's steps"),
    Curve(("{}/mean_episode_reward",), "Reward of an episode", "mean"),
    Curve(
        *(("{}/mean_message_entropy",), "Entropy of messages", "share of the greatest possible"),
        "percent",
    ),
    Curve(
        *(("{}/mean_decision_entropy",), "Entropy of decisions", "share of the greatest possible"),
        "percent",
    ),
    Curve(
        *(("{}/residual_critic_variance",), "Residual variance of critics"),
        "as a share of the variance of the targets",
    ),
    Curve(
        *((f"{REGRESSION}/{{}}",), "Label predicted from the first message", "accuracy", "percent"),
        *(f"{REGRESSION}/{{}}_baseline", "without the message"),
    ),
    Curve(
        *(("{}/held_out_accuracy",), "Right without a conversation"),
        *("share, data held out of training", "percent", "{}/train_accuracy", "training data"),
        "epoch",
    ),
    Curve(
        *(("{}/held_out_loss",), "Loss without a conversation"),
        *("cross entropy in nats, data held out of training", "number", "{}/train_loss"),
        *("training data", "epoch"),
    ),
)
"""The metrics with charts, of all families; the other metrics stand in a table."""
_NOT_COMPARED = ("seed", "package_version", "plugins")


@dataclass
class RunGroup:
    """Runs whose parameters differ in the seed only.

    Attributes
    ----------
    name : str
        A letter, empty where there is one group only.
    label : str
        What sets the group apart from the others.
    color : int
        Its colour.
    """

    name: str
    label: str
    color: int
    runs: list[RunRecord] = field(default_factory=list)


@dataclass(frozen=True)
class MetricRow:
    """A metric of the table of all metrics; figures are those of the first run."""

    name: str
    paths: list[tuple[str, int]]
    first: str
    last: str
    low: str
    high: str


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by their parameters without the seed, in the order given."""
    keys = [_identity(run) for run in runs]
    distinct = list(dict.fromkeys(keys))
    groups: dict[str, RunGroup] = {}
    for run, key in zip(runs, keys, strict=True):
        if key not in groups:
            name = _letter(len(groups)) if len(distinct) > 1 else ""
            label = _group_label(run, _differing(run, runs) if len(distinct) > 1 else [])
            groups[key] = RunGroup(name, label, 1 + len(groups) % (NUM_COLORS - 1))
        groups[key].runs.append(run)
    return list(groups.values())


def run_label(run: RunRecord, group: RunGroup) -> str:
    """A short name of a run: its group and seed, and its id where these say too little."""
    seeds = [member.hyper_params.get("seed") for member in group.runs]
    seed = run.hyper_params.get("seed")
    own = run.run_id if seed is None or seeds.count(seed) > 1 else f"seed {seed}"
    return f"{group.name}, {own}" if group.name else own


def parameter_differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """The parameters in which runs differ, each with its value in every run."""
    flat = [dict(flatten(run.hyper_params)) for run in runs]
    paths = dict.fromkeys(path for values in flat for path in values)
    rows = [
        (path, [value_text(values[path]) if path in values else "" for values in flat])
        for path in paths
    ]
    return [(path, values) for path, values in rows if len(set(values)) > 1]


def charts_of(groups: Sequence[RunGroup], *, means_only: bool = False) -> list[Chart]:
    """Return the charts of the `CURVES` that runs have.

    A single run has a line for each agent in a chart, several runs a chart for each agent.

    Parameters
    ----------
    means_only : bool
        Whether a group has its mean alone, with an area for its runs.
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
    # The test at the end is one point, which the summary shows.
    if name.startswith(TEST_PREFIX) and all(len(one.points) < 2 for own in lines for one in own):
        return None
    bands = [Band(band, group.color) for group in groups if (band := band_of(group, name))]
    note = f"{curve.note}; area: lowest to highest seed" if means_only and bands else curve.note
    shown = [line for own in lines for line in (own[-1:] if means_only else own)]
    return line_chart(title, shown, note=note, kind=curve.kind, bands=bands, x_label=curve.x_label)


def _chart_of_agents(curve: Curve, run: RunRecord) -> Chart | None:
    lines = []
    for agent, color in agent_colors(run.agents).items():
        label = agent.replace("_", " ")
        if curve.beside:
            points = points_of(run, curve.beside.format(agent))
            beside = f"{label}, {curve.beside_label}"
            lines.append(Line(beside, points, color, is_thin=True, is_dashed=True))
        lines.append(Line(label, points_of(run, curve.names[0].format(agent)), color))
    note = f"{curve.note}; dashed: {curve.beside_label}" if curve.beside else curve.note
    return line_chart(curve.title, lines, note=note, kind=curve.kind, x_label=curve.x_label)


def metric_rows(groups: Sequence[RunGroup]) -> list[MetricRow]:
    """Every metric and timing by name, also those of the charts."""
    runs = [run for group in groups for run in group.runs]
    names = {name for run in runs for row in (*run.metrics, *run.timings) for name in row}
    rows = []
    for name in sorted(names - {"step"}):
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
    """A metric or timing of a run by step."""
    rows = run.timings if name.startswith(TIMING_PREFIXES) else run.metrics
    points = [(number(row.get("step")), number(row[name])) for row in rows if name in row]
    return [(step, value) for step, value in points if step is not None]


def lines_of(group: RunGroup, name: str) -> Iterator[Line]:
    """A line for each run of a group, and their mean."""
    is_overlaid = len(group.runs) > 1
    for run in group.runs:
        label = run_label(run, group)
        yield Line(label, points_of(run, name), group.color, is_thin=is_overlaid)
    if is_overlaid:
        means = [(x, sum(values) / len(values)) for x, values in _shared(group, name)]
        yield Line(f"{group.name} mean of {len(group.runs)}".strip(), means, group.color)


def band_of(group: RunGroup, name: str) -> list[tuple[float, float, float]]:
    """The lowest and the highest of a group by step; empty for a single run."""
    if len(group.runs) < 2:
        return []
    return [(x, min(values), max(values)) for x, values in _shared(group, name)]


def _shared(group: RunGroup, name: str) -> list[tuple[float, list[float]]]:
    """The steps at which every run of a group has a value, with the values."""
    known = [{x: y for x, y in points_of(run, name) if y is not None} for run in group.runs]
    steps = sorted(set(known[0]).intersection(*known[1:]))
    return [(step, [values[step] for values in known]) for step in steps]


def _identity(run: RunRecord) -> str:
    kept = {name: item for name, item in run.hyper_params.items() if name not in _NOT_COMPARED}
    # A run without readable parameters is like no other.
    return json.dumps(kept, sort_keys=True, default=str) if kept else run.run_id


def _differing(run: RunRecord, runs: Sequence[RunRecord]) -> list[str]:
    """What sets a run apart from others of its trainer, and where none does, from all."""
    trainer = run.hyper_params.get("trainer")
    alike = [other for other in runs if other.hyper_params.get("trainer") == trainer]
    found = [
        [path for path, _ in parameter_differences(some) if path != "seed"]
        for some in (alike, runs)
    ]
    return found[0] or found[1]


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)


def _group_label(run: RunRecord, differing: Sequence[str]) -> str:
    trainer = str(run.hyper_params.get("trainer") or run.run_id)
    values: Mapping[str, Any] = dict(flatten(mapping(run.hyper_params)))
    own = [path for path in differing if path in values and path != "trainer"]
    # More than two differences do not fit a legend; the table of parameters has them all.
    parts = [f"{path.rpartition('.')[2]} {value_text(values[path])[:24]}" for path in own[:2]]
    return " · ".join([trainer, *parts])
