"""The sections of a page, each with a title, a template and its values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rich import filesize

from nip_astra.errors import counted
from nip_astra.evaluation.outcomes import follow_up_of
from nip_astra.evaluation.tables import (
    AGREEMENT_HEADINGS,
    QUALITY_HEADINGS,
    SERVICE_HEADINGS,
    TableRow,
    agreement_rows,
    figure_rows,
    matrix_rows,
    quality_rows,
    service_rows,
)
from nip_astra.parameters.files import DEFAULT_SOURCE, OVERRIDE_SOURCE, assignment, flatten
from nip_astra.report import answers, summary, transcripts
from nip_astra.report.charts import (
    NUM_COLORS,
    Chart,
    Line,
    RunGroup,
    agent_colors,
    charts_of,
    line_chart,
    metric_rows,
    parameter_differences,
    run_label,
    whisker,
)
from nip_astra.report.failures import GroupedFailures, Labels, failures, group_failures
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    TASK,
    Node,
    RunRecord,
    items,
    mapping,
    number,
    text,
    words,
)
from nip_astra.report.transcripts import conversations_of, split_and_iteration
from nip_astra.tracking import run_directory as files
from nip_astra.trust import SETTINGS_SIGNATURE, SIGNATURE
from nip_astra.utils.formatting import (
    NOTHING,
    count,
    counts_text,
    decimal,
    format_figure,
    format_value,
    interval,
    one_in,
    percent,
    value_text,
)
from nip_astra.utils.statistics import kaplan_meier

Context = dict[str, Any]
GROUPS = {
    "outcomes": "outcomes, turns",
    "scores": "scores",
    "nll": "likelihood of probes",
    "turns_to_failure": "turns to failure",
    "hit_at": "found within so many conversations",
    "diversity": "diversity",
    "plants": "planted failures",
    "probability_of_failure": "probability of failure under the reference",
    "fluency": "fluency",
    "kinds": "kinds of failure",
    "scorers": "by other scorers",
    "detectors": "scorers on labelled responses",
    "budget": "budget",
}
"""Parts of evaluation.json with separate headings, in the order of the page."""
_SHOWN_ELSEWHERE = (
    *("version", "name", "clusters", "warnings", "most_likely_failure"),
    *("cards", "scorer_agreement", "why_no_fluency"),
)
_QUOTED = ("most_common", "settings")
"""Nested figures that quote a probe, or describe the others."""
MAX_REPEATED = 8
"""Maximum number of most frequent probes listed."""
MAX_COMPARED = 12
"""Maximum groups of runs with parameters side by side."""
MAX_WITH_BEFORE = 3
"""Maximum agents with figures before training beside those after."""
_CLUSTERS = {CONVERSATION: "opening prompts", TASK: "problems", PROTOCOL: "episodes"}
"""Units over which intervals are computed."""
_CARD_HEADINGS = ("name", "from", "licence", "parameters", "size", "sha256", "threshold")
_ROLES = ("attacker", "target")


@dataclass(frozen=True)
class Spec:
    """A section; `build` returns the values of its template, or None if it has nothing to show."""

    name: str
    title: str
    build: Callable[[], Context | None]


def sections_of_run(
    run: RunRecord, *, anchor: str = "conversations", num_runs: int = 1
) -> list[Spec]:
    """Return the sections about one of the runs of a page; those without content build None."""
    group = RunGroup("", text(run.hyper_params.get("trainer")) or "run", 1, [run])

    @cache
    def grouped() -> GroupedFailures | None:
        return group_failures(run)

    @cache
    def tables() -> list[transcripts.Table]:
        return transcripts.tables_of(run, num_runs=num_runs, prefix=anchor)

    if run.kind == PROTOCOL:
        of_kind = [
            Spec("statistics", "Figures by agent", lambda: _agent_figures(run)),
            Spec("analyses", "Rollout analyses", lambda: analyses(run)),
            Spec("answers", "Held-out episodes", lambda: _answers(run)),
            Spec("episodes", "Sample episodes", lambda: _episodes(run)),
        ]
    elif run.kind == TASK:
        of_kind = [
            Spec("answers", "Answers", lambda: _answers(run)),
            Spec("evaluations", "Evaluations", lambda: evaluations(run)),
        ]
    else:
        of_kind = [
            Spec("failures", "Failures", lambda: failures(run, grouped(), tables(), anchor)),
            Spec("evaluations", "Evaluations", lambda: evaluations(run)),
            Spec("answers", "Before and after", lambda: _answers(run)),
            Spec("turns", "Turns to failure", lambda: turns_to_failure(run)),
            Spec("plants", "Planted failures", lambda: planted(run)),
            Spec("diversity", "Diversity", lambda: _diversity(run, grouped())),
            Spec(
                *("conversations", "Conversations"),
                lambda: _conversations(run, grouped(), tables(), anchor),
            ),
        ]
    specs = [
        Spec("summary", "Summary", lambda: _summary(run)),
        Spec("curves", "Learning curves", lambda: curves([group])),
        *of_kind,
        Spec("services", "Services", lambda: _services(run)),
        Spec("parameters", "Hyper-parameters", lambda: _parameters(run)),
        Spec("cards", "Models and scorers", lambda: cards(run)),
        Spec("environment", "Environment", lambda: _environment(run)),
        Spec("notes", "Unreadable parts", lambda: {"notes": run.notes} if run.notes else None),
    ]
    # The curves of several runs are drawn together.
    return [spec for spec in specs if num_runs == 1 or spec.name != "curves"]


def sections_of_comparison(groups: Sequence[RunGroup], anchors: dict[int, str]) -> list[Spec]:
    """Return the sections about several runs together; `anchors` is by the id() of a run."""
    return [
        Spec("overview", "Overview", lambda: _overview(groups, anchors)),
        Spec("differences", "What differs", lambda: differences(groups)),
        Spec("curves", "Learning curves", lambda: curves(groups)),
    ]


# ---- summary and curves


def _summary(run: RunRecord) -> Context:
    headings, rows = summary.main_table(run)
    return {
        "sentences": summary.verdict(run),
        "warnings": _warnings(run, all_warnings(run)),
        "tiles": summary.tiles(run),
        "headings": headings,
        "rows": rows,
        "clusters": _CLUSTERS[run.kind],
    }


def all_warnings(run: RunRecord) -> list[str]:
    """Return the distinct warnings of results, evaluations and log."""
    warnings = [text(warning) for warning in items(run.results.get("warnings"))]
    of_evaluations: dict[str, list[str]] = {}
    for name, evaluation in run.evaluations.items():
        for warning in items(evaluation.get("warnings")):
            of_evaluations.setdefault(text(warning), []).append(name)
    warnings += [
        f"{'evaluation' if len(names) == 1 else 'evaluations'} {', '.join(names)}: {line}"
        for line, names in of_evaluations.items()
    ]
    listed = " ".join(warnings)
    warnings += [line for line in run.log_lines if line.partition(": ")[2] not in listed]
    return list(dict.fromkeys(warnings))


def _warnings(run: RunRecord, lines: Sequence[str]) -> list[Context]:
    """Return warnings; those that quote a failing probe are blurred with the failures."""
    failing = {
        node.probe
        for nodes in run.tables.values()
        for node in nodes
        if node.probe and node.is_failure
    }
    parts = [mapping(run.results.get(name)) for name in ("before", "after")]
    failing |= {text(part["most_common_probe"]) for part in parts if part.get("most_common_probe")}
    return [{"text": line, "is_failing": any(probe in line for probe in failing)} for line in lines]


def curves(groups: Sequence[RunGroup], *, means_only: bool = False) -> Context:
    """Return learning curves of runs; with `means_only` of the means of groups, without a table."""
    runs = [run for group in groups for run in group.runs]
    entries = [_legend_entry(group, means_only) for group in groups]
    return {
        "legend": _agents(runs[0]) if len(runs) == 1 and not means_only else entries,
        "is_compared": len(runs) > 1 or means_only or bool(runs[0].agents),
        "charts": charts_of(groups, means_only=means_only),
        "metrics": [] if means_only else metric_rows(groups),
    }


def _agents(run: RunRecord) -> list[Context]:
    colors = agent_colors(run.agents)
    return [{"label": words(name), "color": color} for name, color in colors.items()]


def _agent_figures(run: RunRecord) -> Context | None:
    rows = summary.agent_rows(run, has_before=len(run.agents) <= MAX_WITH_BEFORE)
    return {"agents": _agents(run), "rows": rows} if rows else None


def _episodes(run: RunRecord) -> Context | None:
    tables = transcripts.episode_tables(run)
    has_texts = any(episode.texts for table in tables for episode in table.episodes)
    return {"tables": tables, "agents": _agents(run), "has_texts": has_texts} if tables else None


def _answers(run: RunRecord) -> Context | None:
    groups = answers.groups_of(run)
    return (
        {
            "groups": groups,
            "badges": answers.BADGES,
            "first": answers.FIRST_ITEMS,
            "kind": run.kind,
            "wanted": answers.ATTACKED[answers.RIGHT]
            if run.kind == CONVERSATION
            else answers.WRONG,
            "has_pairs": any(group.tiles for group in groups),
        }
        if groups
        else None
    )


def _legend_entry(group: RunGroup, means_only: bool) -> Context:
    label = _group_title(group)
    if len(group.runs) > 1 and means_only:
        label += f"; mean of {len(group.runs)} seeds"
    elif len(group.runs) > 1:
        seeds = [text(run.hyper_params.get("seed")) or run.run_id for run in group.runs]
        label += f"; thick: mean of seeds {', '.join(seeds)}; thin: each; area: lowest to highest"
    return {"label": label, "color": group.color}


# ---- evaluations


def evaluations(run: RunRecord) -> Context | None:
    """Return stored evaluations side by side; a column is an evaluation. None without any."""
    stored = list(run.evaluations.values())
    if not stored:
        return None
    main = [
        {name: text(evaluation.get(name)) for name in ("attacker", "target") if name in evaluation}
        | dict(figure_rows(evaluation))
        for evaluation in stored
    ]
    targets, attackers = matrix_rows(run.transfer or stored)
    return {
        "names": list(run.evaluations),
        "main": [row for row in _side_by_side(main) if any(cell != NOTHING for cell in row.cells)],
        "groups": _all_figures(stored),
        "matrix": (targets, attackers) if len(targets) > 1 or len(attackers) > 1 else None,
        "kinds": kinds_found(run),
        "quality_headings": QUALITY_HEADINGS,
        "quality": _by_evaluation(run, quality_rows),
        "agreement_headings": AGREEMENT_HEADINGS,
        "agreement": _by_evaluation(run, agreement_rows),
    }


def _by_evaluation(
    run: RunRecord, rows_of: Callable[[Mapping[str, Any]], list[TableRow]]
) -> list[tuple[str, list[TableRow]]]:
    """Return the rows of each evaluation that has any."""
    has_several = len(run.evaluations) > 1
    groups = [
        (name * has_several, rows_of(evaluation)) for name, evaluation in run.evaluations.items()
    ]
    return [(name, rows) for name, rows in groups if rows]


def _all_figures(stored: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[summary.Row]]]:
    """Return every figure of evaluations in groups, those without a group first."""
    parts: dict[str, list[Mapping[str, Any]]] = {"": []}
    for evaluation in stored:
        hidden = (*GROUPS, *_SHOWN_ELSEWHERE)
        parts[""].append({name: value for name, value in evaluation.items() if name not in hidden})
        for name, heading in GROUPS.items():
            part = {heading: evaluation[name]} if name in evaluation else {}
            parts.setdefault(heading, []).append(mapping(part.get(heading)) or part)
    tables = [
        (heading, _side_by_side([dict(figure_labels(column)) for column in columns]))
        for heading, columns in parts.items()
    ]
    return [(heading, rows) for heading, rows in tables if rows]


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> list[summary.Row]:
    """Return a row for each label of any column."""
    labels = dict.fromkeys(label for column in columns for label in column)
    return [
        summary.Row(label, [column.get(label, NOTHING) for column in columns]) for label in labels
    ]


def figure_labels(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested figures with their labels; a rate with its interval is one."""
    labels: list[tuple[str, str]] = []
    for name, value in values.items():
        if name in _QUOTED:
            continue
        label = f"{prefix}{str(name).replace('_', ' ')}"
        inner = mapping(value)
        if number(inner.get("value")) is not None and name != "kinds":
            labels.append((label, format_figure(values, name)))
            # Such as the numbers of successes and attempts behind a rate.
            details = {key: inner[key] for key in inner if key not in ("value", "low", "high")}
            labels += figure_labels(details, f"{label}, ")
        elif inner:
            labels += figure_labels(inner, f"{label}, ")
        elif isinstance(value, list | tuple):
            labels.append((label, _list_text(str(name), value)))
        elif value is not None:
            labels.append((label, format_value(str(name), value)))
    return labels


