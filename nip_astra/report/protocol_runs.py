"""What runs whose agents play an interaction protocol found, in a sentence, tiles and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nip_astra.report.charts import Whisker, whisker
from nip_astra.report.curves import NUM_COLORS
from nip_astra.report.provenance import times
from nip_astra.report.records import RunRecord, items, mapping, number, text
from nip_astra.report.summary import Row, Tile
from nip_astra.report.wording import NOTHING, count, decimal, duration, interval, percent
from nip_astra.tracking.run_directory import FAILED

KIND = "interaction_proof"
"""What the results of such a run say of its kind."""
ACCURACY = ("mean_accuracy", "accuracy")
"""Names of the share of right decisions; the first that is there counts."""
REGRESSION = "message_regression"
TEST_PREFIX = "test_"
_SHARES = ("accuracy", "share", "entropy", "prob", REGRESSION)
_BASELINE = "_baseline"


@dataclass(frozen=True)
class Statistics:
    """Figures by name, without the prefix of those that were measured in tests.

    Attributes
    ----------
    overall : dict[str, float]
        Of all agents together.
    by_agent : dict[str, dict[str, float]]
        By agent, then by name.
    accuracy_interval : list
        Its two ends, empty where there is none.
    num_episodes : float or None
        On which the figures rest.
    """

    overall: dict[str, float] = field(default_factory=dict)
    by_agent: dict[str, dict[str, float]] = field(default_factory=dict)
    accuracy_interval: list[Any] = field(default_factory=list)
    num_episodes: float | None = None

    @property
    def accuracy(self) -> float | None:
        """Share of episodes with the right decision."""
        return next((self.overall[name] for name in ACCURACY if name in self.overall), None)

    @property
    def accuracy_text(self) -> str:
        """The accuracy with its interval."""
        ends = self.accuracy_interval
        told = interval(*ends) if len(ends) == 2 else ""
        return NOTHING if self.accuracy is None else f"{percent(self.accuracy)} {told}".strip()

    def accuracy_whisker(self, color: int) -> Whisker | None:
        """Lay out the accuracy with its interval on a line from 0 to 100 %."""
        ends = [number(end) for end in self.accuracy_interval]
        low, high = ends if len(ends) == 2 else (None, None)
        return whisker(self.accuracy, low, high, limit=1.0, color=color)


def is_protocol_run(run: RunRecord) -> bool:
    """Say whether the agents of a run play an interaction protocol."""
    kind = run.results.get("kind")
    if kind is not None:
        return bool(kind == KIND)
    return bool(run.episodes) or bool(text(run.hyper_params.get("interaction_protocol")))


def protocol_of(run: RunRecord) -> str:
    """The name of the protocol."""
    named = run.results.get("protocol") or run.hyper_params.get("interaction_protocol")
    name = text(named) or "a protocol"
    is_zero_knowledge = mapping(run.hyper_params.get("protocol_common")).get("zero_knowledge")
    return f"{name} with zero knowledge" if is_zero_knowledge is True else name


def agents_of(run: RunRecord) -> list[str]:
    """The agents' names, in the protocol's order where the results say it."""
    named = [text(name) for name in items(run.results.get("agents"))]
    if named:
        return named
    rows = [row for rows in run.episodes.values() for row in rows[:1]]
    found = dict.fromkeys(agent for row in rows for agent in mapping(row.get("rewards")))
    for row in run.metrics[:1]:
        found |= dict.fromkeys(agent for name in row if (agent := split_name(name)[0]))
    return list(found)


def colors_of(agents: Sequence[str]) -> dict[str, int]:
    """A colour of the page for each agent; 0 and 1 are those of the run as a whole."""
    return {agent: 2 + place % (NUM_COLORS - 2) for place, agent in enumerate(agents)}


def split_name(name: str) -> tuple[str, str]:
    """Agent and figure of a metric; no agent for figures of all of them together."""
    agent, _, figure = name.rpartition("/")
    if agent.partition("/")[0] in ("time", "memory"):
        return "", name
    if agent == REGRESSION:
        is_baseline = figure.endswith(_BASELINE)
        return figure.removesuffix(_BASELINE), REGRESSION + (_BASELINE if is_baseline else "")
    return agent.removeprefix(TEST_PREFIX), figure.removeprefix(TEST_PREFIX)


def statistics_of(values: Mapping[str, Any]) -> Statistics:
    """Sort figures by agent."""
    found = Statistics(
        accuracy_interval=next(
            (items(value) for name, value in values.items() if "accuracy_interval" in name), []
        ),
        num_episodes=next(
            (number(value) for name, value in values.items() if name.endswith("num_episodes")), None
        ),
    )
    for name, value in values.items():
        figure = number(value)
        if figure is None or name.endswith("num_episodes"):
            continue
        agent, statistic = split_name(name)
        group = found.by_agent.setdefault(agent, {}) if agent else found.overall
        group[statistic] = figure
    return found


def measured(run: RunRecord) -> tuple[Statistics, Statistics]:
    """The statistics before and after training; empty where they were not measured."""
    before, after = (mapping(run.results.get(name)) for name in ("before", "after"))
    return statistics_of(before), statistics_of(after)


def verdict(run: RunRecord) -> list[str]:
    """Say in words what the run found."""
    before, after = measured(run)
    scenario = Path(text(run.hyper_params.get("scenario")) or "its scenario").name
    agents = _listed(agents_of(run)) or "agents"
    game = f"{agents} played {protocol_of(run)} on {scenario}"
    alone = alone_texts(after)
    if alone:
        told = _joined([f"the {name} in {share}" for name, share in alone])
        return [f"Without a conversation, the right label is given by {told} of the test data."]
    if after.accuracy is None:
        done = f"{count(len(run.metrics))} iterations are recorded"
        end = "has no accuracy in its results" if run.results else "has not ended"
        end = "failed" if run.results.get("status") == FAILED else end
        last = _last_accuracy(run)
        told = "" if last is None else f", the last with an accuracy of {percent(last)} in training"
        return [f"{game[:1].upper()}{game[1:]}.", f"The run {end}; {done}{told}."]
    among = f"{count(after.num_episodes)} test episodes" if after.num_episodes else "test episodes"
    sentence = f"The decision is right in {after.accuracy_text} of {among}"
    if before.accuracy is not None:
        sentence += f"; before training, it was in {before.accuracy_text}"
    return [f"{sentence}.", f"{game[:1].upper()}{game[1:]}.", *_details(after)]


def alone_texts(after: Statistics) -> list[tuple[str, str]]:
    """The accuracy of each agent that was tested without a conversation."""
    shares = {name: figures.get("accuracy") for name, figures in after.by_agent.items()}
    return [(_words(name), percent(share)) for name, share in shares.items() if share is not None]


def _details(after: Statistics) -> Iterator[str]:
    undecided = after.overall.get("share_undecided")
    if undecided is not None:
        share = percent(undecided) if undecided else "None"
        yield f"{share} of the episodes {'end' if undecided else 'ends'} without a decision."
    worst = after.overall.get("worst_datapoint_accuracy")
    if worst is not None:
        yield f"On the datapoint that it gets wrong most often, it is right in {percent(worst)}."


def tiles(run: RunRecord) -> list[Tile]:
    """The main figures, those that the run has."""
    before, after = measured(run)
    made = []
    if after.accuracy is not None:
        bars = [before.accuracy_whisker(0), after.accuracy_whisker(1)]
        ends = after.accuracy_interval
        notes = [interval(*ends)] if len(ends) == 2 else []
        if before.accuracy is not None:
            notes.append(f"before {percent(before.accuracy)}")
        note = "; ".join(note for note in notes if note) or "of test episodes"
        made.append(Tile("Right decisions", percent(after.accuracy), note, [b for b in bars if b]))
    made += [Tile(f"Alone, {name}", share, "right labels") for name, share in alone_texts(after)]
    pairs = [(one.overall.get("share_undecided"), one) for one in (after, before)]
    if pairs[0][0] is not None:
        note = "" if pairs[1][0] is None else f"; before {percent(pairs[1][0])}"
        made.append(Tile("Undecided", percent(pairs[0][0]), f"rounds ran out{note}"))
    length = after.overall.get("mean_episode_length")
    if length is not None:
        made.append(Tile("Episode length", decimal(length), "rounds, mean"))
    for agent in agents_of(run):
        reward = after.by_agent.get(agent, {}).get("mean_episode_reward")
        if reward is not None:
            made.append(Tile(f"Reward, {_words(agent)}", decimal(reward), "mean of an episode"))
    return [*made, *_cost_tiles(run)]


def _cost_tiles(run: RunRecord) -> Iterator[Tile]:
    training = mapping(run.results.get("training"))
    frames = number(training.get("num_frames"))
    seconds = sum(seconds for part, seconds in times(run) if part in ("collect", "update"))
    if frames:
        note = f"{count(training.get('num_iterations'))} iterations"
        note += f", {duration(seconds)}" if seconds else ""
        yield Tile("Frames played", count(frames), note)
    elif number(training.get("num_epochs")):
        yield Tile("Epochs", count(training["num_epochs"]), "passes over the training data")
    elif number(training.get("num_requests")):
        tokens = [number(training.get(f"{part}_tokens")) or 0 for part in ("prompt", "completion")]
        note = f"{count(tokens[0])} tokens read, {count(tokens[1])} said"
        yield Tile("Requests to models", count(training["num_requests"]), note)
        note = f"{count(training.get('num_iterations'))} iterations"
        yield Tile("Fine-tuning jobs", count(training.get("num_jobs")), note)


def overall_rows(run: RunRecord) -> tuple[list[str], list[Row]]:
    """Headings and rows of the figures of all agents together."""
    reports = [("before", measured(run)[0]), ("after", measured(run)[1])]
    reports += [
        (f"evaluation {name}", statistics_of(mapping(one.get("figures"))))
        for name, one in run.evaluations.items()
    ]
    reports = [(heading, one) for heading, one in reports if one.overall]
    names = dict.fromkeys(name for _, one in reports for name in one.overall)
    rows = []
    for name in sorted(names, key=_place):
        cells = [figure_text(name, one.overall.get(name)) for _, one in reports]
        if name in ACCURACY:
            cells = [one.accuracy_text for _, one in reports]
        rows.append(Row(_words(name), cells))
    return [heading for heading, _ in reports], rows


def agent_rows(run: RunRecord, *, has_before: bool = True) -> list[Row]:
    """Rows of the final figures, with a cell for each agent; before training in brackets."""
    before, after = measured(run)
    if not has_before:
        before = Statistics()
    agents = agents_of(run)
    names = dict.fromkeys(name for agent in agents for name in after.by_agent.get(agent, {}))
    rows = []
    for name in sorted(names, key=_place):
        cells = []
        for agent in agents:
            cell = figure_text(name, after.by_agent.get(agent, {}).get(name))
            old = before.by_agent.get(agent, {}).get(name)
            cells.append(cell if old is None else f"{cell} (before {figure_text(name, old)})")
        rows.append(Row(_words(name), cells))
    return rows + _scored_rows(run, agents)


def _scored_rows(run: RunRecord, agents: Sequence[str]) -> list[Row]:
    """What scorers said of stored answers, with the evaluation that keeps it in brackets."""
    rows = []
    for evaluation, told in run.evaluations.items():
        found = statistics_of(mapping(told.get("figures"))).by_agent
        for scorer in mapping(told.get("scorers")):
            for name in (f"mean_{scorer}", f"share_{scorer}"):
                cells = [figure_text(name, found.get(agent, {}).get(name)) for agent in agents]
                rows.append(Row(f"{_words(name)} ({evaluation})", cells))
    return rows


def figure_text(name: str, value: float | None) -> str:
    """A figure, a share as a percentage."""
    is_share = is_a_share(name)
    return percent(value) if is_share else decimal(value)


def is_a_share(name: str) -> bool:
    """Say by the name of a figure whether it is a share of 1."""
    if name.startswith(("std_", "loss")):
        return False
    return any(word in name for word in _SHARES)


OVERVIEW = ["before", "after", "worst datapoint", "undecided", "rounds"]
"""Headings of `overview_cells`."""


def overview_cells(run: RunRecord) -> list[str]:
    """The cells of a comparison of runs; `OVERVIEW` has their headings."""
    before, after = measured(run)
    return [
        before.accuracy_text,
        after.accuracy_text,
        percent(after.overall.get("worst_datapoint_accuracy")),
        percent(after.overall.get("share_undecided")),
        decimal(after.overall.get("mean_episode_length")),
    ]


def reward_texts(run: RunRecord) -> list[str]:
    """Each agent's mean reward of an episode after training."""
    _, after = measured(run)
    rewards = {
        agent: after.by_agent.get(agent, {}).get("mean_episode_reward") for agent in agents_of(run)
    }
    return [f"{_words(agent)} {decimal(one)}" for agent, one in rewards.items() if one is not None]


def _place(name: str) -> tuple[bool, bool, bool, str]:
    """The order of figures: deviations last, accuracy and means first."""
    return name.startswith("std_"), "accuracy" not in name, not name.startswith("mean_"), name


def _words(name: str) -> str:
    return name.replace("_", " ")


def _listed(names: Iterable[str]) -> str:
    return _joined([_words(name) for name in names])


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _last_accuracy(run: RunRecord) -> float | None:
    known = [value for row in run.metrics if (value := statistics_of(row).accuracy) is not None]
    return known[-1] if known else None
