"""Put rows of conversations back into trees, and choose those that a page shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from nip_astra.report.paths import Anchors, label_of
from nip_astra.report.records import Node, RunRecord
from nip_astra.report.wording import decimal

MAX_NODES = 5_000
"""Nodes that a page shows at most."""
MAX_CHARACTERS = 1_400_000
"""Size of the conversations of a page at most, markup included."""
FIRST_EPISODES = 20
"""Episodes of a list that are in view; the others are folded away."""
NUM_SHADES = 10
"""Steps of the colour scale."""
_MARKUP_OF_NODE = 260
_MARKUP_OF_EPISODE = 480
_CHAINS = re.compile(r"before|evaluation|evaluations/.*")
"""Tables of conversations that do not branch, so turns follow one another by depth."""
TITLES = {"evaluation": "After training, held-out", "before": "Before training, held-out"}
TITLES |= {"train": "During training"}
_ORDER = ["evaluation", "train", "before"]


@dataclass
class Turn:
    """A node as the page shows it.

    Attributes
    ----------
    shade, score_shade : int or None
        Colour by reward, from the run's lowest to its highest, and by score, from 0 to 1.
    outcome : str
        "failure", "none", "undetermined" or "error".
    figures : list of (name, value)
        What is known of the turn.
    is_open : bool
        Whether it lies on the way to the best rewarded node.
    anchor : str
        Its id on the page; empty where its rows do not name one turn.
    """

    node: Node
    shade: int | None
    score_shade: int | None
    outcome: str
    figures: list[tuple[str, str]]
    children: list[Turn] = field(default_factory=list)
    is_open: bool = False
    anchor: str = ""


@dataclass
class Episode:
    """A conversation from one opening prompt, or its tree.

    Attributes
    ----------
    is_flat : bool
        Whether the rows do not say which turn follows which.
    anchor : str
        Its id on the page.
    label : str
        What it is called.
    plants, clusters : list[int]
        Planted failures and clusters that its failures belong to, by their places.
    """

    prompt: str
    turns: list[Turn]
    roots: list[Turn]
    is_flat: bool
    anchor: str = ""
    label: str = ""
    plants: list[int] = field(default_factory=list)
    clusters: list[int] = field(default_factory=list)

    @property
    def reward(self) -> float | None:
        """The highest reward of a turn."""
        known = [turn.node.reward for turn in self.turns if turn.node.reward is not None]
        return max(known, default=None)

    @property
    def first_failure(self) -> int | None:
        """The earliest turn at which the target failed, from 1."""
        failed = [turn.node.depth + 1 for turn in self.turns if turn.outcome == "failure"]
        return min(failed, default=None)

    @property
    def is_failed(self) -> bool:
        """Whether some response failed."""
        return any(turn.outcome == "failure" for turn in self.turns)

    @property
    def is_chain(self) -> bool:
        """Whether every turn has at most one that follows it, so it reads as a transcript."""
        if self.is_flat or len(self.roots) != 1:
            return False
        return all(len(turn.children) <= 1 for turn in self.turns)

    @property
    def levels(self) -> list[Turn]:
        """The worst turn of each depth."""
        worst: dict[int, Turn] = {}
        for turn in self.turns:
            known = worst.get(turn.node.depth)
            if known is None or _score(turn) > _score(known):
                worst[turn.node.depth] = turn
        return [worst[depth] for depth in sorted(worst)]

    @property
    def worst(self) -> Turn:
        """The turn with the highest score."""
        return max(self.turns, key=_score)

    @property
    def rank(self) -> tuple[float, float]:
        """What episodes are ordered by: highest score, then highest reward."""
        return _score(self.worst), max(_reward(turn) for turn in self.turns)

    @property
    def size(self) -> int:
        """About how many characters the episode takes on the page."""
        texts = sum(len(turn.node.probe) + len(turn.node.response) for turn in self.turns)
        return texts + len(self.prompt) + _MARKUP_OF_NODE * len(self.turns) + _MARKUP_OF_EPISODE


@dataclass
class Table:
    """Conversations of one table at one iteration, those that the page shows.

    Attributes
    ----------
    sample : str
        How those shown were chosen; empty where all are shown.
    """

    name: str
    title: str
    step: int
    episodes: list[Episode]
    num_episodes: int
    num_nodes: int
    sample: str = ""

    @property
    def num_failed(self) -> int:
        """Episodes shown that hold a failure."""
        return sum(episode.is_failed for episode in self.episodes)


@dataclass(frozen=True)
class Scale:
    """Turns numbers into steps of the colour scale; `low` and below is 0, `high` the last."""

    low: float
    high: float

    def shade(self, value: float | None) -> int | None:
        """The step of a value, None where there is none."""
        if value is None:
            return None
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(max(int(share * NUM_SHADES), 0), NUM_SHADES - 1)


def reward_scale(run: RunRecord) -> Scale:
    """The scale from the lowest to the highest reward of a run's conversations."""
    rewards = [node.reward for nodes in run.tables.values() for node in nodes]
    known = [reward for reward in rewards if reward is not None]
    return Scale(min(known), max(known)) if known else Scale(0.0, 0.0)