def _list_text(name: str, values: Sequence[Any]) -> str:
    if len(values) == 2 and name.endswith("_interval"):
        return interval(values[0], values[1], name.removesuffix("_interval"))
    if name == "survival":
        return ", ".join(percent(value) for value in values)
    return ", ".join(_item_text(value) for value in values)


def _item_text(value: Any) -> str:
    if number(value) is not None:
        return decimal(value)
    if mapping(value):
        counted = counts_text(mapping(value))
        return percent(mapping(value).get("value")) + (f" ({counted})" if counted else "")
    return " / ".join(text(part) for part in items(value)) or text(value)


def planted(run: RunRecord) -> Context | None:
    """Return the planted failures with the query at which training found each, and their curve."""
    training = mapping(run.results.get("training"))
    discovered = mapping(training.get("plants"))
    random_search = mapping(run.results.get("random_search"))
    random = mapping(random_search.get("plants"))
    stored = [mapping(plant) for plant in items(run.results.get("planted_failures"))]
    plants = {text(plant.get("name")): plant for plant in stored}
    queries = {
        name: query for name in discovered if (query := number(discovered[name])) is not None
    }
    rows = []
    for name in sorted({**discovered, **plants}, key=lambda name: queries.get(name, float("inf"))):
        plant = plants.get(name, {})
        ordinary = one_in(plant.get("rarity"))
        cells = [text(plant.get("description")), ordinary, count(discovered.get(name))]
        rows.append(summary.Row(name, [*cells, count(random.get(name))] if random else cells))
    if not rows:
        return None
    by_random = _discovered(random, number(random_search.get("target_queries")))
    lines = [
        Line("training", _discovered(discovered, number(training.get("target_queries"))), 1),
        Line("random search", by_random, 0, is_dashed=True),
    ]
    chart = _chart_of_discoveries("Planted failures found", "by target queries spent", lines)
    return {"rows": rows, "chart": chart, "has_random": bool(random)}


