"""Learning curves of runs whose agents play an interaction protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nip_astra.report.charts import Chart, line_chart
from nip_astra.report.curves import RunGroup, band_of, lines_of, points_of
from nip_astra.report.lines import Band, Line
from nip_astra.report.protocol_runs import REGRESSION, TEST_PREFIX, agents_of, colors_of
from nip_astra.report.records import RunRecord

OVERALL = (
    (("mean_accuracy", "accuracy"), "Right decisions", "share of training episodes", "percent"),
    (("test_mean_accuracy", "test_accuracy"), "Right decisions, test", "share", "percent"),
    (("worst_datapoint_accuracy",), "Worst datapoint", "its share of right decisions", "percent"),
    (("share_undecided",), "Undecided episodes", "share whose rounds ran out", "percent"),
    (("mean_episode_length",), "Episode length", "rounds, mean", "number"),
)
"""Metrics, of which the first that is there is drawn, with title, note and kind of the chart."""


class AgentCurve(NamedTuple):
    """A metric of each agent, whose name stands for {} in it.

    Attributes
    ----------
    beside : str
        Metric that is drawn thin and dashed beside it, and what that is; empty for none.
    """

    metric: str
    title: str
    note: str
    kind: str
    beside: str = ""
    beside_label: str = ""
    x_label: str = "iteration"


BY_AGENT = (
    AgentCurve("{}/mean_episode_reward", "Reward of an episode", "mean", "number"),
    AgentCurve(
        "{}/mean_message_entropy",
        "Entropy of messages",
        "share of the greatest possible",
        "percent",
    ),
    AgentCurve(
        "{}/mean_decision_entropy",
        "Entropy of decisions",
        "share of the greatest possible",
        "percent",
    ),
    AgentCurve(
        "{}/residual_critic_variance",
        "What critics do not foresee",
        "variance left, as a share of the targets'",
        "number",
    ),
    AgentCurve(
        REGRESSION + "/{}",
        "Label read off the first message",
        "accuracy",
        "percent",
        REGRESSION + "/{}_baseline",
        "guessing without it",
    ),
    AgentCurve(
        "{}/held_out_accuracy",
        "Right without a conversation",
        "share, data held out of training",
        "percent",
        "{}/train_accuracy",
        "training data",
        "epoch",
    ),
    AgentCurve(
        "{}/held_out_loss",
        "Loss without a conversation",
        "cross entropy in nats, data held out of training",
        "number",
        "{}/train_loss",
        "training data",
        "epoch",
    ),
)


def charts_of_run(run: RunRecord) -> list[Chart]:
    """The charts of one run, with a line for each agent where a metric is an agent's."""
    group = RunGroup("", "run", 1, [run])
    return [*_overall([group]), *_of_agents(run)]


def charts_of_groups(groups: Sequence[RunGroup]) -> list[Chart]:
    """The charts of several runs, one for each metric of each agent."""
    charts = _overall(groups)
    agents = dict.fromkeys(
        name for group in groups for run in group.runs for name in agents_of(run)
    )
    for curve in BY_AGENT:
        for agent in agents:
            name = curve.metric.format(agent)
            chart = line_chart(
                f"{curve.title}, {agent.replace('_', ' ')}",
                [line for group in groups for line in lines_of(group, name)],
                note=curve.note,
                kind=curve.kind,
                bands=[
                    Band(band, group.color) for group in groups if (band := band_of(group, name))
                ],
                x_label=curve.x_label,
            )
            if chart is not None:
                charts.append(chart)
    return charts


def _overall(groups: Sequence[RunGroup]) -> list[Chart]:
    charts = []
    for names, title, note, kind in OVERALL:
        for name in names:
            lines = [line for group in groups for line in lines_of(group, name)]
            bands = [Band(band, group.color) for group in groups if (band := band_of(group, name))]
            # The test at the end is one point, which the summary shows.
            is_curve = any(len(line.points) > 1 for line in lines)
            chart = line_chart(title, lines, note=note, kind=kind, bands=bands)
            if chart is not None and (is_curve or not name.startswith(TEST_PREFIX)):
                charts.append(chart)
                break
    return charts


def _of_agents(run: RunRecord) -> list[Chart]:
    colors = colors_of(agents_of(run))
    charts = []
    for curve in BY_AGENT:
        lines = []
        for agent, color in colors.items():
            label = agent.replace("_", " ")
            if curve.beside:
                points = points_of(run, curve.beside.format(agent))
                beside = f"{label}, {curve.beside_label}"
                lines.append(Line(beside, points, color, is_thin=True, is_dashed=True))
            lines.append(Line(label, points_of(run, curve.metric.format(agent)), color))
        note = f"{curve.note}; dashed: {curve.beside_label}" if curve.beside else curve.note
        chart = line_chart(curve.title, lines, note=note, kind=curve.kind, x_label=curve.x_label)
        if chart is not None:
            charts.append(chart)
    return charts
