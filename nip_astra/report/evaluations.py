"""Put evaluations beside one another: one column each, one row a figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nip_astra.evaluation.measured import Replies
from nip_astra.evaluation.tables import counts_text
from nip_astra.report.records import Node, RunRecord, items, mapping, node_of, number, text
from nip_astra.report.scorers import kinds_text
from nip_astra.report.summary import Row
from nip_astra.report.wording import NOTHING, count, decimal, figure_text, interval, percent

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
"""Parts of evaluation.json that have a heading of their own, in the order of the page."""
MAIN = (
    ("attacker", "attacker"),
    ("target", "target"),
    ("conversations with a failure", "failure_rate"),
    ("turns with a failure", "turn_failure_rate"),
    ("by turn", "per_turn_failure_rate"),
    ("without a failure through turn 1, 2, …", "turns_to_failure.survival"),
    ("median turn of the first failure", "turns_to_failure.median"),
    ("mean score of responses", "scores.response.mean"),
    ("mean score of probes", "scores.probe.mean"),
    ("probe NLL under the reference, nats per token", "nll.reference"),
    ("probe NLL under the target, nats per token", "nll.target"),
    ("less likely than ordinary probes' 1st percentile", "fluency.share_below"),
    ("distinct among successful probes", "diversity.distinct_share"),
    ("1 - self-BLEU", "diversity.self_bleu_complement"),
    ("1 - mean cosine", "diversity.cosine_distance"),
    ("Vendi score", "diversity.vendi"),
    ("clusters of failing probes", "num_clusters"),
    ("share of planted failures found", "plants.recall"),
    ("ordinary conversation fails, Monte Carlo", "probability_of_failure.monte_carlo"),
    ("  importance sampling", "probability_of_failure.importance_sampling"),
    ("target queries", "budget.target_queries"),
    ("right answers", "figures.accuracy"),
    ("mean reward", "figures.mean_reward"),
)
"""Label and path of the figures that are in view."""
_COUNTS = {
    "distinct_share": ("num_distinct", "num_probes"),
    "self_bleu_complement": ("", "self_bleu_num_probes"),
    "cosine_distance": ("", "num_probes"),
    "vendi": ("", "num_probes"),
    "share_below": ("num_below", "num_probes"),
    "recall": ("found", "total"),
    "accuracy": ("num_right", "num_answers"),
}
"""For figures that stand beside their counts: how many of how many they are."""
_SHOWN_ELSEWHERE = (
    *("version", "name", "clusters", "warnings", "most_likely_failure"),
    *("cards", "scorer_agreement", "why_no_fluency"),
)
_QUOTED = ("most_common", "settings")
"""Figures within a group that quote a probe, or say how the others were made."""


@dataclass(frozen=True)
class Matrix:
    """Failure rates, attackers by targets."""

    targets: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Cluster:
    """A cluster of failures; `medoid` and `shortest` are None where they are the most likely one.

    `unlikeliness` is that of its most likely probe, in nats, 0 where it is not known. `turns` are
    episode and depth of its members, as far as the evaluation says them.
    """

    size: float
    share: float | None
    plants: list[str]
    most_likely: Node
    medoid: Node | None
    shortest: Node | None
    unlikeliness: float
    turns: set[tuple[int, int]] = field(default_factory=set)


def figures_table(run: RunRecord) -> list[tuple[str, list[Row]]]:
    """All figures of all evaluations in groups; a column is an evaluation."""
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
    """The figures that matter most, those that some evaluation has."""
    evaluations = run.evaluations.values()
    outcomes = [_outcomes(mapping(one.get("outcomes"))) for one in evaluations]
    rows = [Row("turns: failure / none / undetermined / error", outcomes)]
    for label, path in MAIN:
        cells = [_main_text(path, evaluation) for evaluation in evaluations]
        rows.append(Row(label, cells))
        if path == "num_clusters":
            cells = [kinds_text(evaluation) for evaluation in evaluations]
            rows.append(Row("  at least, those not seen included", cells))
    replies = [str(Replies.read(mapping(one.get("replies")))) or NOTHING for one in evaluations]
    rows = [*rows[1:5], rows[0], Row("replies: empty / refused", replies), *rows[5:]]
    return [row for row in rows if any(cell != NOTHING for cell in row.cells)]


def _outcomes(counts: Mapping[str, Any]) -> str:
    names = ("failure", "none", "undetermined", "error")
    return " / ".join(decimal(counts.get(name)) for name in names) if counts else NOTHING


def _main_text(path: str, evaluation: Mapping[str, Any]) -> str:
    *groups, name = path.split(".")
    inside = dict(evaluation)
    for group in groups:
        inside = mapping(inside.get(group))
    value = inside.get(name)
    if mapping(value).get("is_refused") is True:
        return f"refused: {text(mapping(value).get('reason'))}"
    if isinstance(value, list):
        return _list_text(name, value)
    bounds = inside.get(f"{name}_interval")
    if isinstance(bounds, list):
        write = decimal if "reward" in name else percent
        told = f"{write(value)} {_list_text(f'{name}_interval', bounds)}"
        return told + _counts_beside(inside, name)
    size = number(mapping(value).get("effective_sample_size"))
    told = figure_text(name, value) + ("" if value is None else _counts_beside(inside, name))
    return told if size is None else f"{told}, effective sample size {decimal(size)}"


def _counts_beside(inside: Mapping[str, Any], name: str) -> str:
    """What follows a figure: `, 3 of 13`; empty where it is not stored."""
    part, total = (number(inside.get(one)) for one in _COUNTS.get(name, ("", "")))
    if total is None:
        return ""
    return f", of {count(total)}" if part is None else f", {count(part)} of {count(total)}"


def transfer_matrix(run: RunRecord) -> Matrix | None:
    """Failure rates by attacker and target, None where there is one of each at most."""
    cells: dict[tuple[str, str], str] = {}
    for evaluation in run.transfer or run.evaluations.values():
        pair = text(evaluation.get("attacker")), text(evaluation.get("target"))
        cells.setdefault(pair, figure_text("failure_rate", evaluation.get("failure_rate")))
    attackers = list(dict.fromkeys(attacker for attacker, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    if len(attackers) < 2 and len(targets) < 2:
        return None
    rows = [(one, [cells.get((one, target), NOTHING) for target in targets]) for one in attackers]
    return Matrix(targets, rows)


def clusters_of(evaluation: Mapping[str, Any]) -> list[Cluster]:
    """The failure clusters of an evaluation, the one with the most likely probe first."""
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
                set(_turns_of(one)),
            )
        )
    # Unknown likelihoods leave the order of the file.
    return sorted(clusters, key=lambda cluster: cluster.unlikeliness)


def _turns_of(cluster: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for turn in items(cluster.get("turns")):
        match turn:
            case [int(episode), int(depth)]:
                yield episode, depth


def _unlikeliness(row: Mapping[str, Any]) -> float:
    logprob, nll = number(row.get("reference_logprob")), number(row.get("probe_nll"))
    return -logprob if logprob is not None else nll or 0.0


def _rows(columns: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each figure that some column has."""
    flat = [dict(figure_labels(column)) for column in columns]
    labels = dict.fromkeys(label for figures in flat for label in figures)
    return [Row(label, [figures.get(label, NOTHING) for figures in flat]) for label in labels]


def figure_labels(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The leaves of nested figures with their labels; a rate with its interval is one."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if name in _QUOTED:
            continue
        label = f"{prefix}{str(name).replace('_', ' ')}"
        inner = mapping(value)
        if number(inner.get("value")) is not None and name != "kinds":
            found.append((label, figure_text(str(name), value)))
            others = {key: inner[key] for key in inner if key not in ("value", "low", "high")}
            found += figure_labels(others, f"{label}, ")
        elif inner:
            found += figure_labels(inner, f"{label}, ")
        elif isinstance(value, list | tuple):
            found.append((label, _list_text(str(name), value)))
        elif value is not None:
            found.append((label, figure_text(str(name), value)))
    return found


def _list_text(name: str, values: Sequence[Any]) -> str:
    if len(values) == 2 and name.endswith("reward_interval"):
        return f"[{decimal(values[0])}, {decimal(values[1])}]"
    if len(values) == 2 and name.endswith("interval"):
        return interval(*values)
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