def kinds_found(run: RunRecord) -> Chart | None:
    """Return the number of clusters of failures found by each evaluation, by target queries."""
    lines = []
    for color, (name, evaluation) in enumerate(run.evaluations.items(), start=1):
        queries = items(mapping(evaluation.get("kinds")).get("by_queries"))
        total = number(mapping(evaluation.get("budget")).get("target_queries"))
        query_by_number = {str(number_met): query for number_met, query in enumerate(queries)}
        lines.append(Line(name, _discovered(query_by_number, total), color % NUM_COLORS))
    note = "clusters of failing probes, by target queries"
    return _chart_of_discoveries("Kinds of failure met", note, lines)


def _chart_of_discoveries(title: str, note: str, lines: Sequence[Line]) -> Chart | None:
    drawn = [replace(line, has_steps=True) for line in lines if len(line.points) > 1]
    return line_chart(title, drawn, note=note, kind="count", x_label="query")


def _discovered(
    query_by_plant: Mapping[str, Any], num_queries: float | None
) -> list[tuple[float, float | None]]:
    """Return the number of plants found over queries, up to the last query."""
    queries = sorted(
        query for value in query_by_plant.values() if (query := number(value)) is not None
    )
    points: list[tuple[float, float | None]] = [(0.0, 0.0)] if query_by_plant else []
    points += [
        (query, float(num_discovered)) for num_discovered, query in enumerate(queries, start=1)
    ]
    if num_queries is not None and points and num_queries > points[-1][0]:
        points.append((num_queries, float(len(queries))))
    return points


