"""Sample episodes of a protocol: what they were about, who said what, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nip_astra.errors import NipAstraError
from nip_astra.report.analyses import verdicts_of
from nip_astra.report.protocol_runs import agents_of, colors_of
from nip_astra.report.records import RunRecord, items, mapping, number, text
from nip_astra.report.wording import count, decimal, percent
from nip_astra.scenario_base.protocol.datapoint_views import Choice, DatapointView, Picture

MAX_EPISODES = 12
"""Episodes of a table and iteration that a page shows."""
MAX_ROUNDS = 40
"""Rounds of an episode that a page shows."""
SHOWN_ROUNDS = 3
"""Rounds that stand beside a place that was named more often."""
DECISIONS = {0: "rejects", 1: "accepts", 2: "goes on"}
UNDECIDED = 2
_TITLES = {"evaluation": "After training, test data", "before": "Before training, test data"}
_TITLES |= {"train": "During training"}
_ORDER = list(_TITLES)


@dataclass(frozen=True)
class Said:
    """What an agent did in a round, in one channel.

    Attributes
    ----------
    round : str
        Number of the round, empty in further lines of it.
    reward : str
        In the round; empty for 0 and in further lines of the agent.
    chance : str
        How likely the agent's whole move was under its policy.
    """

    round: str
    agent: str
    color: int
    channel: str
    message: str
    decision: str
    reward: str
    chance: str


@dataclass(frozen=True)
class Episode:
    """An episode as the page shows it.

    Attributes
    ----------
    outcome : str
        "right", "wrong" or "undecided".
    label, decision : str
        In words.
    rewards : list of (agent, color, reward)
        Of the whole episode.
    datapoint : str
        Which one it is.
    texts : list of (name, text)
        What it says, where agents speak in words.
    verdicts : list of (agent, color, question, answer)
        What a judge said of it.
    """

    outcome: str
    label: str
    decision: str
    num_rounds: int
    rewards: list[tuple[str, int, str]]
    datapoint: str
    texts: list[tuple[str, str]]
    picture: Picture | None
    lines: list[Said]
    is_cut: bool
    has_channels: bool
    verdicts: list[tuple[str, int, str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class EpisodeTable:
    """Episodes of one table at one iteration."""

    title: str
    step: int
    episodes: list[Episode]
    num_episodes: int
    first_open: frozenset[int]


def tables_of(run: RunRecord) -> list[EpisodeTable]:
    """Sample episodes by table: of the last iteration, and of training also of the first."""
    colors = colors_of(agents_of(run))
    tables: list[EpisodeTable] = []
    for name in sorted(run.episodes, key=_place):
        by_step: dict[int, list[dict[str, Any]]] = {}
        for row in run.episodes[name]:
            by_step.setdefault(int(number(row.get("step")) or 0), []).append(row)
        steps = sorted(by_step, reverse=True)
        for step in dict.fromkeys([steps[0], steps[-1]]):
            rows = _mixed(by_step[step])
            episodes = [
                replace(_episode(row, colors), verdicts=_verdicts(run, name, row, colors))
                for row in rows
            ]
            title = _TITLES.get(name, name.replace("evaluations/", "evaluation ").replace("_", " "))
            is_first = not tables
            tables.append(
                EpisodeTable(title, step, episodes, len(by_step[step]), _open(episodes, is_first))
            )
    return tables


def _verdicts(
    run: RunRecord, table: str, row: Mapping[str, Any], colors: Mapping[str, int]
) -> list[tuple[str, int, str, str]]:
    return [
        (_words(agent), colors.get(agent, 0), question, answer)
        for agent, question, answer in verdicts_of(run, table, row)
    ]


def outcome_of(row: Mapping[str, Any]) -> str:
    """Say how an episode ended."""
    decision = number(row.get("decision"))
    if decision is None or decision == UNDECIDED:
        return "undecided"
    return "right" if decision == number(row.get("label")) else "wrong"


def _place(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name


def _mixed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take right, wrong and undecided episodes in turn, the longest of each first."""
    longest = sorted(rows, key=lambda row: -len(items(row.get("rounds"))))
    kinds = {kind: [] for kind in ("right", "wrong", "undecided")}  # type: dict[str, list[Any]]
    for row in longest:
        kinds[outcome_of(row)].append(row)
    taken: list[dict[str, Any]] = []
    while len(taken) < min(MAX_EPISODES, len(rows)):
        taken += [found.pop(0) for found in kinds.values() if found]
    return taken[:MAX_EPISODES]


def _open(episodes: Sequence[Episode], is_first: bool) -> frozenset[int]:
    """The episodes that are open from the start: the first right one and the first other."""
    if not is_first:
        return frozenset()
    rights = [place for place, one in enumerate(episodes) if one.outcome == "right"]
    others = [place for place, one in enumerate(episodes) if one.outcome != "right"]
    return frozenset(rights[:1] + others[:1])


