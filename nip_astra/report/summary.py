"""The main figures of a run: sentences, tiles, tables, and the row in a comparison of runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nip_astra.errors import counted
from nip_astra.evaluation.outcomes import Replies
from nip_astra.report.charts import Whisker, whisker
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    TASK,
    RunRecord,
    mapping,
    number,
    split_name,
    text,
    words,
)
from nip_astra.tracking.run_directory import FAILED
from nip_astra.utils.formatting import (
    NOTHING,
    bounds_text,
    count,
    counts_text,
    decimal,
    duration,
    format_figure,
    format_value,
    interval,
    interval_of,
    percent,
)

Report = Mapping[str, Any]
"""Figures of one measurement, as in `results.json`."""
MEASUREMENTS = (("before", "before"), ("after", "after"), ("random_search", "random search"))
"""Compared parts of `results.json`, with their headings."""
ACCURACY = ("mean_accuracy", "accuracy")
"""Names of the share of correct decisions; the first that a run has is used."""
_SAME_NLL = 0.005


@dataclass(frozen=True)
class Tile:
    """One figure in large type, with a note and intervals on a line from 0 to 100 %."""

    label: str
    value: str
    note: str
    whiskers: Sequence[Whisker] = ()


class Row(NamedTuple):
    """A table row: a label and a cell for each column."""

    label: str
    cells: list[str]
    whiskers: Sequence[Whisker | None] = ()


class AgentFigures(NamedTuple):
    """Figures of all agents together with their intervals, and of each; without `test_`."""

    overall: dict[str, Any]
    by_agent: dict[str, dict[str, float]]


def main_rate(report: Report) -> str | None:
    """Return the name of a report's main rate, if it has one."""
    names = ("failure_rate", *ACCURACY)
    return next((name for name in names if number(report.get(name)) is not None), None)


def protocol_of(run: RunRecord) -> str:
    """Return the name of a run's interaction protocol."""
    protocol = run.results.get("protocol") or run.hyper_params.get("interaction_protocol")
    name = text(protocol) or "a protocol"
    is_zero_knowledge = mapping(run.hyper_params.get("protocol_common")).get("zero_knowledge")
    return f"{name} with zero knowledge" if is_zero_knowledge is True else name


def agent_figures(report: Report) -> AgentFigures:
    """Group the figures of a report by agent."""
    figures = AgentFigures({}, {})
    for name, value in report.items():
        agent, figure = split_name(name)
        if agent and number(value) is not None:
            figures.by_agent.setdefault(agent, {})[figure] = float(value)
        elif not agent and (number(value) is not None or figure.endswith("_interval")):
            figures.overall[figure] = value
    return figures


