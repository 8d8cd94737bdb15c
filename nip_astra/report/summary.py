"""What a run found, in a sentence, tiles and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nip_astra.evaluation.measured import Replies
from nip_astra.evaluation.tables import bounds_text, counts_text
from nip_astra.report.charts import Whisker, whisker
from nip_astra.report.provenance import times
from nip_astra.report.records import RunRecord, items, mapping, number
from nip_astra.report.task_answers import is_task_run
from nip_astra.report.wording import (
    NOTHING,
    count,
    decimal,
    duration,
    interval,
    percent,
)
from nip_astra.tracking.run_directory import FAILED

COLUMNS = (("before", "before"), ("after", "after"), ("random_search", "random search"))
"""Parts of results.json that are compared, with their headings."""
_SAME_NLL = 0.005


@dataclass(frozen=True)
class Tile:
    """One figure, large, with what it means and what it is compared with.

    Attributes
    ----------
    whiskers : list[Whisker]
        Intervals, drawn one above the other on a line from 0 to 100 %.
    """

    label: str
    value: str
    note: str
    whiskers: Sequence[Whisker] = ()


@dataclass(frozen=True)
class Row:
    """A row of a table: a label and a cell for each column."""

    label: str
    cells: list[str]
    whiskers: Sequence[Whisker | None] = ()


def verdict(run: RunRecord) -> list[str]:
    """Say in words what the run found."""
    before, after = mapping(run.results.get("before")), mapping(run.results.get("after"))
    if number(after.get("accuracy")) is not None:
        return [_answers(before, after)]
    if number(after.get("failure_rate")) is None:
        done = len(run.metrics)
        end = "has results without a failure rate" if run.results else "has not ended"
        end = "failed" if run.results.get("status") == FAILED else end
        return [f"This run {end}; {count(done)} iterations are recorded."]
    num_episodes = number(after.get("num_episodes"))
    among = f"{count(num_episodes)} held-out conversations" if num_episodes else "conversations"
    sentence = f"After training, the target fails in {_rate(after)} of {among}"
    sentence += _failed(after)
    if number(before.get("failure_rate")) is not None:
        sentence += f"; before, it was {_rate(before)}{_failed(before)}"
    silent = [f"{told}." for told in Replies.read(mapping(after.get("replies"))).warnings()]
    return [f"{sentence}.", *silent, *_fluency(before, after), *_discovery(run, before, after)]


def _failed(report: Mapping[str, Any]) -> str:
    counted = counts_text(report)
    return f" ({counted})" if counted else ""


def tiles(run: RunRecord) -> list[Tile]:
    """The main figures, those that the run has."""
    before, after = mapping(run.results.get("before")), mapping(run.results.get("after"))
    made = []
    if number(after.get("failure_rate")) is not None:
        bars = [rate_whisker(before, 0), rate_whisker(after, 1)]
        note = ", ".join(one for one in (_interval(after), counts_text(after)) if one)
        if number(before.get("failure_rate")) is not None:
            note += f"; before {percent(before['failure_rate'])}"
        made.append(
            Tile(
                "Failing conversations",
                percent(after["failure_rate"]),
                note,
                [bar for bar in bars if bar],
            )
        )
    nll = number(after.get("probe_nll"))
    if nll is not None:
        old = number(before.get("probe_nll"))
        note = "nats per token" + ("" if old is None else f"; before {decimal(old)}")
        made.append(Tile("Probe NLL", decimal(nll), note))
    if number(after.get("distinct_share")) is not None:
        note = f"{_num_distinct(after)} of {count(after.get('num_successful_probes'))} successful "
        note += "probes"
        made.append(Tile("Distinct successes", percent(after["distinct_share"], 0), note))
    found, met = plants_found(after), met_in_training(run.results)
    if found is not None:
        note = f"of {count(after.get('num_plants'))} in held-out conversations"
        note += "" if met is None else f"; in training {count(met.found)}"
        note += "" if met is None or met.random is None else f", random search {count(met.random)}"
        made.append(Tile("Planted failures found", count(found), note))
    return [*made, *_cost_tiles(run, after)]


def before_after(run: RunRecord) -> tuple[list[str], list[Row]]:
    """Headings and rows of the comparison of before, after and random search."""
    shown = [(heading, mapping(run.results.get(name))) for name, heading in COLUMNS]
    shown = [(heading, report) for heading, report in shown if report]
    reports = [report for _, report in shown]
    unit = "an answer" if is_task_run(run) else "a turn"
    writers: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("conversations with a failure", rate_text),
        ("  if missing verdicts were passes / failures", lambda one: bounds_text(one) or NOTHING),
        ("held-out problems answered right", accuracy_text),
        ("replies: empty / refused", replies_text),
        ("mean score of a response", lambda one: decimal(one.get("mean_score"))),
        (f"mean reward of {unit}", lambda one: decimal(one.get("mean_reward"))),
        ("probe NLL, nats per token", lambda one: decimal(one.get("probe_nll"))),
        ("distinct among successful probes", distinct_text),
        ("planted failures found", plants_text),
        ("target queries", lambda one: count(one.get("target_queries"))),
        ("failing responses", lambda one: count(one.get("failing_responses"))),
    ]
    rows: list[Row] = []
    for label, write in writers:
        cells = [write(report) for report in reports]
        bars = [rate_whisker(one, int(name != "before")) for name, one in shown] if not rows else []
        if any(cell != NOTHING for cell in cells):
            rows.append(Row(label, cells, bars))
    met = met_in_training(run.results)
    if met is not None:
        by_heading = {"after": met.text(met.found), "random search": met.text(met.random)}
        cells = [by_heading.get(heading, NOTHING) for heading, _ in shown]
        rows.append(Row(f"planted failures met in {count(met.queries)} queries of training", cells))
    return [heading for heading, _ in shown], rows


@dataclass(frozen=True)
class MetInTraining:
    """Planted failures that training met, and random search with as many target queries."""

    found: int
    total: float
    queries: float
    random: int | None

    def text(self, found: int | None) -> str:
        """So many of all."""
        return NOTHING if found is None else f"{count(found)} of {count(self.total)}"


def met_in_training(results: Mapping[str, Any]) -> MetInTraining | None:
    """What training met of the planted failures; None where it is not stored."""
    training, search = mapping(results.get("training")), mapping(results.get("random_search"))
    plants, queries = mapping(training.get("plants")), number(training.get("target_queries"))
    total = number(mapping(results.get("after")).get("num_plants"))
    if not plants or queries is None or total is None:
        return None
    by_random = [number(query) for query in mapping(search.get("plants")).values()]
    in_time = sum(query is not None and query <= queries for query in by_random)
    found = sum(number(query) is not None for query in plants.values())
    return MetInTraining(found, total, queries, in_time if by_random else None)


def plants_found(report: Mapping[str, Any]) -> float | None:
    """Planted failures found in held-out conversations."""
    # Older results count those met in training under the other name.
    return number(report.get("plants_found_held_out", report.get("plants_found")))


def distinct_text(report: Mapping[str, Any]) -> str:
    """The share of successful probes that are distinct, and of how many."""
    if number(report.get("distinct_share")) is None:
        return NOTHING
    share, total = percent(report.get("distinct_share"), 0), report.get("num_successful_probes")
    return share if number(total) is None else f"{share}, {_num_distinct(report)} of {count(total)}"


def _num_distinct(report: Mapping[str, Any]) -> str:
    share, total = number(report.get("distinct_share")), number(report.get("num_successful_probes"))
    if share is None or total is None:
        return NOTHING
    known = number(report.get("num_distinct_probes"))
    return count(round(share * total) if known is None else known)


def _cost_tiles(run: RunRecord, after: Mapping[str, Any]) -> Iterator[Tile]:
    spent = dict(times(run))
    seconds = spent.get("collect", 0.0) + spent.get("update", 0.0)
    training = mapping(run.results.get("training"))
    queries = number(training.get("target_queries")) or number(after.get("target_queries"))
    if queries is not None:
        note = f"training, {count(training.get('num_iterations'))} iterations"
        note += f", {duration(seconds)}" if seconds else ""
        yield Tile("Target queries", count(queries), note)


def _answers(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    among = f"{count(after.get('num_problems'))} held-out problems"
    sentence = f"After training, {accuracy_text(after)} of the answers to {among} are right"
    if number(before.get("accuracy")) is not None:
        sentence += f"; before, it was {accuracy_text(before)}"
    return f"{sentence}."


def accuracy_text(report: Mapping[str, Any]) -> str:
    """The share of right answers with its interval."""
    if number(report.get("accuracy")) is None:
        return NOTHING
    ends = items(report.get("accuracy_interval"))
    told = interval(*ends) if len(ends) == 2 else ""
    counts = {"num_failed": report.get("num_right"), "num_known": report.get("num_answers")}
    counted = counts_text(counts)
    return f"{percent(report.get('accuracy'))} {told}".strip() + (f", {counted}" if counted else "")


def _fluency(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    old, new = number(before.get("probe_nll")), number(after.get("probe_nll"))
    if old is not None and new is not None:
        change = new - old
        if abs(change) < _SAME_NLL:
            told = "about as likely as before"
        else:
            told = f"{decimal(abs(change), 2)} nats per token {'less' if change > 0 else 'more'}"
            told += " likely than before"
        yield f"Its probes are {told}."
    share = number(after.get("distinct_share"))
    if share is not None:
        yield f"{percent(share, 0)} of the probes that succeed are distinct."


def _discovery(
    run: RunRecord, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[str]:
    met = met_in_training(run.results)
    if plants_found(after) is not None:
        sentence = f"In held-out conversations {plants_text(after)} planted failures were found"
        if plants_found(before) is not None:
            sentence += f", {count(plants_found(before))} before training"
        yield f"{sentence}."
    if met is not None:
        sentence = f"Training met {met.text(met.found)} in {count(met.queries)} target queries"
        if met.random is not None:
            sentence += f"; random search met {count(met.random)} in as many"
        yield f"{sentence}."


def _rate(report: Mapping[str, Any]) -> str:
    return f"{percent(report.get('failure_rate'))} {_interval(report)}".strip()


def rate_text(report: Mapping[str, Any]) -> str:
    """The failure rate with its interval, and of how many it is."""
    known = [one for one in (_rate(report), counts_text(report)) if one and one != NOTHING]
    return ", ".join(known) or NOTHING


def _interval(report: Mapping[str, Any]) -> str:
    ends = items(report.get("failure_rate_interval"))
    return interval(*ends) if len(ends) == 2 else ""


def rate_whisker(report: Mapping[str, Any], color: int) -> Whisker | None:
    """Lay out the failure rate with its interval on a line from 0 to 100 %."""
    ends = [number(end) for end in items(report.get("failure_rate_interval"))]
    low, high = ends if len(ends) == 2 else (None, None)
    return whisker(number(report.get("failure_rate")), low, high, limit=1.0, color=color)


def replies_text(report: Mapping[str, Any]) -> str:
    """How many replies of the target are empty or refusals."""
    return str(Replies.read(mapping(report.get("replies")))) or NOTHING


def plants_text(report: Mapping[str, Any]) -> str:
    """How many planted failures were found, of how many."""
    found, planted = plants_found(report), number(report.get("num_plants"))
    return NOTHING if found is None else f"{count(found)} of {count(planted)}"