def turns_to_failure(run: RunRecord) -> Context | None:
    """Return the share failing, and the share failure-free so far, by turn of held-out chains."""
    rows: list[summary.Row] = []
    lines: list[Line] = []
    for name, table in (("after", "evaluation"), ("before", "before")):
        shares = _by_turn(run.tables.get(table, ()))
        rows += [summary.Row(name, cells) for cells, _ in shares]
        points: list[tuple[float, float | None]] = [(0.0, 1.0)] if shares else []
        points += [(float(turn), survived) for turn, (_, survived) in enumerate(shares, start=1)]
        is_before = name == "before"
        lines.append(Line(name, points, int(not is_before), is_dashed=is_before, has_steps=True))
    if not rows:
        return None
    title, note = "Conversations without a failure so far", "share, by turn"
    chart = line_chart(title, lines, note=note, kind="percent", x_label="turn")
    return {"rows": rows, "chart": chart}


def _by_turn(nodes: Sequence[Node]) -> list[tuple[list[str], float | None]]:
    """Return the cells, and the share failure-free so far, of each turn of the last step."""
    last = max((node.step for node in nodes), default=0)
    nodes = sorted((node for node in nodes if node.step == last), key=lambda node: node.depth)
    if any(node.threshold is None for node in nodes):
        return []
    # A conversation is censored at its first turn without a verdict.
    outcomes = [
        [node.outcome for node in conversation] for conversation in conversations_of(nodes).values()
    ]
    survival = kaplan_meier(follow_up_of(outcomes)).survival
    rows = []
    for turn, survived in enumerate(map(number, survival), start=1):
        level = [node for node in nodes if node.depth == turn - 1]
        scores = [node.response_score for node in level if node.response_score is not None]
        mean = sum(scores) / len(scores) if scores else None
        failing = sum(node.is_failure for node in level) / len(scores) if scores else None
        cells = [count(turn), count(len(scores)), decimal(mean), percent(failing)]
        rows.append(([*cells, percent(survived)], survived))
    return rows


