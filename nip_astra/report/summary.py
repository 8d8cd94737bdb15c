"""What a run found, in a sentence, tiles and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        return [f"This run {end}; {count(done)} iterations are recorded."]
    num_episodes = number(after.get("num_episodes"))
    among = f"{count(num_episodes)} held-out conversations" if num_episodes else "conversations"
    sentence = f"After training, the target fails in {_rate(after)} of {among}"
    if number(before.get("failure_rate")) is not None:
        sentence += f"; before, it was {_rate(before)}"
    return [f"{sentence}.", *_fluency(before, after), *_discovery(run, after)]


def tiles(run: RunRecord) -> list[Tile]:
    """The main figures, those that the run has."""
    before, after = mapping(run.results.get("before")), mapping(run.results.get("after"))
    made = []
    if number(after.get("failure_rate")) is not None:
        bars = [rate_whisker(before, 0), rate_whisker(after, 1)]
        note = _interval(after)
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
        note = f"of {count(after.get('num_successful_probes'))} successful probes"
        made.append(Tile("Distinct successes", percent(after["distinct_share"], 0), note))
    if number(after.get("plants_found")) is not None:
        random = number(mapping(run.results.get("random_search")).get("plants_found"))
        note = f"of {count(after.get('num_plants'))}"
        note += "" if random is None else f"; random search {count(random)}"
        made.append(Tile("Planted failures found", count(after["plants_found"]), note))
    return [*made, *_cost_tiles(run, after)]


def before_after(run: RunRecord) -> tuple[list[str], list[Row]]:
    """Headings and rows of the comparison of before, after and random search."""
    shown = [(heading, mapping(run.results.get(name))) for name, heading in COLUMNS]
    shown = [(heading, report) for heading, report in shown if report]
    reports = [report for _, report in shown]
    unit = "an answer" if is_task_run(run) else "a turn"
    writers: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("conversations with a failure", rate_text),
        ("held-out problems answered right", accuracy_text),
        ("mean score of a response", lambda one: decimal(one.get("mean_score"))),
        (f"mean reward of {unit}", lambda one: decimal(one.get("mean_reward"))),
        ("probe NLL, nats per token", lambda one: decimal(one.get("probe_nll"))),
        ("successful probes", lambda one: count(one.get("num_successful_probes"))),
        ("distinct among them", lambda one: percent(one.get("distinct_share"), 0)),
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
    return [heading for heading, _ in shown], rows


def _cost_tiles(run: RunRecord, after: Mapping[str, Any]) -> Iterator[Tile]:
    spent = dict(times(run))
    seconds = spent.get("collect", 0.0) + spent.get("update", 0.0)
    training = mapping(run.results.get("training"))
    queries = number(training.get("target_queries")) or number(after.get("target_queries"))
    if queries is not None:
        note = f"training, {count(training.get('iterations'))} iterations"
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
    return f"{percent(report.get('accuracy'))} {told}".strip()


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


def _discovery(run: RunRecord, after: Mapping[str, Any]) -> Iterator[str]:
    if number(after.get("plants_found")) is None:
        return
    sentence = f"{plants_text(after)} planted failures were found"
    if number(after.get("target_queries")) is not None:
        sentence += f" in {count(after['target_queries'])} target queries"
    random = mapping(run.results.get("random_search"))
    if number(random.get("plants_found")) is not None:
        sentence += f"; random search found {count(random['plants_found'])} with as many"
    yield f"{sentence}."


def _rate(report: Mapping[str, Any]) -> str:
    return f"{percent(report.get('failure_rate'))} {_interval(report)}".strip()


def rate_text(report: Mapping[str, Any]) -> str:
    """The failure rate with its interval."""
    return _rate(report) if number(report.get("failure_rate")) is not None else NOTHING


def _interval(report: Mapping[str, Any]) -> str:
    ends = items(report.get("failure_rate_interval"))
    return interval(*ends) if len(ends) == 2 else ""


def rate_whisker(report: Mapping[str, Any], color: int) -> Whisker | None:
    """Lay out the failure rate with its interval on a line from 0 to 100 %."""
    ends = [number(end) for end in items(report.get("failure_rate_interval"))]
    low, high = ends if len(ends) == 2 else (None, None)
    return whisker(number(report.get("failure_rate")), low, high, limit=1.0, color=color)


def plants_text(report: Mapping[str, Any]) -> str:
    """How many planted failures were found, of how many."""
    found, planted = number(report.get("plants_found")), number(report.get("num_plants"))
    return NOTHING if found is None else f"{count(found)} of {count(planted)}"