def measured(run: RunRecord) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures before and after training; empty if not measured."""
    return mapping(run.results.get("before")), mapping(run.results.get("after"))


# ---- cells


class MetInTraining(NamedTuple):
    """Planted failures found in training, and by random search with as many target queries."""

    found: int
    total: float
    queries: float
    random: int | None

    def text(self, num_found: int | None) -> str:
        """Format "found of all"."""
        return NOTHING if num_found is None else f"{count(num_found)} of {count(self.total)}"


def met_in_training(results: Mapping[str, Any]) -> MetInTraining | None:
    """Return the planted failures found in training; None if that is not stored."""
    training, search = mapping(results.get("training")), mapping(results.get("random_search"))
    plants, queries = mapping(training.get("plants")), number(training.get("target_queries"))
    total = number(mapping(results.get("after")).get("num_plants"))
    if not plants or queries is None or total is None:
        return None
    by_random = [number(query) for query in mapping(search.get("plants")).values()]
    in_time = sum(query is not None and query <= queries for query in by_random)
    num_found = sum(number(query) is not None for query in plants.values())
    return MetInTraining(num_found, total, queries, in_time if by_random else None)


def plants_found(report: Report) -> float | None:
    """Return the number of planted failures found in held-out conversations."""
    # Older results count those met in training under the other name.
    return number(report.get("plants_found_held_out", report.get("plants_found")))


def plants_text(report: Report) -> str:
    """Format the number of planted failures found, of how many."""
    num_found, planted = plants_found(report), number(report.get("num_plants"))
    return NOTHING if num_found is None else f"{count(num_found)} of {count(planted)}"


def distinct_text(report: Report) -> str:
    """Format the share of successful probes that are distinct, of how many."""
    if number(report.get("distinct_share")) is None:
        return NOTHING
    share, total = percent(report.get("distinct_share"), 0), report.get("num_successful_probes")
    return share if number(total) is None else f"{share}, {_num_distinct(report)} of {count(total)}"


def _num_distinct(report: Report) -> str:
    share, total = number(report.get("distinct_share")), number(report.get("num_successful_probes"))
    if share is None or total is None:
        return NOTHING
    num_distinct = number(report.get("num_distinct_probes"))
    return count(round(share * total) if num_distinct is None else num_distinct)


# ---- sentences


def verdict(run: RunRecord) -> list[str]:
    """Return the findings of a run as sentences."""
    before, after = measured(run)
    if run.kind == PROTOCOL:
        return _protocol_verdict(run, agent_figures(before), agent_figures(after))
    if number(after.get("accuracy")) is not None:
        return [_task_sentence(before, after)]
    if number(after.get("failure_rate")) is None:
        return [f"This run {_end(run, 'a failure rate')}."]
    num_episodes = number(after.get("num_episodes"))
    is_counted = bool(num_episodes)
    among = counted(num_episodes, "held-out conversation") if is_counted else "conversations"
    sentence = f"After training, the target fails in {_rate_of(after, among)}"
    if number(before.get("failure_rate")) is not None:
        sentence += f"; before, it was {_rate_of(before)}"
    silent = [f"{line}." for line in Replies.read(mapping(after.get("replies"))).warnings()]
    return [f"{sentence}.", *silent, *_fluency(before, after), *_discovery(run, before, after)]


def _task_sentence(before: Report, after: Report) -> str:
    """Return how many held-out problems, or answers if several per problem, are correct."""
    num_answers, num_problems = number(after.get("num_answers")), number(after.get("num_problems"))
    rates = [
        f"{percent(report.get('accuracy'))} {interval(*interval_of(report, 'accuracy'))}".strip()
        for report in (before, after)
    ]
    problems = counted(num_problems, "held-out problem")
    if num_answers is None:
        sentence = f"After training, {rates[1]} of {problems} are answered correctly"
    else:
        units = problems
        if num_answers != num_problems:
            units = f"{counted(num_answers, 'answer')} to {problems}"
        verb = "are correct" if units != problems else "are answered correctly"
        num_correct = count(after.get("num_correct"))
        sentence = f"After training, {num_correct} of {units} {verb} ({rates[1]})"
    if number(before.get("accuracy")) is not None:
        counts = counts_text(before, "accuracy")
        sentence += f"; before, {counts} ({rates[0]})" if counts else f"; before, {rates[0]}"
    return f"{sentence}."


def _end(run: RunRecord, missing: str) -> str:
    done = f"it recorded {counted(run.metrics.num_rows, 'iteration')}"
    if run.results.get("status") == FAILED:
        return f"failed; {done}"
    return f"has results without {missing}; {done}" if run.results else f"has not ended; {done}"


def _rate_of(report: Report, among: str = "") -> str:
    counted = counts_text(report)
    rate = f"{percent(report.get('failure_rate'))} {interval(*interval_of(report, 'failure_rate'))}"
    return rate.strip() + (f" of {among}" if among else "") + (f" ({counted})" if counted else "")


def _fluency(before: Report, after: Report) -> Iterator[str]:
    old, new = number(before.get("probe_nll")), number(after.get("probe_nll"))
    if old is not None and new is not None:
        change = new - old
        likely = f"{decimal(abs(change), 2)} nats per token {'less' if change > 0 else 'more'} "
        same = abs(change) < _SAME_NLL
        than = "about as likely as" if same else f"{likely}likely than"
        yield f"The attacker's probes are {than} before."
    if number(after.get("distinct_share")) is not None:
        yield f"Distinct among successful probes: {distinct_text(after)}."


def _discovery(run: RunRecord, before: Report, after: Report) -> Iterator[str]:
    met = met_in_training(run.results)
    if plants_found(after) is not None:
        sentence = f"In held-out conversations {plants_text(after)} planted failures were found"
        if plants_found(before) is not None:
            sentence += f", {count(plants_found(before))} before training"
        yield f"{sentence}."
    if met is not None:
        sentence = (
            f"Training met {met.text(met.found)} in {counted(number(met.queries), 'target query')}"
        )
        if met.random is not None:
            sentence += f"; random search met {count(met.random)} in as many"
        yield f"{sentence}."


def _protocol_verdict(run: RunRecord, before: AgentFigures, after: AgentFigures) -> list[str]:
    scenario = Path(text(run.hyper_params.get("scenario")) or "its scenario").name
    agents = _joined([words(name) for name in run.agents]) or "agents"
    game = f"{agents} played {protocol_of(run)} on {scenario}"
    game = f"{game[:1].upper()}{game[1:]}."
    alone = alone_texts(after)
    if alone:
        shares = _joined([f"the {name} in {share}" for name, share in alone])
        return [f"Without a conversation, the right label is given by {shares} of the test data."]
    rate = main_rate(after.overall)
    if rate is None:
        last = ""
        for accuracies in filter(None, map(run.metrics.known, reversed(ACCURACY))):
            last = f", the last with an accuracy of {percent(accuracies[-1])} in training"
        return [game, f"The run {_end(run, 'an accuracy')}{last}."]
    accuracy, rate_before = format_figure(after.overall, rate), main_rate(before.overall)
    # The accuracy has its counts, as far as they are known.
    among = "test episodes" if " of " in accuracy else "of test episodes"
    sentence = f"The decision is right in {accuracy} {among}"
    if rate_before is not None:
        sentence += f"; before training, it was in {format_figure(before.overall, rate_before)}"
    sentences = [f"{sentence}.", game]
    undecided = after.overall.get("share_undecided")
    if undecided is not None:
        share = f"{percent(undecided)} of the episodes end" if undecided else "No episode ends"
        sentences.append(f"{share} without a decision.")
    worst = after.overall.get("worst_datapoint_accuracy")
    if worst is not None:
        sentences.append(f"On the datapoint with the most errors it is right in {percent(worst)}.")
    return sentences


def alone_texts(after: AgentFigures) -> list[tuple[str, str]]:
    """Return the accuracy of each agent that was tested without a conversation."""
    shares = {name: figures.get("accuracy") for name, figures in after.by_agent.items()}
    return [(words(name), percent(share)) for name, share in shares.items() if share is not None]


# ---- tiles


def tiles(run: RunRecord) -> list[Tile]:
    """Return the main figures of a run."""
    before, after = measured(run)
    all_tiles = [*_protocol_tiles(run, before, after)] if run.kind == PROTOCOL else []
    if number(after.get("failure_rate")) is not None:
        all_tiles.append(_headline_tile("Failing conversations", "failure_rate", before, after))
    nll, old = number(after.get("probe_nll")), number(before.get("probe_nll"))
    if nll is not None:
        note = "nats per token" + ("" if old is None else f"; before {decimal(old)}")
        all_tiles.append(Tile("Probe NLL", decimal(nll), note))
    if number(after.get("distinct_share")) is not None:
        total = number(after.get("num_successful_probes"))
        note = f"{_num_distinct(after)} of {counted(total, 'successful probe')}"
        all_tiles.append(Tile("Distinct successes", percent(after["distinct_share"], 0), note))
    num_found, met = plants_found(after), met_in_training(run.results)
    if num_found is not None:
        note = f"of {count(after.get('num_plants'))} in held-out conversations"
        note += "" if met is None else f"; in training {count(met.found)}"
        note += "" if met is None or met.random is None else f", random search {count(met.random)}"
        all_tiles.append(Tile("Planted failures found", count(num_found), note))
    return [*all_tiles, *_cost_tiles(run, after)]


def _headline_tile(label: str, name: str, before: Report, after: Report) -> Tile:
    bars = [rate_whisker(before, 0, name), rate_whisker(after, 1, name)]
    notes = [interval(*interval_of(after, name)), counts_text(after, name)]
    note = ", ".join(note for note in notes if note)
    if number(before.get(name)) is not None:
        note = f"{note}; before {percent(before[name])}".removeprefix("; ")
    return Tile(
        label, percent(after[name]), note or "of test episodes", [bar for bar in bars if bar]
    )


def _protocol_tiles(run: RunRecord, before: Report, after: Report) -> Iterator[Tile]:
    old, new = agent_figures(before), agent_figures(after)
    rate = main_rate(new.overall)
    if rate is not None:
        yield _headline_tile("Right decisions", rate, old.overall, new.overall)
    for agent, share in alone_texts(new):
        yield Tile(f"Alone, {agent}", share, "right labels")
    if number(new.overall.get("share_undecided")) is not None:
        before_share = old.overall.get("share_undecided")
        note = "" if before_share is None else f"; before {percent(before_share)}"
        yield Tile("Undecided", percent(new.overall["share_undecided"]), f"rounds ran out{note}")
    if number(new.overall.get("mean_episode_length")) is not None:
        yield Tile("Episode length", decimal(new.overall["mean_episode_length"]), "rounds, mean")
    for agent in run.agents:
        reward = new.by_agent.get(agent, {}).get("mean_episode_reward")
        if reward is not None:
            yield Tile(f"Reward, {words(agent)}", decimal(reward), "mean of an episode")


def _cost_tiles(run: RunRecord, after: Report) -> Iterator[Tile]:
    training = mapping(run.results.get("training"))
    seconds = sum(seconds for part, seconds in times(run) if part in ("collect", "update"))
    note = counted(number(training.get("num_iterations")), "iteration")
    timed = note + (f", {duration(seconds)}" if seconds else "")
    queries = number(training.get("target_queries")) or number(after.get("target_queries"))
    if queries is not None:
        yield Tile("Target queries", count(queries), f"training, {timed}")
    elif number(training.get("num_frames")):
        yield Tile("Frames played", count(training["num_frames"]), timed)
    elif number(training.get("num_epochs")):
        yield Tile("Epochs", count(training["num_epochs"]), "passes over the training data")
    elif number(training.get("num_requests")):
        tokens = [count(training.get(f"{part}_tokens", 0)) for part in ("prompt", "completion")]
        read = f"{tokens[0]} tokens read, {tokens[1]} generated"
        yield Tile("Requests to models", count(training["num_requests"]), read)
        yield Tile("Fine-tuning jobs", count(training.get("num_jobs")), note)


def times(run: RunRecord) -> list[tuple[str, float]]:
    """Return the seconds of each part of training, the longest first."""
    sums: dict[str, float] = {}
    for name in run.timings:
        if name.startswith("time/") and name.endswith("_seconds"):
            sums[name.removeprefix("time/").removesuffix("_seconds")] = sum(run.timings.known(name))
    return sorted(sums.items(), key=lambda item: -item[1])


# ---- tables


def figure(name: str) -> Callable[[Report], str]:
    """Return a formatter of the figure of this name."""
    return partial(format_figure, name=name)


MAIN_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("episodes with a failure", figure("failure_rate")),
    ("  if missing verdicts were passes / failures", lambda report: bounds_text(report) or NOTHING),
    (
        "replies: empty / refused",
        lambda report: str(Replies.read(mapping(report.get("replies")))) or NOTHING,
    ),
    ("right answers", figure("accuracy")),
    ("mean reward", figure("mean_reward")),
    ("mean score", figure("mean_score")),
    ("probe NLL, nats per token", figure("probe_nll")),
    ("distinct successful probes", distinct_text),
    ("planted failures found", plants_text),
    ("target queries", lambda report: count(report.get("target_queries"))),
    ("failing responses", lambda report: count(report.get("failing_responses"))),
)
"""Rows of the table of measurements: labels and functions of their cells."""


def main_table(run: RunRecord) -> tuple[list[str], list[Row]]:
    """Return headings and rows of the measurements side by side."""
    measurements = [(heading, mapping(run.results.get(name))) for name, heading in MEASUREMENTS]
    if run.kind == PROTOCOL:
        measurements += [
            (f"evaluation {name}", mapping(stored.get("figures")))
            for name, stored in run.evaluations.items()
        ]
        measurements = [
            (heading, agent_figures(report).overall) for heading, report in measurements
        ]
    measurements = [(heading, report) for heading, report in measurements if report]
    names = dict.fromkeys(name for _, report in measurements for name in report)
    rows: list[Row] = []
    met = met_in_training(run.results)
    if run.kind == PROTOCOL:
        left = [n for n in names if not n.endswith("_interval") and n != "num_episodes"]
        main = [(words(name), figure(name)) for name in sorted(left, key=_place)]
    else:
        parts = [name for name in names if re.fullmatch(r"rewards/.+/mean", name)]
        main = [*MAIN_ROWS, *((f"  {name[8:-5]}", figure(name)) for name in parts)]
    for label, cell in main:
        cells = [cell(report) for _, report in measurements]
        if cell is plants_text and met is not None:
            # Those of random search are not of held-out episodes; they have a row below.
            cells = [
                NOTHING if "failure_rate" not in report else plants_text(report)
                for _, report in measurements
            ]
        if any(cell != NOTHING for cell in cells):
            bars = [rate_whisker(report, int(when != "before")) for when, report in measurements]
            rows.append(Row(label, cells, bars if not rows else []))
    if met is not None:
        texts = {"after": met.text(met.found), "random search": met.text(met.random)}
        cells = [texts.get(heading, NOTHING) for heading, _ in measurements]
        rows.append(Row("planted failures met in training", cells))
        queries = [
            count(met.queries) if heading in texts else NOTHING for heading, _ in measurements
        ]
        rows.append(Row("  in target queries", queries))
    return [heading for heading, _ in measurements], rows


def agent_rows(run: RunRecord, *, has_before: bool = True) -> list[Row]:
    """Return rows of the final figures with a cell for each agent, those before in brackets."""
    before, after = (agent_figures(report).by_agent for report in measured(run))
    agents = run.agents
    names = dict.fromkeys(name for agent in agents for name in after.get(agent, {}))
    rows = []
    for name in sorted(names, key=_place):
        cells = []
        for agent in agents:
            cell = format_value(name, after.get(agent, {}).get(name))
            old = before.get(agent, {}).get(name) if has_before else None
            cells.append(cell if old is None else f"{cell} (before {format_value(name, old)})")
        rows.append(Row(words(name), cells))
    for evaluation, stored in run.evaluations.items():
        by_agent = agent_figures(mapping(stored.get("figures"))).by_agent
        for scorer in mapping(stored.get("scorers")):
            for name in (f"mean_{scorer}", f"share_{scorer}"):
                cells = [format_value(name, by_agent.get(agent, {}).get(name)) for agent in agents]
                rows.append(Row(f"{words(name)} ({evaluation})", cells))
    return rows


# ---- comparison of runs


class Column(NamedTuple):
    """A column of the comparison of runs: a figure, by the name a run has, in a part of results."""

    heading: str
    part: str
    names: tuple[str, ...]
    form: Callable[[Any], str] = decimal
    write: Callable[[Report], str] | None = None

    def cell(self, report: Report) -> str:
        """Return the cell of a run."""
        if self.write is not None:
            return self.write(report)
        names = [name for name in self.names if name in report] or self.names
        return format_figure(report, names[0])


OVERVIEW: dict[str, tuple[Column, ...]] = {
    CONVERSATION: (
        Column("before", "before", ("failure_rate",), percent),
        Column("after", "after", ("failure_rate",), percent),
        Column("probe NLL", "after", ("probe_nll",)),
        Column("distinct", "after", ("distinct_share",), partial(percent, digits=0), distinct_text),
        Column("plants found", "after", ("plants_found",), decimal, plants_text),
        Column("target queries", "training", ("target_queries",)),
    ),
    TASK: (
        Column("before", "before", ("accuracy",), percent),
        Column("after", "after", ("accuracy",), percent),
        Column("mean reward", "after", ("mean_reward",)),
        Column("problems", "after", ("num_problems",)),
    ),
    PROTOCOL: (
        Column("before", "before", ACCURACY, percent),
        Column("after", "after", ACCURACY, percent),
        Column("worst datapoint", "after", ("worst_datapoint_accuracy",), percent),
        Column("undecided", "after", ("share_undecided",), percent),
        Column("rounds", "after", ("mean_episode_length",)),
    ),
}
"""Columns of the comparison by kind of run; the second has the whisker."""


def reward_texts(run: RunRecord) -> list[str]:
    """Return each agent's mean reward per episode after training."""
    after = agent_figures(measured(run)[1]).by_agent
    rewards = {agent: after.get(agent, {}).get("mean_episode_reward") for agent in run.agents}
    return [
        f"{words(agent)} {decimal(reward)}"
        for agent, reward in rewards.items()
        if reward is not None
    ]


def rate_whisker(report: Report, color: int, name: str | None = None) -> Whisker | None:
    """Lay out a rate with its interval from 0 to 100 %; by default the report's main rate."""
    name = name or main_rate(report)
    if name is None:
        return None
    return whisker(number(report.get(name)), *interval_of(report, name), limit=1.0, color=color)


def _place(name: str) -> tuple[bool, bool, bool, str]:
    """Return the sort key of a figure: deviations last, accuracy and means first."""
    return name.startswith("std_"), "accuracy" not in name, not name.startswith("mean_"), name


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
