"""Stored evaluations side by side, planted failures, turns to failure, and judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.evaluation.outcomes import Outcome, follow_up_of
from nip_astra.evaluation.tables import TableRow, figure_rows, matrix_rows
from nip_astra.report.charts import NUM_COLORS, Chart, Line, line_chart
from nip_astra.report.records import Node, RunRecord, items, mapping, node_of, number, text, words
from nip_astra.report.summary import Row
from nip_astra.report.transcripts import split_and_iteration
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
)
from nip_astra.utils.statistics import kaplan_meier

GROUPS = (
    ("outcomes", "outcomes, turns"),
    ("scores", "scores"),
    ("nll", "likelihood of probes"),
    ("turns_to_failure", "turns to failure"),
    ("hit_at", "found within so many conversations"),
    ("diversity", "diversity"),
    ("plants", "planted failures"),
    ("probability_of_failure", "probability of failure under the reference"),
    ("fluency", "fluency"),
    ("kinds", "kinds of failure"),
    ("scorers", "by other scorers"),
    ("detectors", "scorers on labelled responses"),
    ("budget", "budget"),
)
"""Parts of evaluation.json with separate headings, in the order of the page."""
_SHOWN_ELSEWHERE = (
    *("version", "name", "clusters", "warnings", "most_likely_failure"),
    *("cards", "scorer_agreement", "why_no_fluency"),
)
_QUOTED = ("most_common", "settings")
"""Nested figures that quote a probe, or describe the others."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of failures; `medoid` and `shortest` are None if they are the most likely one."""

    size: float
    share: float | None
    plants: list[str]
    most_likely: Node
    medoid: Node | None
    shortest: Node | None
    unlikeliness: float  # of its most likely probe, in nats; 0 if unknown
    turns: set[tuple[int, int]]  # episode and depth of the members that are stored


def figures_table(run: RunRecord) -> list[tuple[str, list[Row]]]:
    """Return all figures of all evaluations in groups; a column is an evaluation."""
    evaluations = list(run.evaluations.values())
    grouped = dict(GROUPS)
    general = [
        {
            name: value
            for name, value in evaluation.items()
            if name not in grouped and name not in _SHOWN_ELSEWHERE
        }
        for evaluation in evaluations
    ]
    tables = [("", _rows(general))]
    for name, heading in GROUPS:
        parts = [
            {heading: evaluation[name]} if name in evaluation else {} for evaluation in evaluations
        ]
        rows = _rows([mapping(part.get(heading)) or part for part in parts])
        tables.append((heading, rows))
    return [(heading, rows) for heading, rows in tables if rows]


def main_figures(run: RunRecord) -> list[Row]:
    """Return the most important figures, if any evaluation has them."""
    columns = [
        {name: text(one.get(name)) for name in ("attacker", "target") if name in one}
        | dict(figure_rows(one))
        for one in run.evaluations.values()
    ]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [Row(label, [column.get(label, NOTHING) for column in columns]) for label in labels]
    return [row for row in rows if any(cell != NOTHING for cell in row.cells)]


def transfer_matrix(run: RunRecord) -> tuple[list[str], list[TableRow]] | None:
    """Return targets and rows of failure rates; None with at most one attacker and target."""
    targets, rows = matrix_rows(run.transfer or run.evaluations.values())
    return (targets, rows) if len(rows) > 1 or len(targets) > 1 else None


def clusters_of(evaluation: Mapping[str, Any]) -> list[Cluster]:
    """Return the failure clusters of an evaluation, starting with that of the most likely probe."""
    found = [mapping(one) for one in items(evaluation.get("clusters"))]
    total = sum(number(one.get("size")) or 0.0 for one in found)
    clusters = []
    for one in found:
        medoid, likely = mapping(one.get("medoid")), mapping(one.get("most_likely"))
        size = number(one.get("size")) or 0.0
        shortest = mapping(one.get("shortest"))
        has_both = bool(medoid and likely and medoid != likely)
        is_new = bool(shortest and shortest.get("probe") != (likely or medoid).get("probe"))
        clusters.append(
            Cluster(
                size,
                size / total if total else None,
                [text(plant) for plant in items(one.get("plants"))],
                node_of(likely or medoid),
                node_of(medoid) if has_both else None,
                node_of(shortest) if is_new else None,
                _unlikeliness(likely or medoid),
                {
                    (int(turn[0]), int(turn[1]))
                    for turn in items(one.get("turns"))
                    if isinstance(turn, list) and [type(part) for part in turn] == [int, int]
                },
            )
        )
    # Unknown likelihoods leave the order of the file.
    return sorted(clusters, key=lambda cluster: cluster.unlikeliness)