def analyses(run: RunRecord) -> dict[str, Any] | None:
    """Return the table of all analyses of a run; None without any."""
    judged = [analysis for analysis in run.analyses if mapping(analysis.get("shares"))]
    if not judged:
        return None
    samplings = sorted({split_and_iteration(analysis) for analysis in judged})
    names = dict.fromkeys(
        (text(analysis.get("analyser")), agent)
        for analysis in judged
        for agent in mapping(analysis["shares"])
    )
    rows = []
    for name, agent in names:
        by_place = {
            split_and_iteration(analysis): mapping(mapping(analysis["shares"]).get(agent))
            for analysis in judged
            if text(analysis.get("analyser")) == name
        }
        rows.append(
            {
                "analyser": words(name),
                "agent": words(agent),
                "cells": [share_text(by_place.get(sampling, {})) for sampling in samplings],
            }
        )
    meanings = {
        text(analysis.get("analyser")): text(analysis.get("meaning")) for analysis in judged
    }
    judges = sorted({text(mapping(analysis.get("judge")).get("model")) for analysis in judged})
    return {
        "headings": [f"{split}, iteration {index + 1}" for split, index in samplings],
        "rows": rows,
        "meanings": [(words(name), written) for name, written in meanings.items()],
        "judges": judges,
    }


def share_text(share: Mapping[str, Any]) -> str:
    """Format how often a judge answered yes, with the interval and counts."""
    if not share:
        return NOTHING
    num_known = (number(share.get("num_yes")) or 0) + (number(share.get("num_no")) or 0)
    written = (
        f"{percent(number(share.get('share')))} {interval(share.get('low'), share.get('high'))}"
    )
    unknown = number(share.get("num_unknown")) or 0
    return f"{written} of {count(num_known)}" + (f", {count(unknown)} unknown" if unknown else "")


def _diversity(run: RunRecord, grouped: GroupedFailures | None) -> Context | None:
    reports = {
        "before": mapping(run.results.get("before")),
        "after": mapping(run.results.get("after")),
    }
    reports = {name: report for name, report in reports.items() if "distinct_share" in report}
    measured = {
        name: mapping(evaluation.get("diversity")) for name, evaluation in run.evaluations.items()
    }
    measured = {name: diversity for name, diversity in measured.items() if diversity}
    columns = [
        {"distinct among successful probes": summary.distinct_text(report)}
        for report in reports.values()
    ]
    columns += [dict(figure_labels(diversity)) for diversity in measured.values()]
    rows = _side_by_side(columns)
    members = [failure for group in grouped.groups for failure in group.members] if grouped else []
    repeated = sorted(members, key=lambda member: -member.num_occurrences)[:MAX_REPEATED]
    if not rows and not repeated:
        return None
    return {
        "headings": [*reports, *measured],
        "rows": rows,
        "repeated": [member for member in repeated if member.num_occurrences > 1],
        "total": grouped.num_failures if grouped else 0,
        "table": grouped.table if grouped else "",
    }


