"""Transcripts of a page: conversations, answers to tasks, and protocol episodes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain, groupby, pairwise
from itertools import count as count_from
from operator import itemgetter
from typing import Any, TypeVar

from nip_astra.errors import NipAstraError, counted
from nip_astra.report.charts import agent_colors
from nip_astra.report.records import Key, Node, RunRecord, items, mapping, number, text, words
from nip_astra.scenario_base.protocol.datapoint_views import Choice, DatapointView, Picture
from nip_astra.utils.formatting import count, decimal, percent

AnyRow = TypeVar("AnyRow")
MAX_NODES = 5_000
"""Maximum number of nodes on a page."""
MAX_CHARACTERS = 1_400_000
"""Maximum characters of the conversations of a page, including markup."""
FIRST_EPISODES = 20
"""Number of visible episodes of a list; the others are folded."""
NUM_SHADES = 10
"""Number of steps of the colour scale."""
_MARKUP_OF_NODE = 260
_MARKUP_OF_EPISODE = 480
_CHAINS = re.compile(r"before|evaluation|evaluations/.*")
"""Tables of unbranched conversations, whose turns are ordered by depth."""
MAX_EPISODES = 12
"""Maximum protocol episodes per table and iteration on a page."""
MAX_ROUNDS = 40
"""Maximum rounds of an episode on a page."""
SHOWN_ROUNDS = 3
"""Maximum rounds listed beside a location of a picture."""
DECISIONS = {0: "rejects", 1: "accepts", 2: "goes on"}
UNDECIDED = 2
_TITLES = {"evaluation": "After training, {}", "before": "Before training, {}"}
_TITLES |= {"train": "During training"}
_ORDER = ["evaluation", "train", "before"]
_SPLIT_OF = {"train": "train", "before": "test", "evaluation": "test"}
"""Split of the rollouts that a table of episodes samples."""


# ---- conversations


@dataclass
class Turn:
    """A node as shown on the page."""

    node: Node
    shade: int | None  # by reward, from the run's lowest to its highest
    score_shade: int | None  # by score, from 0 to 1
    outcome: str  # failure, none, undetermined or error
    figures: list[tuple[str, str]]
    children: list[Turn] = field(default_factory=list)
    is_open: bool = False  # on the path to the highest reward
    anchor: str = ""  # empty if its rows do not name one turn


@dataclass
class Episode:
    """A conversation from one opening prompt, or its tree."""

    prompt: str
    turns: list[Turn]
    roots: list[Turn]
    is_flat: bool  # the rows do not say which turn follows which
    anchor: str = ""
    label: str = ""
    plants: list[int] = field(default_factory=list)  # places of those that its failures belong to
    clusters: list[int] = field(default_factory=list)

    @property
    def reward(self) -> float | None:
        """The highest reward of a turn."""
        rewards = [turn.node.reward for turn in self.turns if turn.node.reward is not None]
        return max(rewards, default=None)

    @property
    def first_failure(self) -> int | None:
        """The first turn at which the target failed, from 1."""
        failed = [turn.node.depth + 1 for turn in self.turns if turn.outcome == "failure"]
        return min(failed, default=None)

    @property
    def is_failed(self) -> bool:
        """Whether any response failed."""
        return any(turn.outcome == "failure" for turn in self.turns)

    @property
    def is_chain(self) -> bool:
        """Whether every turn has at most one successor, so it reads as a transcript."""
        if self.is_flat or len(self.roots) != 1:
            return False
        return all(len(turn.children) <= 1 for turn in self.turns)

    @property
    def levels(self) -> list[Turn]:
        """Return the worst turn of each depth."""
        worst: dict[int, Turn] = {}
        for turn in self.turns:
            worst_so_far = worst.get(turn.node.depth)
            if worst_so_far is None or _score(turn) > _score(worst_so_far):
                worst[turn.node.depth] = turn
        return [worst[depth] for depth in sorted(worst)]

    @property
    def worst(self) -> Turn:
        """The turn with the highest score."""
        return max(self.turns, key=_score)

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of episodes: highest score, then highest reward."""
        return _score(self.worst), max(_reward(turn) for turn in self.turns)

    @property
    def size(self) -> int:
        """Approximate number of characters on the page."""
        texts = sum(
            len(content) for turn in self.turns for _, content in turn.node.messages_with_reasoning
        )
        return texts + len(self.prompt) + _MARKUP_OF_NODE * len(self.turns) + _MARKUP_OF_EPISODE