def _episode(row: Mapping[str, Any], colors: Mapping[str, int]) -> Episode:
    datapoint = mapping(row.get("datapoint"))
    view = view_of(datapoint)
    rounds = [mapping(one) for one in items(row.get("rounds"))]
    shown = rounds[:MAX_ROUNDS]
    rewards = mapping(row.get("rewards"))
    lines = [line for one in shown for line in _round(one, view, colors)]
    outcome = outcome_of(row)
    return Episode(
        outcome=outcome,
        label=_label(row.get("label"), view),
        decision="no decision" if outcome == "undecided" else _label(row["decision"], view),
        num_rounds=len(rounds),
        rewards=[(_words(name), colors.get(name, 0), decimal(rewards[name])) for name in rewards],
        datapoint=_identity(datapoint),
        texts=[
            (_words(name), text(said)) for name, said in mapping(datapoint.get("texts")).items()
        ],
        picture=view.picture(_choices(shown, view, colors)),
        lines=lines,
        is_cut=len(rounds) > len(shown),
        has_channels=len({line.channel for line in lines if line.channel}) > 1,
    )


def _label(value: Any, view: DatapointView) -> str:
    label = number(value)
    return f"label {count(value)}" if label is None else view.label(int(label))


def _identity(datapoint: Mapping[str, Any]) -> str:
    parts = []
    if number(datapoint.get("id")) is not None:
        parts.append(f"datapoint {count(datapoint['id'])}")
    if datapoint.get("note"):
        parts.append(text(datapoint["note"]))
    return "; ".join(parts)


def _round(one: Mapping[str, Any], view: DatapointView, colors: Mapping[str, int]) -> list[Said]:
    """The lines of a round: one for each agent and channel, and rewards of who did nothing."""
    rewards = {name: number(value) or 0.0 for name, value in mapping(one.get("rewards")).items()}
    found: list[Said] = []
    for move in (mapping(move) for move in items(one.get("moves"))):
        agent = text(move.get("agent"))
        messages = mapping(move.get("messages"))
        linear = mapping(move.get("linear"))
        decision = number(move.get("decision"))
        for place, channel in enumerate(messages or {"": []}):
            is_first = place == 0
            logprob = number(move.get("logprob")) if is_first else None
            found.append(
                Said(
                    round="" if found else count(one.get("round")),
                    agent=_words(agent),
                    color=colors.get(agent, 0),
                    channel=_words(channel),
                    message=_message(messages.get(channel), linear.get(channel), view),
                    decision=DECISIONS.get(int(decision), "")
                    if is_first and decision is not None
                    else "",
                    reward=_reward(rewards.pop(agent, 0.0)) if is_first else "",
                    chance=percent(math.exp(min(logprob, 0.0))) if logprob is not None else "",
                )
            )
    for agent, reward in rewards.items():
        if reward:
            number_shown = "" if found else count(one.get("round"))
            color = colors.get(agent, 0)
            said = Said(number_shown, _words(agent), color, "", "", "", _reward(reward), "")
            found.append(said)
    return found


def _reward(value: float) -> str:
    return f"{'+' if value > 0 else ''}{decimal(value)}" if value else ""


def _message(symbols: Any, linear: Any, view: DatapointView) -> str:
    """What was sent, in the scenario's own words; a text as it is."""
    if isinstance(symbols, str):
        return symbols
    said = [
        view.symbol(int(symbol)) for one in items(symbols) if (symbol := number(one)) is not None
    ]
    plain = [count(symbol) for symbol in items(linear)]
    told = ", ".join(said)
    return f"{told} + symbol {', '.join(plain)}" if plain else told


def _choices(
    rounds: Sequence[Mapping[str, Any]], view: DatapointView, colors: Mapping[str, int]
) -> list[Choice]:
    """The places that were named, each once for each agent, with the rounds."""
    found: dict[tuple[int, int, str], list[str]] = {}
    for one in rounds:
        for move in (mapping(move) for move in items(one.get("moves"))):
            for symbols in mapping(move.get("messages")).values():
                for symbol in (number(value) for value in items(symbols)):
                    place = None if symbol is None else view.place_of(int(symbol))
                    if place is not None:
                        said = found.setdefault((*place, text(move.get("agent"))), [])
                        said.append(count(one.get("round")))
    return [
        Choice(part, place, _words(agent), colors.get(agent, 0), _rounds(said))
        for (part, place, agent), said in found.items()
    ]


def _rounds(said: Sequence[str]) -> str:
    """The rounds in which a place was named; of many the first."""
    distinct = list(dict.fromkeys(said))
    more = f" +{len(distinct) - SHOWN_ROUNDS}" if len(distinct) > SHOWN_ROUNDS else ""
    return ", ".join(distinct[:SHOWN_ROUNDS]) + more


def _words(name: str) -> str:
    return name.replace("_", " ")


def view_of(datapoint: Mapping[str, Any]) -> DatapointView:
    """The view of what a datapoint says it is; a plain one where no scenario knows that."""
    kind = datapoint.get("kind")
    return (_view_class(kind) if isinstance(kind, str) else DatapointView)(datapoint)


def _view_class(kind: str) -> type[DatapointView]:
    # Scenarios take torch, which a report without datapoints does not need.
    from nip_astra.scenarios.registry import SCENARIOS

    for name in SCENARIOS.names():
        try:
            scenario = SCENARIOS.get(name)
        except NipAstraError:
            continue  # a package that cannot be imported is told when its scenario is asked for
        if scenario.datapoint_kind == kind:
            return scenario.datapoint_view
    return DatapointView