def _conversations(
    run: RunRecord,
    grouped: GroupedFailures | None,
    tables: Sequence[transcripts.Table],
    anchor: str,
) -> Context | None:
    scale = transcripts.reward_scale(run)
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
        "first": transcripts.FIRST_EPISODES,
        "threshold": run.threshold,
        "low": scale.low,
        "high": scale.high,
        "has_rewards": scale.high > scale.low,
        "plants": labels.plants,
        "clusters": labels.clusters,
    }


# ---- parameters, models and environment


_GIVEN = frozenset({OVERRIDE_SOURCE, "command line", "hyper_params", "--plugin"})
"""Sources of values that the user set for a run, other than a parameter file."""


@dataclass(frozen=True)
class Parameter:
    """A hyper-parameter with its source, which is empty if unknown."""

    path: str
    value: str
    source: str

    @property
    def is_given(self) -> bool:
        """Whether the user set it, or elements of it, for this run."""
        # A list has the sources of all its elements.
        return not _GIVEN.isdisjoint(self.source.split(", "))

    @property
    def is_of_file(self) -> bool:
        """Whether it comes from a parameter file of the user."""
        layers = (source for source in self.source.split(", ") if source not in _GIVEN)
        return not all(map(_is_shipped, layers))


def parameters(run: RunRecord) -> list[Parameter]:
    """Return every hyper-parameter read by the run, with its source; all if sources are unknown."""
    return [
        Parameter(path, value_text(value), run.sources.get(path, ""))
        for path, value in flatten(run.hyper_params)
        if not run.sources or path in run.sources
    ]


def commands(run: RunRecord) -> list[tuple[str, str]]:
    """Return the commands that repeat the run, each with its requirements.

    A run of a parameter file is repeated from its directory alone.
    """
    folder = text(run.settings.get("runs_dir")) or "runs"
    file = shlex.quote(f"{folder.rstrip('/')}/{run.run_id}/{files.HYPER_PARAMETERS}")
    device = text(run.settings.get("device"))
    where = f" --device {shlex.quote(device)}" if device and device != "cpu" else ""
    repeating = [("from the run's directory", f"nip-astra --parameters {file}{where}")]
    all_parameters = parameters(run)
    if run.sources and not any(parameter.is_of_file for parameter in all_parameters):
        names = ("trainer", "scenario", "seed")
        options = [f"--{name} {shlex.quote(text(run.hyper_params.get(name)))}" for name in names]
        values = dict(flatten(run.hyper_params))
        for parameter in all_parameters:
            if parameter.source == "--plugin":
                plugins = items(run.hyper_params.get("plugins"))
                options += [f"--plugin {shlex.quote(text(plugin))}" for plugin in plugins]
            elif parameter.is_given and parameter.path not in names:
                options.append(
                    f"--set {shlex.quote(assignment(parameter.path, values[parameter.path]))}"
                )
        repeating.append(("from the project alone", f"nip-astra {' '.join(options)}{where}"))
    return repeating


def _is_shipped(source: str) -> bool:
    """Return whether a layer of parameters is found again by the trainer and the scenario."""
    is_named = source in (DEFAULT_SOURCE, "scenario.yaml")
    return is_named or source.startswith(("preset ", "base run "))


def _parameters(run: RunRecord) -> Context | None:
    all_parameters = parameters(run)
    groups: dict[str, list[Parameter]] = {}
    for parameter in all_parameters:
        group = parameter.path.partition(".")[0] if "." in parameter.path else "experiment"
        groups.setdefault(group, []).append(parameter)
    if not all_parameters:
        return None
    return {
        "groups": list(groups.items()),
        "given": [parameter for parameter in all_parameters if parameter.is_given],
        "has_sources": bool(run.sources),
    }