def tables_of(
    run: RunRecord, *, max_nodes: int, max_characters: int, prefix: str = "conversations"
) -> list[Table]:
    """A run's conversations by table and iteration, a sample where they are too many.

    `prefix` begins the ids of conversations on the page.
    """
    scale = reward_scale(run)
    anchors = Anchors(prefix)
    tables = []
    for name in sorted(run.tables, key=_place):
        by_step: dict[int, list[Node]] = {}
        for node in run.tables[name]:
            by_step.setdefault(node.step, []).append(node)
        for step in sorted(by_step, reverse=True):
            episodes = _episodes(name, by_step[step], scale, run.threshold)
            _name_turns(name, episodes, anchors)
            title = TITLES.get(name, name.replace("evaluations/", "Evaluation "))
            tables.append(Table(name, title, step, episodes, len(episodes), len(by_step[step])))
    sizes = [sum(episode.size for episode in table.episodes) for table in tables]
    limits = [
        _shares([table.num_nodes for table in tables], max_nodes),
        _shares(sizes, max_characters),
    ]
    for table, num_nodes, num_characters in zip(tables, *limits, strict=True):
        _choose(table, num_nodes, num_characters)
    return tables


def _name_turns(table: str, episodes: Sequence[Episode], anchors: Anchors) -> None:
    """Conversations and turns their ids, in the order in which they were played."""
    for episode in sorted(episodes, key=lambda one: one.turns[0].node.conversation):
        first = episode.turns[0].node
        episode.anchor = anchors.new(table, first)
        episode.label = label_of(table, first)
        taken: set[str] = set()
        for turn in () if episode.is_flat else episode.turns:
            branch = "" if episode.is_chain else f"-{turn.node.node}"
            anchor = f"{episode.anchor}-t{turn.node.depth + 1}{branch}"
            turn.anchor = "" if anchor in taken else anchor
            taken.add(anchor)


def order_of(table: str) -> int:
    """The place of a table among those of a run; the trained attacker's comes first."""
    return _ORDER.index(table) if table in _ORDER else 0


def _place(table: str) -> tuple[int, str]:
    return order_of(table), table


def _episodes(
    table: str, nodes: Sequence[Node], scale: Scale, threshold: float | None
) -> list[Episode]:
    gathered: dict[tuple[int, str], list[Node]] = {}
    for node in nodes:
        gathered.setdefault(node.conversation, []).append(node)
    is_chain = bool(_CHAINS.fullmatch(table))
    episodes = [
        _episode(members, scale, threshold, is_chain=is_chain) for members in gathered.values()
    ]
    return sorted(episodes, key=lambda episode: episode.rank, reverse=True)