def _unlikeliness(row: Mapping[str, Any]) -> float:
    logprob, nll = number(row.get("reference_logprob")), number(row.get("probe_nll"))
    return -logprob if logprob is not None else nll or 0.0


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row for each figure of any column."""
    flat = [dict(figure_labels(column)) for column in columns]
    labels = dict.fromkeys(label for figures in flat for label in figures)
    return [Row(label, [figures.get(label, NOTHING) for figures in flat]) for label in labels]


def figure_labels(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return the leaves of nested figures with their labels; a rate with its interval is one."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if name in _QUOTED:
            continue
        label = f"{prefix}{str(name).replace('_', ' ')}"
        inner = mapping(value)
        if number(inner.get("value")) is not None and name != "kinds":
            found.append((label, format_figure(values, name)))
            others = {key: inner[key] for key in inner if key not in ("value", "low", "high")}
            found += figure_labels(others, f"{label}, ")
        elif inner:
            found += figure_labels(inner, f"{label}, ")
        elif isinstance(value, list | tuple):
            found.append((label, _list_text(str(name), value)))
        elif value is not None:
            found.append((label, format_value(str(name), value)))
    return found


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


# ---- scorers and judges


def by_evaluation(
    run: RunRecord, rows_of: Callable[[Mapping[str, Any]], list[TableRow]]
) -> list[tuple[str, list[TableRow]]]:
    """Return the rows of each evaluation that has any."""
    has_several = len(run.evaluations) > 1
    groups = [(name * has_several, rows_of(one)) for name, one in run.evaluations.items()]
    return [(name, rows) for name, rows in groups if rows]


def analyses(run: RunRecord) -> dict[str, Any] | None:
    """Return the table of all analyses of a run; None without any."""
    found = [one for one in run.analyses if mapping(one.get("shares"))]
    if not found:
        return None
    places = sorted({split_and_iteration(one) for one in found})
    names = dict.fromkeys(
        (text(one.get("analyser")), agent) for one in found for agent in mapping(one["shares"])
    )
    rows = []
    for name, agent in names:
        by_place = {
            split_and_iteration(one): mapping(mapping(one["shares"]).get(agent))
            for one in found
            if text(one.get("analyser")) == name
        }
        rows.append(
            {
                "analyser": words(name),
                "agent": words(agent),
                "cells": [share_text(by_place.get(place, {})) for place in places],
            }
        )
    meanings = {text(one.get("analyser")): text(one.get("meaning")) for one in found}
    judges = sorted({text(mapping(one.get("judge")).get("model")) for one in found})
    return {
        "headings": [f"{split}, iteration {number_of + 1}" for split, number_of in places],
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


# ---- planted failures and turns to failure


def planted(run: RunRecord) -> tuple[list[Row], Chart | None]:
    """Return the planted failures with the query at which training found each, and their curve."""
    training = mapping(run.results.get("training"))
    found = mapping(training.get("plants"))
    random_search = mapping(run.results.get("random_search"))
    random = mapping(random_search.get("plants"))
    stored = [mapping(plant) for plant in items(run.results.get("planted_failures"))]
    known = {text(plant.get("name")): plant for plant in stored}
    queries = {name: query for name in found if (query := number(found[name])) is not None}
    rows = []
    for name in sorted({**found, **known}, key=lambda name: queries.get(name, float("inf"))):
        plant = known.get(name, {})
        ordinary = one_in(plant.get("rarity"))
        cells = [text(plant.get("description")), ordinary, count(found.get(name))]
        rows.append(Row(name, [*cells, count(random.get(name))] if random else cells))
    num_queries = number(training.get("target_queries"))
    by_random = _discovered(random, number(random_search.get("target_queries")))
    lines = [
        Line("training", _discovered(found, num_queries), 1, has_steps=True),
        Line("random search", by_random, 0, is_dashed=True, has_steps=True),
    ]
    lines = [line for line in lines if len(line.points) > 1]
    title, note = "Planted failures found", "by target queries spent"
    return rows, line_chart(title, lines, note=note, kind="count", x_label="query")


def kinds_found(run: RunRecord) -> Chart | None:
    """Return the number of clusters of failures found by each evaluation, by target queries."""
    lines = []
    for color, (name, evaluation) in enumerate(run.evaluations.items(), start=1):
        queries = items(mapping(evaluation.get("kinds")).get("by_queries"))
        total = number(mapping(evaluation.get("budget")).get("target_queries"))
        found = {str(place): query for place, query in enumerate(queries)}
        lines.append(Line(name, _discovered(found, total), color % NUM_COLORS, has_steps=True))
    lines = [line for line in lines if len(line.points) > 1]
    note = "clusters of failing probes, by target queries"
    return line_chart("Kinds of failure met", lines, note=note, kind="count", x_label="query")


def turns_to_failure(run: RunRecord) -> tuple[list[Row], Chart | None]:
    """Return the share failing, and the share failure-free so far, by turn of held-out chains."""
    rows: list[Row] = []
    lines: list[Line] = []
    for name, table in (("after", "evaluation"), ("before", "before")):
        shares = _by_turn(run.tables.get(table, ()))
        for turn, num_nodes, score, failing, survived in shares:
            cells = [count(turn), count(num_nodes), decimal(score), percent(failing)]
            rows.append(Row(name, [*cells, percent(survived)]))
        points: list[tuple[float, float | None]] = [(0.0, 1.0)] if shares else []
        points += [(float(turn), survived) for turn, *_, survived in shares]
        is_before = name == "before"
        lines.append(Line(name, points, int(not is_before), is_dashed=is_before, has_steps=True))
    title, note = "Conversations without a failure so far", "share, by turn"
    return rows, line_chart(title, lines, note=note, kind="percent", x_label="turn")


def _discovered(
    found: Mapping[str, Any], num_queries: float | None
) -> list[tuple[float, float | None]]:
    """Return the number of plants found over queries, up to the last query."""
    queries = sorted(query for value in found.values() if (query := number(value)) is not None)
    points: list[tuple[float, float | None]] = [(0.0, 0.0)] if found else []
    points += [(query, float(place)) for place, query in enumerate(queries, start=1)]
    if num_queries is not None and points and num_queries > points[-1][0]:
        points.append((num_queries, float(len(queries))))
    return points


def _by_turn(
    nodes: Sequence[Node],
) -> list[tuple[int, int, float | None, float | None, float | None]]:
    """Return turn, responses with a verdict, mean score, share failing, share failure-free so far.

    A conversation is censored at its first turn without a verdict.
    """
    last = max((node.step for node in nodes), default=0)
    nodes = sorted((node for node in nodes if node.step == last), key=lambda node: node.depth)
    conversations: dict[tuple[int, str], list[Outcome]] = {}
    if any(node.threshold is None for node in nodes):
        return []
    for node in nodes:
        conversations.setdefault(node.conversation, []).append(node.outcome)
    survival = kaplan_meier(follow_up_of([*conversations.values()])).survival
    rows = []
    for turn, survived in enumerate(survival, start=1):
        level = [one for one in nodes if one.depth == turn - 1]
        scores = [one.response_score for one in level if one.response_score is not None]
        num_failing = sum(one.is_failure for one in level)
        mean = sum(scores) / len(scores) if scores else None
        share = num_failing / len(scores) if scores else None
        rows.append((turn, len(scores), mean, share, number(survived)))
    return rows