def cards(run: RunRecord) -> dict[str, Any] | None:
    """Return the model cards, and sentences about reproducing the numbers."""
    if run.kind == PROTOCOL:
        return None
    measured = _of_evaluations(run)
    models = measured or _of_parameters(run)
    if not models:
        return None
    return {
        "headings": _CARD_HEADINGS,
        "rows": [_cells(card) for card in models],
        "is_digested": bool(measured),
        "sentences": determinism(run),
    }


def determinism(run: RunRecord) -> list[str]:
    """Return the conditions under which the same command gives the same numbers."""
    seed = text(run.hyper_params.get("seed"))
    sentences = [f"All random numbers derive from the seed {seed} by name."] if seed else []
    threads = number(run.environment.get("num_threads"))
    device = text(run.environment.get("device")) or text(run.settings.get("device")) or "cpu"
    if device == "cpu":
        many = "" if threads is None else f" with {counted(threads, 'thread')}"
        sentences.append(
            f"It ran on a CPU{many}: the same parameters, packages, threads and kind of processor "
            "give the same numbers to the last bit, also where a run was stopped and resumed."
        )
    else:
        sentences.append(
            f"Its device was {device}: a GPU may add numbers up in another order each time, so "
            "that last digits differ, and with them words that were nearly as likely."
        )
    models = [*_of_parameters(run), *_of_evaluations(run)]
    if any((card.get("role"), card.get("kind")) == ("scorer", "judge") for card in models):
        sentences.append("A service stands behind a scorer; it may answer otherwise another time.")
    return sentences


def _of_evaluations(run: RunRecord) -> list[Mapping[str, Any]]:
    all_cards: list[Mapping[str, Any]] = []
    for evaluation in run.evaluations.values():
        for card in map(mapping, items(evaluation.get("cards"))):
            if card and card not in all_cards:
                all_cards.append(card)
    order = (*_ROLES, "scorer")
    return sorted(all_cards, key=lambda card: [text(card.get("role")) != role for role in order])


def _of_parameters(run: RunRecord) -> list[Mapping[str, Any]]:
    """Return model facts from the parameters, if no evaluation inspected the weights."""
    sections = [mapping(value) for value in run.hyper_params.values()]
    with_a_target = [section for section in sections if "target" in section and "scorer" in section]
    section = with_a_target[0] if with_a_target else {}
    all_cards: list[Mapping[str, Any]] = []
    for role in _ROLES:
        agent = mapping(section.get(role))
        model = mapping(agent.get("language_model")) or mapping(agent.get("chat_model"))
        if model:
            all_cards.append(_card(role, model))
    scorer = mapping(section.get("scorer"))
    if scorer:
        all_cards.append(_card("scorer", scorer) | {"threshold": section.get("failure_threshold")})
    return all_cards