def _episode(
    nodes: list[Node], scale: Scale, threshold: float | None, *, is_chain: bool
) -> Episode:
    turns = [_turn(node, scale, threshold) for node in nodes]
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
    """Hang each turn under its parent and give the roots; mark the way to the best reward."""
    by_index = {turn.node.node: turn for turn in turns}
    above: dict[int, Turn] = {}
    roots = []
    for turn in turns:
        parent = by_index.get(turn.node.parent)
        # A parent is one turn earlier; anything else is a broken row, and could make a circle.
        if parent is None or parent.node.depth != turn.node.depth - 1:
            roots.append(turn)
        else:
            parent.children.append(turn)
            above[id(turn)] = parent
    on_the_way: Turn | None = max(turns, key=_reward)
    while on_the_way is not None:
        on_the_way.is_open = True
        on_the_way = above.get(id(on_the_way))
    return roots


def _turn(node: Node, scale: Scale, threshold: float | None) -> Turn:
    if node.is_error:
        outcome = "error"
    elif node.response_score is None:
        outcome = "undetermined"
    else:
        outcome = "failure" if node.is_failure(threshold) else "none"
    scores = {"score": node.response_score, "with probe": node.combined_score}
    shown = [(name, f"{value:.3f}") for name, value in scores.items() if value is not None]
    figures = {"reward": node.reward, "NLL": node.probe_nll, **node.reward_parts}
    shown += [(name, decimal(value)) for name, value in figures.items() if value is not None]
    if outcome in ("error", "undetermined"):
        shown.insert(0, ("score", "scorer failed" if node.is_error else "no verdict"))
    shade, score_shade = scale.shade(node.reward), Scale(0.0, 1.0).shade(node.response_score)
    return Turn(node, shade, score_shade, outcome, shown)


def _shares(sizes: Sequence[int], total: int) -> list[int]:
    """Divide a total among tables: small ones get all they need, large ones equal parts."""
    shares = [0] * len(sizes)
    left = total
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        shares[index] = min(sizes[index], left // (len(sizes) - place))
        left -= shares[index]
    return shares


def _choose(table: Table, max_nodes: int, max_characters: int) -> None:
    """Keep what fits: half the worst episodes, and half spread over the others."""
    if _fits(table.episodes, max_nodes, max_characters):
        return
    mean_nodes = max(sum(len(one.turns) for one in table.episodes) / table.num_episodes, 1.0)
    mean_size = sum(one.size for one in table.episodes) / table.num_episodes
    num_kept = max(int(min(max_nodes / mean_nodes, max_characters / mean_size)), 1)
    chosen = _spread(table.episodes, num_kept)
    while len(chosen) > 1 and not _fits(chosen, max_nodes, max_characters):
        num_kept = max(num_kept * 4 // 5, 1)
        chosen = _spread(table.episodes, num_kept)
    num_nodes = sum(len(episode.turns) for episode in chosen)
    table.episodes = chosen
    table.sample = (
        f"A sample of {len(chosen):,} of {table.num_episodes:,} conversations ({num_nodes:,} of "
        f"{table.num_nodes:,} turns): the {_num_worst(num_kept):,} with the highest scores and "
        "others at equal distances in the order of scores. All are in the run's rollouts folder."
    )


def _fits(episodes: Iterable[Episode], max_nodes: int, max_characters: int) -> bool:
    chosen = list(episodes)
    num_nodes = sum(len(episode.turns) for episode in chosen)
    return num_nodes <= max_nodes and sum(one.size for one in chosen) <= max_characters


def _num_worst(num_kept: int) -> int:
    return (num_kept + 1) // 2


def _spread(episodes: list[Episode], num_kept: int) -> list[Episode]:
    worst, others = episodes[: _num_worst(num_kept)], episodes[_num_worst(num_kept) :]
    wanted = num_kept - len(worst)
    return worst + [others[len(others) * place // wanted] for place in range(wanted)]


def _score(turn: Turn) -> float:
    return -1.0 if turn.node.response_score is None else turn.node.response_score


def _reward(turn: Turn) -> float:
    return -1e30 if turn.node.reward is None else turn.node.reward