@dataclass
class Table:
    """Conversations of one table at one iteration on the page."""

    name: str
    title: str
    step: int
    episodes: list[Episode]
    num_episodes: int
    num_nodes: int
    sample: str = ""  # how those shown were chosen; empty if all are

    @property
    def num_failed(self) -> int:
        """Number of shown episodes with a failure."""
        return sum(episode.is_failed for episode in self.episodes)


@dataclass(frozen=True)
class Scale:
    """Maps numbers to steps of the colour scale; `low` and below is 0, `high` the last."""

    low: float
    high: float

    def shade(self, value: float | None) -> int | None:
        """Return the step of a value, None for None."""
        if value is None:
            return None
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(max(int(share * NUM_SHADES), 0), NUM_SHADES - 1)


def reward_scale(run: RunRecord) -> Scale:
    """Return the scale from the lowest to the highest reward of a run's conversations."""
    rewards = [node.reward for nodes in run.tables.values() for node in nodes]
    given_rewards = [reward for reward in rewards if reward is not None]
    return Scale(min(given_rewards), max(given_rewards)) if given_rewards else Scale(0.0, 0.0)


def tables_of(run: RunRecord, *, num_runs: int = 1, prefix: str = "conversations") -> list[Table]:
    """Return a run's conversations by table and iteration, a sample if there are too many.

    The page has `num_runs` runs; `prefix` begins the ids of its conversations.
    """
    scale = reward_scale(run)
    anchors_used: set[str] = set()
    tables = []
    for name, step, nodes in by_step(run.tables):
        is_chain = bool(_CHAINS.fullmatch(name))
        gathered = conversations_of(nodes).values()
        episodes = [_episode(members, scale, is_chain=is_chain) for members in gathered]
        episodes.sort(key=lambda episode: episode.rank, reverse=True)
        _name_turns(name, episodes, prefix, anchors_used)
        table = Table(name, title_of(name, "held-out"), step, episodes, len(episodes), len(nodes))
        tables.append(table)
    sizes = [sum(episode.size for episode in table.episodes) for table in tables]
    limits = [
        _shares([table.num_nodes for table in tables], MAX_NODES // num_runs),
        _shares(sizes, MAX_CHARACTERS // num_runs),
    ]
    for table, num_nodes, num_characters in zip(tables, *limits, strict=True):
        _choose(table, num_nodes, num_characters)
    return tables


def _name_turns(
    table: str, episodes: Sequence[Episode], prefix: str, anchors_used: set[str]
) -> None:
    """Assign ids to conversations and turns, equal whenever the page is rendered again."""
    slug = re.sub(r"[^A-Za-z0-9]+", "-", table.removeprefix("evaluations/")).strip("-")
    for episode in sorted(episodes, key=lambda episode: episode.turns[0].node.conversation):
        first = episode.turns[0].node
        stem = f"{prefix}-{slug or 'table'}-{first.step}-{first.episode}"
        repeated_stems = (f"{stem}-again-{number}" for number in count_from(2))
        episode.anchor = next(
            anchor for anchor in chain([stem], repeated_stems) if anchor not in anchors_used
        )
        anchors_used.add(episode.anchor)
        episode.label = label_of(table, first)
        turns: set[str] = set()
        for turn in () if episode.is_flat else episode.turns:
            branch = "" if episode.is_chain else f"-{turn.node.node}"
            anchor = f"{episode.anchor}-t{turn.node.depth + 1}{branch}"
            turn.anchor = "" if anchor in turns else anchor
            turns.add(anchor)


def order_of(table: str) -> int:
    """Return the position of a table among those of a run; the trained attacker's comes first."""
    return _ORDER.index(table) if table in _ORDER else 0


def title_of(table: str, data: str) -> str:
    """Return the heading of a table, with its data."""
    title = table.replace("evaluations/", "Evaluation ")
    return _TITLES[table].format(data) if table in _TITLES else title


def by_step(
    tables: Mapping[str, Sequence[AnyRow]],
) -> Iterator[tuple[str, int, list[AnyRow]]]:
    """Yield name, iteration and rows of each table, the newest iteration first."""
    for name in sorted(tables, key=lambda name: (order_of(name), name)):
        rows_by_step: dict[int, list[AnyRow]] = {}
        for row in tables[name]:
            step = row.step if isinstance(row, Node) else number(mapping(row).get("step"))
            rows_by_step.setdefault(int(step or 0), []).append(row)
        for step in sorted(rows_by_step, reverse=True):
            yield name, step, rows_by_step[step]


def conversations_of(nodes: Iterable[Node]) -> dict[Key, list[Node]]:
    """Group the nodes of a table by conversation, each in the order of the rows."""
    by_conversation: dict[Key, list[Node]] = {}
    for node in nodes:
        by_conversation.setdefault(node.conversation, []).append(node)
    return by_conversation


def _episode(nodes: list[Node], scale: Scale, *, is_chain: bool) -> Episode:
    turns = [_turn(node, scale) for node in nodes]
    if all(turn.node.node is not None and turn.node.parent is not None for turn in turns):
        roots, is_flat = _linked(turns), False
    elif is_chain and sorted(node.depth for node in nodes) == list(range(len(nodes))):
        turns.sort(key=lambda turn: turn.node.depth)
        for before, after in pairwise(turns):
            before.children.append(after)
        roots, is_flat = turns[:1], False
    else:
        turns.sort(key=_score, reverse=True)
        roots, is_flat = turns, True
    return Episode(nodes[0].prompt, turns, roots, is_flat)


def _linked(turns: list[Turn]) -> list[Turn]:
    """Attach each turn to its parent, mark the path to the best reward, and return the roots."""
    by_index = {turn.node.node: turn for turn in turns}
    nodes = {turn.node.node: turn.node for turn in turns}
    above: dict[int, Turn] = {}
    for turn in turns:
        parent = _before(turn.node, nodes)
        if parent is not None:
            above[id(turn)] = by_index[parent.node]
            above[id(turn)].children.append(turn)
    roots = [turn for turn in turns if id(turn) not in above]
    on_path: Turn | None = max(turns, key=_reward)
    while on_path is not None:
        on_path.is_open = True
        on_path = above.get(id(on_path))
    return roots


def _turn(node: Node, scale: Scale) -> Turn:
    outcome = str(node.outcome)
    scores = {"score": node.response_score, "with probe": node.combined_score}
    figures_by_name = [
        (name, f"{value:.3f}") for name, value in scores.items() if value is not None
    ]
    figures = {"reward": node.reward, "NLL": node.probe_nll, **node.reward_parts}
    figures_by_name += [
        (name, decimal(value)) for name, value in figures.items() if value is not None
    ]
    if outcome in ("error", "undetermined"):
        figures_by_name.insert(0, ("score", "scorer failed" if node.is_error else "no verdict"))
    shade, score_shade = scale.shade(node.reward), Scale(0.0, 1.0).shade(node.response_score)
    return Turn(node, shade, score_shade, outcome, figures_by_name)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split a total among tables: small ones get all they need, large ones equal parts."""
    shares = [0] * len(sizes)
    left = total
    for num_done, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        shares[index] = min(sizes[index], left // (len(sizes) - num_done))
        left -= shares[index]
    return shares


def _choose(table: Table, max_nodes: int, max_characters: int) -> None:
    """Keep what fits: half the worst episodes, and half spread over the others."""
    if _fits(table.episodes, max_nodes, max_characters):
        return
    mean_nodes = max(
        sum(len(episode.turns) for episode in table.episodes) / table.num_episodes, 1.0
    )
    mean_size = sum(episode.size for episode in table.episodes) / table.num_episodes
    num_kept = max(int(min(max_nodes / mean_nodes, max_characters / mean_size)), 1)
    sample = _spread(table.episodes, num_kept)
    while len(sample) > 1 and not _fits(sample, max_nodes, max_characters):
        num_kept = max(num_kept * 4 // 5, 1)
        sample = _spread(table.episodes, num_kept)
    num_nodes = sum(len(episode.turns) for episode in sample)
    table.episodes = sample
    table.sample = (
        f"A sample of {len(sample):,} of {counted(table.num_episodes, 'conversation')} "
        f"({num_nodes:,} of {counted(table.num_nodes, 'turn')}): the {(num_kept + 1) // 2:,} with "
        "the highest scores and others at equal distances in the order of scores. All are in the "
        "run's rollouts folder."
    )


def _fits(episodes: Iterable[Episode], max_nodes: int, max_characters: int) -> bool:
    fitted = list(episodes)
    num_nodes = sum(len(episode.turns) for episode in fitted)
    return num_nodes <= max_nodes and sum(episode.size for episode in fitted) <= max_characters


def _spread(episodes: list[Episode], num_kept: int) -> list[Episode]:
    worst, better = episodes[: (num_kept + 1) // 2], episodes[(num_kept + 1) // 2 :]
    num_better = num_kept - len(worst)
    return worst + [better[len(better) * k // num_better] for k in range(num_better)]


def _score(turn: Turn) -> float:
    return -1.0 if turn.node.response_score is None else turn.node.response_score


def _reward(turn: Turn) -> float:
    return -1e30 if turn.node.reward is None else turn.node.reward


class Paths:
    """The turns of one table by conversation."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._conversations = conversations_of(nodes)

    def to(self, node: Node) -> list[Node]:
        """Return the turns from the opening to a node, inclusive.

        Only the node if the rows lack the turns before it.
        """
        conversation = self._conversations.get(node.conversation, [node])
        if node.node is not None and node.parent is not None:
            by_index = {turn.node: turn for turn in conversation}
            path, parent = [node], _before(node, by_index)
            while parent is not None:
                path.append(parent)
                parent = _before(parent, by_index)
            return path[::-1]
        earlier = [turn for turn in conversation if turn.depth < node.depth]
        earlier.sort(key=lambda turn: turn.depth)
        is_chain = [turn.depth for turn in earlier] == list(range(node.depth))
        return [*earlier, node] if is_chain else [node]

    def find(self, like: Node) -> Node | None:
        """Return the turn with the same text at the same position; None without one."""
        matches = (
            node
            for key, nodes in self._conversations.items()
            for node in (nodes if key[1:] == like.conversation[1:] else ())
            if (node.depth, node.probe) == (like.depth, like.probe)
        )
        return next(matches, None)


def _before(node: Node, by_index: Mapping[int | None, Node]) -> Node | None:
    """Return the parent of a node, if its rows have it."""
    parent = by_index.get(node.parent)
    # A parent is one turn earlier; anything else is a broken row, and could make a circle.
    return parent if parent is not None and parent.depth == node.depth - 1 else None


def label_of(table: str, node: Node) -> str:
    """Return the name of a node's conversation."""
    when = f", iteration {node.step:,}" if node.step else ""
    name = table.removeprefix("evaluations/")
    quoted = f"\N{LEFT DOUBLE QUOTATION MARK}{name}\N{RIGHT DOUBLE QUOTATION MARK}"
    return f"conversation {node.episode} of {quoted}{when}"


# ---- episodes of a protocol


@dataclass(frozen=True)
class Move:
    """An agent's message in one channel in a round of a protocol."""

    round: str  # empty in further lines of it
    agent: str
    color: int
    channel: str
    message: str
    decision: str
    reward: str  # in the round; empty for 0 and in further lines of the agent
    chance: str  # of the agent's whole move under its policy
    reasoning: str = ""  # in the agent's first line


@dataclass(frozen=True)
class ProtocolEpisode:
    """A protocol episode as shown on the page."""

    outcome: str  # right, wrong or undecided
    label: str
    decision: str
    num_rounds: int
    rewards: list[tuple[str, int, str]]  # agent, colour, reward
    datapoint: str
    texts: list[tuple[str, str]]
    picture: Picture | None
    lines: list[Move]
    is_cut: bool
    has_channels: bool
    verdicts: list[tuple[str, int, str, str]]  # agent, colour, question, answer of a judge


@dataclass(frozen=True)
class EpisodeTable:
    """Episodes of one table at one iteration."""

    title: str
    step: int
    episodes: list[ProtocolEpisode]
    num_episodes: int
    first_open: frozenset[int]


def episode_tables(run: RunRecord) -> list[EpisodeTable]:
    """Return sample episodes: of each table's last iteration, and of training also the first."""
    colors = agent_colors(run.agents)
    tables: list[EpisodeTable] = []
    for name, parts in groupby(by_step(run.episodes), key=itemgetter(0)):
        newest, *earlier = parts
        for _, step, rows in [newest, *earlier[-1:]]:
            episodes = [_protocol_episode(run, name, row, colors) for row in _mixed(rows)]
            title = title_of(name, "test data").replace("_", " ")
            # In the first table the first right episode is open, and the first other.
            kinds = [episode.outcome == "right" for episode in episodes]
            first = {kinds.index(kind) for kind in kinds} if not tables else set()
            first_open = frozenset(first)
            tables.append(EpisodeTable(title, step, episodes, len(rows), first_open))
    return tables


def _verdicts(run: RunRecord, table: str, row: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield agent, analyser and a judge's answer about an episode."""
    step, episode = number(row.get("step")), number(row.get("episode"))
    sampling = (_SPLIT_OF.get(table, table), int(step or 0) - 1)
    for analysis in run.analyses:
        for judged in map(mapping, items(analysis.get("judged"))):
            if (
                split_and_iteration(analysis) == sampling
                and number(judged.get("rollout")) == episode
            ):
                reason = text(judged.get("reason"))
                answer = text(judged.get("verdict")) + (f": {reason}" if reason else "")
                yield text(judged.get("agent")), words(text(analysis.get("analyser"))), answer


def split_and_iteration(analysis: Mapping[str, Any]) -> tuple[str, int]:
    """Return the rollouts that an analysis is about."""
    return text(analysis.get("split")), int(number(analysis.get("iteration")) or 0)


def outcome_of(row: Mapping[str, Any]) -> str:
    """Describe how an episode ended."""
    decision = number(row.get("decision"))
    if decision is None or decision == UNDECIDED:
        return "undecided"
    return "right" if decision == number(row.get("label")) else "wrong"


def _mixed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Interleave correct, wrong and undecided episodes, the longest of each first."""
    longest = sorted(rows, key=lambda row: -len(items(row.get("rounds"))))
    kinds: dict[str, list[dict[str, Any]]] = {"right": [], "wrong": [], "undecided": []}
    for row in longest:
        kinds[outcome_of(row)].append(row)
    interleaved: list[dict[str, Any]] = []
    while len(interleaved) < min(MAX_EPISODES, len(rows)):
        interleaved += [rows_of_kind.pop(0) for rows_of_kind in kinds.values() if rows_of_kind]
    return interleaved[:MAX_EPISODES]


def _protocol_episode(
    run: RunRecord, table: str, row: Mapping[str, Any], colors: Mapping[str, int]
) -> ProtocolEpisode:
    datapoint = mapping(row.get("datapoint"))
    view = view_of(datapoint)
    rounds = [mapping(round_row) for round_row in items(row.get("rounds"))]
    rounds_shown = rounds[:MAX_ROUNDS]
    rewards = mapping(row.get("rewards"))
    lines = [line for round_row in rounds_shown for line in _round(round_row, view, colors)]
    outcome = outcome_of(row)
    identity = []
    if number(datapoint.get("id")) is not None:
        identity.append(f"datapoint {count(datapoint['id'])}")
    if datapoint.get("note"):
        identity.append(text(datapoint["note"]))
    return ProtocolEpisode(
        outcome=outcome,
        label=_label(row.get("label"), view),
        decision="no decision" if outcome == "undecided" else _label(row["decision"], view),
        num_rounds=len(rounds),
        rewards=[(words(name), colors.get(name, 0), decimal(rewards[name])) for name in rewards],
        datapoint="; ".join(identity),
        texts=[
            (words(name), text(content))
            for name, content in mapping(datapoint.get("texts")).items()
        ],
        picture=view.picture(_choices(rounds_shown, view, colors)),
        lines=lines,
        is_cut=len(rounds) > len(rounds_shown),
        has_channels=len({line.channel for line in lines if line.channel}) > 1,
        verdicts=[
            (words(agent), colors.get(agent, 0), question, answer)
            for agent, question, answer in _verdicts(run, table, row)
        ],
    )


def _label(value: Any, view: DatapointView) -> str:
    label = number(value)
    return f"label {count(value)}" if label is None else view.label(int(label))


def _round(
    round_row: Mapping[str, Any], view: DatapointView, colors: Mapping[str, int]
) -> list[Move]:
    """Return the lines of a round: one per agent and channel, and rewards of inactive agents."""
    rewards = {
        name: number(value) or 0.0 for name, value in mapping(round_row.get("rewards")).items()
    }
    moves: list[Move] = []
    for move in (mapping(move) for move in items(round_row.get("moves"))):
        agent = text(move.get("agent"))
        messages = mapping(move.get("messages"))
        linear = mapping(move.get("linear"))
        decision = number(move.get("decision"))
        for index, channel in enumerate(messages or {"": []}):
            is_first = index == 0
            logprob = number(move.get("logprob")) if is_first else None
            moves.append(
                Move(
                    round="" if moves else count(round_row.get("round")),
                    agent=words(agent),
                    color=colors.get(agent, 0),
                    channel=words(channel),
                    message=_message(messages.get(channel), linear.get(channel), view),
                    decision=DECISIONS.get(int(decision), "")
                    if is_first and decision is not None
                    else "",
                    reward=_signed(rewards.pop(agent, 0.0)) if is_first else "",
                    chance=percent(math.exp(min(logprob, 0.0))) if logprob is not None else "",
                    reasoning=text(move.get("reasoning")) if is_first else "",
                )
            )
    for agent, reward in rewards.items():
        if reward:
            number_shown = "" if moves else count(round_row.get("round"))
            where = (number_shown, words(agent), colors.get(agent, 0))
            moves.append(Move(*where, "", "", "", _signed(reward), ""))
    return moves


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{decimal(value)}" if value else ""


def _message(symbols: Any, linear: Any, view: DatapointView) -> str:
    """Format a message in the scenario's own terms; texts are unchanged."""
    if isinstance(symbols, str):
        return symbols
    symbol_names = [
        view.symbol(int(symbol))
        for value in items(symbols)
        if (symbol := number(value)) is not None
    ]
    plain = [count(symbol) for symbol in items(linear)]
    written = ", ".join(symbol_names)
    return f"{written} + symbol {', '.join(plain)}" if plain else written


def _choices(
    rounds: Sequence[Mapping[str, Any]], view: DatapointView, colors: Mapping[str, int]
) -> list[Choice]:
    """Return the named locations, each once per agent, with the rounds."""
    rounds_by_choice: dict[tuple[int, int, str], list[str]] = {}
    for round_row in rounds:
        for move in (mapping(move) for move in items(round_row.get("moves"))):
            for symbols in mapping(move.get("messages")).values():
                for symbol in (number(value) for value in items(symbols)):
                    location = None if symbol is None else view.place_of(int(symbol))
                    if location is not None:
                        rounds_named = rounds_by_choice.setdefault(
                            (*location, text(move.get("agent"))), []
                        )
                        rounds_named.append(count(round_row.get("round")))
    choices = []
    for (part, at, agent), round_numbers in rounds_by_choice.items():
        distinct = list(dict.fromkeys(round_numbers))
        rounds_text = ", ".join(distinct[:SHOWN_ROUNDS])
        if len(distinct) > SHOWN_ROUNDS:
            rounds_text += f" +{len(distinct) - SHOWN_ROUNDS}"
        choices.append(Choice(part, at, words(agent), colors.get(agent, 0), rounds_text))
    return choices


_BUILT_IN_VIEWS = {
    "graphs": "nip_astra.scenarios.graphs.drawing.GraphsView",
    "image": "nip_astra.scenarios.images.drawing.ImageView",
    "text": "nip_astra.scenario_base.protocol.datapoint_views.TextView",
}
"""Views of the built-in scenarios by kind of datapoint: the scenarios themselves import torch."""


def view_of(datapoint: Mapping[str, Any]) -> DatapointView:
    """Return the view of a datapoint; a plain one if no scenario knows its kind."""
    kind = datapoint.get("kind")
    if not isinstance(kind, str):
        return DatapointView(datapoint)
    if kind in _BUILT_IN_VIEWS:
        module, _, name = _BUILT_IN_VIEWS[kind].rpartition(".")
        view: DatapointView = getattr(import_module(module), name)(datapoint)
        return view
    from nip_astra.scenarios.registry import SCENARIOS

    for name in SCENARIOS.names():
        if SCENARIOS.is_built_in(name):
            continue
        try:
            scenario = SCENARIOS.get(name)
        except NipAstraError:
            continue  # its package cannot be imported
        if scenario.datapoint_kind == kind:
            return scenario.datapoint_view(datapoint)
    return DatapointView(datapoint)
