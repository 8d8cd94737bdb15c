"""The sections of the page: for each a title, a template, and what fills it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from nip_astra.evaluation.tables import model_label
from nip_astra.report import (
    cards,
    conversations,
    curves,
    evaluations,
    findings,
    protocol_curves,
    provenance,
    scorers,
    summary,
    task_answers,
)
from nip_astra.report.charts import whisker
from nip_astra.report.curves import RunGroup, run_label
from nip_astra.report.failure_groups import GroupedFailures, group_failures
from nip_astra.report.failure_section import failures
from nip_astra.report.labels import Labels
from nip_astra.report.protocol_runs import is_protocol_run
from nip_astra.report.protocol_sections import protocol_overview, sections_of_protocol_run
from nip_astra.report.records import RunRecord, mapping, number, text
from nip_astra.report.spec import Context, Spec
from nip_astra.report.wording import NOTHING, count, decimal, percent

MAX_REPEATED = 8
"""Probes in the list of those said most often."""
MAX_COMPARED = 12
"""Groups of runs whose parameters stand side by side."""
_SERVICE_HEADINGS = (
    *("model", "requests", "remembered", "refusals", "failures", "tokens read", "tokens said"),
    *("cost", "seconds, median", "seconds, 95 %"),
)


def sections_of_run(
    run: RunRecord, *, anchor: str, max_nodes: int, max_characters: int, has_curves: bool
) -> list[Spec]:
    """The sections about one run."""
    if is_protocol_run(run):
        specs = sections_of_protocol_run(run)
    else:
        specs = _sections_of_attack(run, anchor, max_nodes, max_characters)
    specs += [
        Spec("services", "Services", lambda: _services(run)),
        Spec("parameters", "Hyper-parameters", lambda: _parameters(run)),
        Spec("cards", "Models and scorers", lambda: cards.cards(run)),
        Spec("environment", "Environment", lambda: _environment(run)),
        Spec(
            "notes", "What could not be read", lambda: {"notes": run.notes} if run.notes else None
        ),
    ]
    return [spec for spec in specs if has_curves or spec.name != "curves"]


def _sections_of_attack(
    run: RunRecord, anchor: str, max_nodes: int, max_characters: int
) -> list[Spec]:
    """The sections about a run in which an attacker converses with a target."""
    group = RunGroup("", text(run.hyper_params.get("trainer")) or "run", 1, [run])

    @cache
    def grouped() -> GroupedFailures | None:
        return group_failures(run)

    @cache
    def tables() -> list[conversations.Table]:
        return conversations.tables_of(
            run, max_nodes=max_nodes, max_characters=max_characters, prefix=anchor
        )

    return [
        Spec("summary", "Summary", lambda: _summary(run)),
        Spec("curves", "Learning curves", lambda: _curves([group])),
        Spec("failures", "Failures", lambda: failures(run, grouped(), tables(), anchor)),
        Spec("evaluations", "Evaluations", lambda: _evaluations(run)),
        Spec("turns", "Turns to failure", lambda: _turns(run)),
        Spec("plants", "Planted failures", lambda: _plants(run)),
        Spec("diversity", "Diversity", lambda: _diversity(run, grouped())),
        Spec(
            "conversations",
            "Conversations",
            lambda: _conversations(run, grouped(), tables(), anchor),
        ),
        Spec("task_answers", "Answers", lambda: task_answers.task_answers(run)),
    ]


def sections_of_comparison(groups: Sequence[RunGroup], anchors: dict[int, str]) -> list[Spec]:
    """The sections about several runs together; `anchors` is by the id() of a run."""
    attacks, protocols = _by_kind(groups)
    specs = []
    if attacks:
        specs.append(Spec("overview", "Overview", lambda: _overview(attacks, anchors)))
    if protocols:
        title = "Interaction protocols" if attacks else "Overview"
        specs.append(Spec("protocols", title, lambda: protocol_overview(protocols, anchors)))
    return [
        *specs,
        Spec("differences", "What differs", lambda: _differences(groups)),
        Spec("curves", "Learning curves", lambda: _curves(groups)),
    ]


def _by_kind(groups: Sequence[RunGroup]) -> tuple[list[RunGroup], list[RunGroup]]:
    """The groups in which an attacker converses with a target, and those of protocols."""
    are_protocols = [is_protocol_run(group.runs[0]) for group in groups]
    kinds = list(zip(groups, are_protocols, strict=True))
    return [group for group, is_one in kinds if not is_one], [g for g, is_one in kinds if is_one]


def _summary(run: RunRecord) -> Context:
    headings, rows = summary.before_after(run)
    return {
        "sentences": summary.verdict(run),
        "warnings": _warnings(run, provenance.all_warnings(run)),
        "tiles": summary.tiles(run),
        "headings": headings,
        "rows": rows,
        "clusters": "problems" if "task" in run.hyper_params else "opening prompts",
    }


def _warnings(run: RunRecord, lines: Sequence[str]) -> list[Context]:
    """Warnings; those that quote a failing probe are blurred with the failures."""
    failing = {
        node.probe
        for nodes in run.tables.values()
        for node in nodes
        if node.probe and node.is_failure(run.threshold)
    }
    parts = [mapping(run.results.get(name)) for name in ("before", "after")]
    failing |= {text(part["most_common_probe"]) for part in parts if part.get("most_common_probe")}
    return [{"text": line, "is_failing": any(probe in line for probe in failing)} for line in lines]


def _curves(groups: Sequence[RunGroup]) -> Context:
    attacks, protocols = _by_kind(groups)
    return {
        "legend": [_legend_entry(group) for group in groups],
        "is_compared": sum(len(group.runs) for group in groups) > 1,
        "charts": [*curves.main_charts(attacks), *protocol_curves.charts_of_groups(protocols)],
        "metrics": curves.metric_rows(groups),
    }


def _legend_entry(group: RunGroup) -> Context:
    label = _group_title(group)
    if len(group.runs) > 1:
        seeds = [text(run.hyper_params.get("seed")) or run.run_id for run in group.runs]
        label += f"; thick: mean of seeds {', '.join(seeds)}; thin: each; area: lowest to highest"
    return {"label": label, "color": group.color}


def _evaluations(run: RunRecord) -> Context | None:
    if not run.evaluations:
        return None
    return {
        "names": list(run.evaluations),
        "main": evaluations.main_figures(run),
        "groups": evaluations.figures_table(run),
        "matrix": evaluations.transfer_matrix(run),
        "kinds": findings.kinds_found(run),
        "quality_headings": scorers.QUALITY_HEADINGS,
        "quality": scorers.quality_rows(run),
        "agreement_headings": scorers.AGREEMENT_HEADINGS,
        "agreement": scorers.agreement_rows(run),
    }


def _turns(run: RunRecord) -> Context | None:
    rows, chart = findings.turns_to_failure(run)
    return {"rows": rows, "chart": chart} if rows else None


def _plants(run: RunRecord) -> Context | None:
    rows, chart = findings.planted(run)
    return {"rows": rows, "chart": chart, "has_random": len(rows[0].cells) > 3} if rows else None


def _diversity(run: RunRecord, grouped: GroupedFailures | None) -> Context | None:
    reports = {
        "before": mapping(run.results.get("before")),
        "after": mapping(run.results.get("after")),
    }
    reports = {name: report for name, report in reports.items() if "distinct_share" in report}
    measured = {name: mapping(one.get("diversity")) for name, one in run.evaluations.items()}
    measured = {name: one for name, one in measured.items() if one}
    columns = [
        {"distinct among successful probes": summary.distinct_text(one)} for one in reports.values()
    ]
    columns += [dict(evaluations.figure_labels(one)) for one in measured.values()]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [
        summary.Row(label, [column.get(label, NOTHING) for column in columns]) for label in labels
    ]
    members = [one for group in grouped.groups for one in group.members] if grouped else []
    repeated = sorted(members, key=lambda member: -member.num_said)[:MAX_REPEATED]
    if not rows and not repeated:
        return None
    return {
        "headings": [*reports, *measured],
        "rows": rows,
        "repeated": [member for member in repeated if member.num_said > 1],
        "total": grouped.num_failures if grouped else 0,
        "table": grouped.table if grouped else "",
    }


def _conversations(
    run: RunRecord,
    grouped: GroupedFailures | None,
    tables: Sequence[conversations.Table],
    anchor: str,
) -> Context | None:
    scale = conversations.reward_scale(run)
    if not tables:
        return None
    labels = Labels(run, grouped)
    for table in tables:
        for episode in table.episodes:
            nodes = [turn.node for turn in episode.turns]
            episode.plants, episode.clusters = labels.of(table.name, nodes)
    return {
        "tables": tables,
        "anchor": anchor,
        "first": conversations.FIRST_EPISODES,
        "threshold": run.threshold,
        "low": scale.low,
        "high": scale.high,
        "has_rewards": scale.high > scale.low,
        "plants": labels.plants,
        "clusters": labels.clusters,
    }


def _parameters(run: RunRecord) -> Context | None:
    every = provenance.parameters(run)
    groups: dict[str, list[provenance.Parameter]] = {}
    for one in every:
        group = one.path.partition(".")[0] if "." in one.path else "experiment"
        groups.setdefault(group, []).append(one)
    if not every:
        return None
    return {
        "groups": list(groups.items()),
        "given": [one for one in every if one.is_given],
        "has_sources": bool(run.sources),
    }


def _environment(run: RunRecord) -> Context | None:
    times = provenance.times(run)
    return {
        "environment": provenance.environment(run),
        "commands": provenance.commands(run),
        "is_dirty": mapping(run.environment.get("git")).get("is_dirty") is True,
        "times": times,
        "has_target": not is_protocol_run(run) and not task_answers.is_task_run(run),
        "longest": max((seconds for _, seconds in times), default=0.0) or 1.0,
    }


def _services(run: RunRecord) -> Context | None:
    """The table of a run and its evaluations; None where no chat model was asked."""
    rows = _service_rows("the run", run.results)
    for name, evaluation in run.evaluations.items():
        rows += _service_rows(f"evaluation {name}", evaluation)
    if not rows:
        return None
    return {
        "headings": _SERVICE_HEADINGS,
        "rows": rows,
        "is_guessed": any(cells[-1] for _, cells in rows),
        "has_prices": any(cells[7] != NOTHING for _, cells in rows),
    }


def _service_rows(where: str, figures: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """A heading and the cells of each chat model, and last whether its tokens were guessed."""
    found = []
    for name, value in mapping(figures.get("services")).items():
        use = mapping(value)
        failures = mapping(use.get("failures"))
        told = ", ".join(f"{count(number(n))} {reason}" for reason, n in failures.items())
        cells = [
            model_label(text(use.get("model"))) or NOTHING,
            *(count(number(use.get(key))) for key in ("num_requests", "num_remembered")),
            count(number(use.get("num_refusals"))),
            told or "0",
            *(count(number(use.get(key))) for key in ("prompt_tokens", "completion_tokens")),
            *(decimal(number(use.get(key))) for key in ("cost", "median_seconds", "p95_seconds")),
            "guessed" if number(use.get("num_estimated")) else "",
        ]
        found.append((f"{text(name)}, {where}", cells))
    return found


def _overview(groups: Sequence[RunGroup], anchors: dict[int, str]) -> Context:
    columns = _columns(groups)
    warnings = []
    blocks = []
    for group in groups:
        rows = []
        for run in group.runs:
            label = run_label(run, group)
            rows.append(_overview_row(run, label, anchors[id(run)], group.color, columns))
            lines = [f"{label}: {line}" for line in provenance.all_warnings(run)]
            warnings += _warnings(run, lines)
        if len(group.runs) > 1:
            rows.append(_mean_row(group, columns))
        blocks.append({"legend": _group_title(group), "color": group.color, "rows": rows})
    return {"headings": list(columns), "blocks": blocks, "warnings": warnings}


_Column = tuple[str, Callable[[Mapping[str, Any]], str], str, Callable[[Any], str]]
"""Part of the results, cell of a run, and for a mean over seeds the figure and its form."""


def _share(value: Any) -> str:
    return percent(value, 0)


_OF_ATTACKS: dict[str, _Column] = {
    "before": ("before", summary.rate_text, "failure_rate", percent),
    "after": ("after", summary.rate_text, "failure_rate", percent),
    "probe NLL": ("after", lambda one: decimal(one.get("probe_nll")), "probe_nll", decimal),
    "distinct": ("after", summary.distinct_text, "distinct_share", _share),
    "plants found": ("after", summary.plants_text, "plants_found", decimal),
    "target queries": (
        "training",
        lambda one: count(one.get("target_queries")),
        "target_queries",
        decimal,
    ),
}
_OF_TASKS: dict[str, _Column] = {
    "right before": ("before", summary.accuracy_text, "accuracy", percent),
    "right after": ("after", summary.accuracy_text, "accuracy", percent),
    "mean reward": ("after", lambda one: decimal(one.get("mean_reward")), "mean_reward", decimal),
    "problems": ("after", lambda one: count(one.get("num_problems")), "num_problems", decimal),
}


def _columns(groups: Sequence[RunGroup]) -> dict[str, _Column]:
    """The columns of the kinds of runs that there are."""
    are_tasks = {task_answers.is_task_run(run) for group in groups for run in group.runs}
    return (_OF_ATTACKS if False in are_tasks else {}) | (_OF_TASKS if True in are_tasks else {})


def _group_title(group: RunGroup) -> str:
    return f"{group.name}: {group.label}" if group.name else group.label


def _overview_row(
    run: RunRecord, label: str, anchor: str, color: int, columns: Mapping[str, _Column]
) -> Context:
    return {
        "label": label,
        "anchor": anchor,
        "cells": [write(mapping(run.results.get(part))) for part, write, *_ in columns.values()],
        "whisker": summary.rate_whisker(mapping(run.results.get("after")), color),
    }


def _mean_row(group: RunGroup, columns: Mapping[str, _Column]) -> Context:
    """The means over the seeds of a group, each with its lowest and highest."""
    known = _values(group, "after", "failure_rate")
    mean = sum(known) / len(known) if known else None
    ends = (min(known), max(known)) if known else (None, None)
    return {
        "label": f"mean of {len(group.runs)}",
        "anchor": "",
        "cells": [
            _spread(_values(group, part, name), write) for part, _, name, write in columns.values()
        ],
        "whisker": whisker(mean, *ends, limit=1.0, color=group.color),
    }


def _values(group: RunGroup, part: str, name: str) -> list[float]:
    values = [number(mapping(run.results.get(part)).get(name)) for run in group.runs]
    return [value for value in values if value is not None]


def _spread(values: Sequence[float], write: Callable[[Any], str]) -> str:
    if not values:
        return NOTHING
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return write(mean) if low == high else f"{write(mean)} ({write(low)} to {write(high)})"


def _differences(groups: Sequence[RunGroup]) -> Context:
    first = [group.runs[0] for group in groups][:MAX_COMPARED]
    names = [group.name or "value" for group in groups][:MAX_COMPARED]
    rows = [row for row in curves.parameter_differences(first) if row[0] != "seed"]
    return {"names": names, "rows": rows}