def _card(role: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = text(parameters.get("_type"))
    origins = [parameters.get("base_url"), parameters.get("model")]
    if parameters.get("service") == "local":
        origins = [parameters.get("weights")]
    source = next(filter(None, origins), None)
    return {"role": role, "name": kind, "kind": kind, "source": source}


def _cells(card: Mapping[str, Any]) -> tuple[str, list[str]]:
    name, kind, source = (text(card.get(key)) for key in ("name", "kind", "source"))
    size = number(card.get("size_bytes"))
    cells = [
        name or NOTHING,
        ", ".join(part for part in dict.fromkeys((kind, source)) if part and part != name),
        text(card.get("licence")) or "not stated",
        count(card.get("num_parameters")),
        NOTHING if size is None else filesize.decimal(int(size)),
        text(card.get("sha256")) or NOTHING,
        decimal(card.get("threshold")),
    ]
    return text(card.get("role")), cells


def _environment(run: RunRecord) -> Context | None:
    times = summary.times(run)
    signatures = (SIGNATURE, SETTINGS_SIGNATURE)
    described = {name: value for name, value in run.environment.items() if name not in signatures}
    values = flatten({**described, "settings": run.settings})
    return {
        "environment": [
            (name, value_text(value)) for name, value in values if value not in (None, [])
        ],
        "commands": commands(run),
        "is_dirty": mapping(run.environment.get("git")).get("is_dirty") is True,
        "times": times,
        "has_target": run.kind == CONVERSATION,
        "longest": max((seconds for _, seconds in times), default=0.0) or 1.0,
    }


def _services(run: RunRecord) -> Context | None:
    """Return the usage of chat models by a run and its evaluations; None without any."""
    used = {"the run": run.results}
    used |= {f"evaluation {name}": evaluation for name, evaluation in run.evaluations.items()}
    services = {where: mapping(report.get("services")) for where, report in used.items()}
    rows = [
        (f"{label}, {where}", cells)
        for where, by_role in services.items()
        for label, cells in service_rows(by_role)
    ]
    all_uses = [mapping(use) for by_role in services.values() for use in by_role.values()]
    if not rows:
        return None
    return {
        "headings": SERVICE_HEADINGS,
        "rows": rows,
        "is_guessed": any(number(use.get("num_estimated")) for use in all_uses),
        "has_prices": any(number(use.get("cost")) is not None for use in all_uses),
    }


# ---- comparison of runs

_OVERVIEWS = {
    CONVERSATION: ("Conversations", "Conversations with a failure before and after training."),
    TASK: ("Tasks", "Right answers before and after training."),
    PROTOCOL: ("Interaction protocols", "Test episodes with the right decision."),
}
"""Title and introduction of the comparison by kind of run."""


def _overview(groups: Sequence[RunGroup], anchors: dict[int, str]) -> Context:
    tables = []
    for kind, (title, lead) in _OVERVIEWS.items():
        columns = summary.OVERVIEW[kind]
        blocks = [_block(group, anchors, columns) for group in groups if group.runs[0].kind == kind]
        if blocks:
            tables.append(
                {
                    "title": title,
                    "lead": lead,
                    "headings": [column.heading for column in columns],
                    "blocks": blocks,
                    "is_protocol": kind == PROTOCOL,
                    "clusters": _CLUSTERS[kind],
                }
            )
    warnings: list[Context] = []
    for group in groups:
        for run in group.runs:
            lines = [f"{run_label(run, group)}: {line}" for line in all_warnings(run)]
            warnings += _warnings(run, lines)
    return {"tables": tables, "warnings": warnings}


def _block(
    group: RunGroup, anchors: Mapping[int, str], columns: Sequence[summary.Column]
) -> Context:
    """Return the rows of a group of runs, and their mean."""
    rows = [
        {
            "label": run_label(run, group),
            "anchor": anchors[id(run)],
            "cells": [column.cell(mapping(run.results.get(column.part))) for column in columns],
            "whisker": summary.rate_whisker(summary.measured(run)[1], group.color),
            "protocol": summary.protocol_of(run),
            "rewards": summary.reward_texts(run),
        }
        for run in group.runs
    ]
    if len(group.runs) > 1:
        values = _values(group, columns[1])
        mean = sum(values) / len(values) if values else None
        ends = (min(values), max(values)) if values else (None, None)
        rows.append(
            {
                "label": f"mean of {len(group.runs)}",
                "anchor": "",
                "cells": [_spread(_values(group, column), column.form) for column in columns],
                "whisker": whisker(mean, *ends, limit=1.0, color=group.color),
                "protocol": "",
                "rewards": [],
            }
        )
    return {"legend": _group_title(group), "color": group.color, "rows": rows}


def _group_title(group: RunGroup) -> str:
    return f"{group.name}: {group.label}" if group.name else group.label


def _values(group: RunGroup, column: summary.Column) -> list[float]:
    reports = [mapping(run.results.get(column.part)) for run in group.runs]
    values = [number(report.get(name)) for report in reports for name in column.names]
    return [value for value in values if value is not None]


def _spread(values: Sequence[float], write: Callable[[Any], str]) -> str:
    if not values:
        return NOTHING
    mean, low, high = sum(values) / len(values), min(values), max(values)
    return write(mean) if low == high else f"{write(mean)} ({write(low)} to {write(high)})"


def differences(groups: Sequence[RunGroup]) -> Context:
    """Return the parameters in which groups of runs differ."""
    first = [group.runs[0] for group in groups][:MAX_COMPARED]
    names = [group.name or "value" for group in groups][:MAX_COMPARED]
    rows = [row for row in parameter_differences(first) if row[0] != "seed"]
    return {"names": names, "rows": rows}
