"""Planted failures and turns to failure: when the target failed, and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.evaluation.outcomes import Outcome, follow_up_of, outcome_of
from nip_astra.report.charts import Chart, line_chart
from nip_astra.report.conversations import order_of
from nip_astra.report.curves import NUM_COLORS
from nip_astra.report.lines import Line
from nip_astra.report.records import Node, RunRecord, items, mapping, number, text
from nip_astra.report.summary import Row
from nip_astra.report.wording import count, decimal, one_in, percent
from nip_astra.utils.statistics import kaplan_meier


def planted(run: RunRecord) -> tuple[list[Row], Chart | None]:
    """The planted failures with the query at which training met each, and how many over time."""
    training = mapping(run.results.get("training"))
    found = mapping(training.get("plants"))
    random_search = mapping(run.results.get("random_search"))
    random = mapping(random_search.get("plants"))
    known = {text(plant.get("name")): plant for plant in _plants_of(run)}
    rows = []
    for name in sorted(known.keys() | found.keys(), key=lambda name: _when(found.get(name))):
        plant = known.get(name, {})
        ordinary = one_in(plant.get("rarity"))
        cells = [text(plant.get("description")), ordinary, count(found.get(name))]
        rows.append(Row(name, [*cells, count(random.get(name))] if random else cells))
    num_queries = number(training.get("target_queries"))
    lines = [
        Line("training", _discovered(found, num_queries), 1, has_steps=True),
        Line(
            "random search",
            _discovered(random, number(random_search.get("target_queries"))),
            0,
            is_dashed=True,
            has_steps=True,
        ),
    ]
    lines = [line for line in lines if len(line.points) > 1]
    note = "by target queries spent"
    return rows, line_chart(
        "Planted failures found", lines, note=note, kind="count", x_label="query"
    )


def kinds_found(run: RunRecord) -> Chart | None:
    """How many clusters of failures each evaluation had met, by target queries."""
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
    """The share failing, and failed so far, at the turns of held-out chains."""
    rows: list[Row] = []
    lines: list[Line] = []
    for table in sorted(run.tables, key=order_of):
        if table not in ("before", "evaluation"):
            continue
        shares = _by_turn(run.tables[table], run.threshold)
        name = "after" if table == "evaluation" else "before"
        for turn, num_nodes, score, failing, survived in shares:
            cells = [count(turn), count(num_nodes), decimal(score), percent(failing)]
            rows.append(Row(name, [*cells, percent(survived)]))
        points: list[tuple[float, float | None]] = [(0.0, 1.0)] if shares else []
        points += [(float(turn), survived) for turn, *_, survived in shares]
        color = 1 if name == "after" else 0
        lines.append(Line(name, points, color, is_dashed=name == "before", has_steps=True))
    chart = line_chart(
        "Conversations without a failure so far",
        lines,
        note="share, by turn",
        kind="percent",
        x_label="turn",
    )
    return rows, chart


def _plants_of(run: RunRecord) -> list[dict[str, Any]]:
    return [mapping(plant) for plant in items(run.results.get("planted_failures"))]


def _when(query: Any) -> float:
    found = number(query)
    return float("inf") if found is None else found


def _discovered(
    found: Mapping[str, Any], num_queries: float | None
) -> list[tuple[float, float | None]]:
    """The number of plants found over queries, up to the last query."""
    queries = sorted(query for value in found.values() if (query := number(value)) is not None)
    points: list[tuple[float, float | None]] = [(0.0, 0.0)] if found else []
    points += [(query, float(place)) for place, query in enumerate(queries, start=1)]
    if num_queries is not None and points and num_queries > points[-1][0]:
        points.append((num_queries, float(len(queries))))
    return points


def _by_turn(
    nodes: Sequence[Node], threshold: float | None
) -> list[tuple[int, int, float | None, float | None, float | None]]:
    """Turn, responses with a verdict, mean score, share failing, share not failed so far.

    A conversation is censored at its first turn without a verdict.
    """
    last = max((node.step for node in nodes), default=0)
    nodes = sorted((node for node in nodes if node.step == last), key=lambda node: node.depth)
    conversations: dict[tuple[int, str], list[Outcome]] = {}
    if threshold is None:
        return []
    for node in nodes:
        outcome = outcome_of(node.response_score, node.is_error, threshold)
        conversations.setdefault(node.conversation, []).append(outcome)
    survival = kaplan_meier(follow_up_of([*conversations.values()])).survival
    rows = []
    for turn, survived in enumerate(survival, start=1):
        level = [one for one in nodes if one.depth == turn - 1]
        scores = [one.response_score for one in level if one.response_score is not None]
        num_failing = sum(one.is_failure(threshold) for one in level)
        mean = sum(scores) / len(scores) if scores else None
        share = num_failing / len(scores) if scores else None
        rows.append((turn, len(scores), mean, share, number(survived)))
    return rows
