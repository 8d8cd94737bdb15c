"""Held-out answers, episodes and conversations of a run, paired by item before and after."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from markupsafe import Markup

from nip_astra.evaluation.outcomes import Outcome, episode_outcome
from nip_astra.report.records import (
    CONVERSATION,
    PROTOCOL,
    REASONING,
    TASK,
    Node,
    RunRecord,
    items,
    mapping,
    number,
    text,
    words,
)
from nip_astra.report.transcripts import (
    DECISIONS,
    UNDECIDED,
    by_step,
    conversations_of,
    outcome_of,
)
from nip_astra.safe_text import safe_text
from nip_astra.utils.formatting import count, decimal

FIRST_ITEMS = 20
"""Items per page of a list, and those shown without the script."""
MAX_CHARACTERS = 8_000_000
"""Maximum characters of the texts of a list, beyond which texts are shortened."""
CUTS = (100_000, 4_000, 800, 160)
"""Lengths to which texts are shortened, the first that suffices."""
MAX_CONVERSATIONS = 300_000
"""Maximum characters of a stress test's paired conversations, beyond which some are omitted: all
are listed among the conversations, too."""
RIGHT, WRONG, UNKNOWN = "right", "wrong", "without a verdict"
KINDS = {
    (False, True): "fixed",
    (True, False): "broken",
    (True, True): "right both times",
    (False, False): "wrong both times",
}
"""Names of changes by training, by whether a problem was correct before and after."""
ATTACKED = {
    RIGHT: "failure",
    WRONG: "no failure",
    "fixed": "failing now",
    "broken": "failing no more",
    "right both times": "failing both times",
    "wrong both times": "never failing",
}
"""Names in stress tests, in which an attacker succeeds if its target fails."""
BADGES = {RIGHT: "right", WRONG: "wrong", UNKNOWN: "undecided"}
BADGES |= {kind: "right" if is_correct else "wrong" for (_, is_correct), kind in KINDS.items()}
BADGES |= {ATTACKED[kind]: {"right": "wrong", "wrong": "right"}[BADGES[kind]] for kind in ATTACKED}
"""Styles of the names; a success of an attacker is a failure of its target."""
UNITS = {
    PROTOCOL: ("episode", "num_episodes"),
    TASK: ("problem", "num_problems"),
    CONVERSATION: ("conversation", "num_episodes"),
}
"""The item of each kind of run, and the figure that counts items."""

_TITLES = {"evaluation": "Held out", "train": "During training"}
Message = tuple[str, str]


class Side(NamedTuple):
    """An answer to a problem, or an episode about a datapoint."""

    label: str
    is_correct: bool | None
    reward: float | None
    facts: str
    messages: list[Message]

    @property
    def outcome(self) -> str:
        """Correctness in words."""
        return {True: RIGHT, False: WRONG, None: UNKNOWN}[self.is_correct]


class Entry(NamedTuple):
    """A stored row: the problem's key, title, note and messages, and the answer."""

    key: str
    title: str
    note: str
    prompt: list[Message]
    side: Side


@dataclass
class Item:
    """A problem with its answers before training, if it has any, and after."""

    title: str
    note: str
    prompt: list[Message]
    before: list[Side] = field(default_factory=list)
    after: list[Side] = field(default_factory=list)

    @property
    def sides(self) -> list[Side]:
        """All answers, those after training first."""
        return [*self.after, *self.before]

    @property
    def kind(self) -> str:
        """The change by training, or the outcome of the only side."""
        before, after = (_majority(sides) for sides in (self.before, self.after))
        if before is not None and after is not None:
            return KINDS[before, after]
        is_correct = before if after is None else after
        return UNKNOWN if is_correct is None else RIGHT if is_correct else WRONG


@dataclass
class Group:
    """The items of one table, with those of another one before training if it has the same."""

    title: str
    items: list[Item]
    unit: str
    num_all: int | None = None  # where not all are stored
    limit: int = CUTS[0]
    words: Mapping[str, str] = field(default_factory=dict)  # for kinds, where they differ
    left_out: frozenset[int] = frozenset()  # places of items that the page has no room for

    def named(self, kind: str) -> str:
        """Return the name of a kind."""
        return self.words.get(kind, kind)

    @property
    def counts(self) -> dict[str, int]:
        """Number of items by kind, in the order of kinds."""
        number_of = Counter(item.kind for item in self.items)
        kinds = [*KINDS.values(), RIGHT, WRONG, UNKNOWN]
        return {self.named(kind): number_of[kind] for kind in kinds if number_of[kind]}

    @property
    def tiles(self) -> list[tuple[str, int]]:
        """Return the counts of changes by training, including none; empty without two sides."""
        counts, kinds = self.counts, [self.named(kind) for kind in KINDS.values()]
        if self.num_all is not None or not set(kinds) & set(counts):
            return []
        return [(kind, counts.get(kind, 0)) for kind in kinds]

    @property
    def listed(self) -> list[Item]:
        """The items on the page."""
        return [item for index, item in enumerate(self.items) if index not in self.left_out]

    @property
    def shown(self) -> list[tuple[str, list[Any]]]:
        """Return the first items as kind and values of `data`."""
        return [(self.named(item.kind), self.plain(item)) for item in self.listed[:FIRST_ITEMS]]

    def plain(self, item: Item) -> list[Any]:
        """Return kind, title, note, prompt and sides, for the page's script."""
        sides = [
            [
                side.label,
                self.named(side.outcome),
                side.reward,
                side.facts,
                self._cut(side.messages),
            ]
            for side in item.sides
        ]
        title = safe_text(item.title[: self.limit])
        return [self.named(item.kind), title, safe_text(item.note), self._cut(item.prompt), sides]

    def _cut(self, messages: Iterable[Message]) -> list[list[str]]:
        cut_messages = []
        for role, content in messages:
            end = f" … {len(content) - self.limit:,} characters more"
            cut_content = content if len(content) <= self.limit else content[: self.limit] + end
            cut_messages.append([safe_text(role), safe_text(cut_content)])
        return cut_messages

    @property
    def data(self) -> Markup:
        """Return all items as JSON for a script element, which none of their texts can close."""
        written = json.dumps([self.plain(item) for item in self.listed], separators=(",", ":"))
        return Markup(written.replace("<", "\\u003c"))


def groups_of(run: RunRecord) -> list[Group]:
    """Return the held-out items at the end of a run and of its evaluations, and training answers.

    For stress tests only those that were also sampled before training; the others are listed among
    the conversations.
    """
    kind = run.kind
    tables = _tables_of(run)
    before = tables.pop("before", [])
    # The end of the run first, then evaluations, and what was sampled in training last.
    names = sorted(tables, key=lambda name: (name == "train", name != "evaluation"))
    groups = []
    for name in names:
        entries, stem = tables[name], name.removeprefix("evaluations/")
        title = _TITLES.get(name, f"Evaluation {stem}")
        if name == "train":
            pairs = [Item(*entry[1:4], after=[entry.side]) for entry in entries]
        else:
            # An evaluation of an attacker may be against another target.
            before_of_run = [] if kind == CONVERSATION and name != "evaluation" else before
            untrained = tables.get(f"{name}-untrained") or before_of_run
            pairs = _paired(untrained, entries, keeps_all=name == "evaluation")
        unit, figure = UNITS[kind]
        group = Group(title, pairs, "answer" if name == "train" else unit)
        if name == "evaluation":
            total = number(mapping(run.results.get("after")).get(figure))
            group.num_all = None if total is None or total <= len(pairs) else int(total)
        groups.append(_fitted(group))
    if before and "evaluation" not in tables:
        groups.append(
            _fitted(Group("Before training", _paired(before, [], keeps_all=True), UNITS[kind][0]))
        )
    if kind == CONVERSATION:
        groups = [replace(group, words=ATTACKED, left_out=_left_out(group)) for group in groups]
        return [group for group in groups if group.tiles]
    # A sample of episodes is balanced, so that its counts would mislead.
    return [group for group in groups if not (kind == PROTOCOL and group.num_all)]


def _paired(before: Sequence[Entry], after: Sequence[Entry], *, keeps_all: bool) -> list[Item]:
    """Return an item for each problem of `after`, and with `keeps_all` of `before`, in order."""
    item_by_key: dict[str, Item] = {}
    for entry in after:
        item_by_key.setdefault(entry.key, Item(*entry[1:4])).after.append(entry.side)
    for entry in before:
        if keeps_all or entry.key in item_by_key:
            item = item_by_key.setdefault(entry.key, Item(*entry[1:4]))
            item.before.append(entry.side._replace(label=f"before {entry.side.label}".strip()))
    is_paired = any(item.before for item in item_by_key.values())
    for item in item_by_key.values():
        label = "after" if is_paired else ""
        item.after = [side._replace(label=f"{label} {side.label}".strip()) for side in item.after]
    return list(item_by_key.values())


def _majority(sides: Sequence[Side]) -> bool | None:
    """Return whether more than half of the sides with a verdict are right."""
    verdicts = [side.is_correct for side in sides if side.is_correct is not None]
    return 2 * sum(verdicts) > len(verdicts) if verdicts else None


def _left_out(group: Group) -> frozenset[int]:
    """Return indices of conversations to omit for size, first those unchanged by training."""
    changes = list(KINDS.values())
    kinds = [item.kind for item in group.items]
    ranks = [changes.index(kind) if kind in changes else len(changes) for kind in kinds]
    room, left_out = MAX_CONVERSATIONS, set()
    for index in sorted(range(len(kinds)), key=ranks.__getitem__):
        sides = group.items[index].sides
        room -= sum(len(content) + 30 for side in sides for _, content in side.messages) + 200
        if room < 0:
            left_out.add(index)
    return frozenset(left_out)


def _fitted(group: Group) -> Group:
    texts = [
        content
        for item in group.items
        for messages in (item.prompt, *(side.messages for side in item.sides))
        for _, content in messages
    ]
    lengths = [len(written) for written in (*texts, *(item.title for item in group.items))]
    fitting = (cut for cut in CUTS if sum(min(length, cut) for length in lengths) <= MAX_CHARACTERS)
    group.limit = next(fitting, CUTS[-1])
    return group


def _tables_of(run: RunRecord) -> dict[str, list[Entry]]:
    """Return the entries of each table's last step; of tasks in training, those of all steps."""
    stored: Mapping[str, Sequence[Any]] = run.tables
    if run.kind == PROTOCOL:
        stored = run.episodes | run.outcomes
    entries_of: dict[str, Callable[[RunRecord, Sequence[Any]], Iterator[Entry]]] = {
        PROTOCOL: _episodes,
        TASK: _problems,
        CONVERSATION: _conversations,
    }
    entries_by_table: dict[str, list[Entry]] = {}
    for name, step, rows in by_step(stored):
        if run.kind == TASK and name == "train":
            entries_by_table.setdefault(name, []).extend(
                _problems(run, rows, f"iteration {step:,}")
            )
        elif name != "train" and name not in entries_by_table:
            entries_by_table[name] = list(entries_of[run.kind](run, rows))
    return entries_by_table


def _time_by_time(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield entries so that items that were played several times are paired time by time."""
    seen: Counter[str] = Counter()
    for entry in entries:
        seen[entry.key] += 1
        yield entry._replace(key=f"{entry.key}/{seen[entry.key]}")


def _problems(run: RunRecord, nodes: Sequence[Node], label: str = "") -> Iterator[Entry]:
    """Yield the answers to problems; those of equal texts are paired in their order."""
    options = mapping(mapping(run.hyper_params.get("task")).get("evaluation"))
    success = number(options.get("success_reward"))
    has_runs = max(Counter(node.problem for node in nodes).values()) > 1 and not label
    numbers: dict[str, dict[str, int]] = {}
    for node in nodes:
        same = numbers.setdefault(node.problem_hash, {})
        key = f"{node.problem_hash}/{same.setdefault(node.problem, len(same))}"
        yield _entry_of(node, key, success, label, has_runs)


def _entry_of(node: Node, key: str, success: float | None, label: str, has_runs: bool) -> Entry:
    messages = node.messages
    first_answer = next(
        (i for i, message in enumerate(messages) if message[0] in ("assistant", REASONING)),
        len(messages),
    )
    is_correct = node.is_correct
    if is_correct is None and node.reward is not None and (success is not None or node.reward <= 1):
        is_correct = node.reward >= (1.0 if success is None else success)
    facts = "no reward" if node.reward is None else f"reward {decimal(node.reward)}"
    parts = [f"{words(name)} {decimal(value)}" for name, value in node.reward_parts.items()]
    prompt = messages[:first_answer]
    title = prompt[-1][1] if prompt else node.prompt
    return Entry(
        key,
        title,
        f"solution: {node.solution}" if node.solution else "",
        # A single message is the title already.
        prompt if len(prompt) > 1 else [],
        Side(
            label or (f"run {node.run + 1}" if has_runs else ""),
            *(is_correct, node.reward, ", ".join([facts, *parts]), messages[first_answer:]),
        ),
    )


def _episodes(run: RunRecord, rows: Sequence[Mapping[str, Any]]) -> Iterator[Entry]:
    """Yield the test episodes of a protocol."""
    return _time_by_time(map(_episode, rows))


def _episode(row: Mapping[str, Any]) -> Entry:
    datapoint = mapping(row.get("datapoint"))
    label = number(row.get("y", row.get("label")))
    datapoint_id = count(row.get("datapoint_id", datapoint.get("id")))
    texts = [
        f"{words(name)}: {content}" for name, content in mapping(datapoint.get("texts")).items()
    ]
    decision = row.get("decision")
    decided = number(decision)
    decision_text = text(decision) if decided is None else DECISIONS.get(int(decided), "")
    decision_text = "" if decided == UNDECIDED else decision_text
    rewards = mapping(row.get("rewards"))
    facts = [decision_text or "no decision"]
    facts += [f"reward of {words(name)} {decimal(reward)}" for name, reward in rewards.items()]
    stored = row.get("is_correct")
    is_correct = stored if isinstance(stored, bool) else outcome_of(row) == RIGHT
    right_decision = "" if label is None else DECISIONS.get(int(label), "")
    return Entry(
        f"{datapoint_id}/{label}/{text(row.get('datapoint_hash'))}",
        " · ".join(texts) or f"datapoint {datapoint_id}",
        f"right: {right_decision}" if right_decision else "",
        [],
        Side("", is_correct, None, ", ".join(facts), list(_moves(row))),
    )


def _moves(row: Mapping[str, Any]) -> Iterator[Message]:
    """Yield agents' messages in a text protocol; symbols of networks are in the sample episodes."""
    for round_row in (mapping(round_row) for round_row in items(row.get("rounds"))):
        for move in (mapping(move) for move in items(round_row.get("moves"))):
            sent = [
                message
                for message in mapping(move.get("messages")).values()
                if isinstance(message, str)
            ]
            decision = number(move.get("decision"))
            ended = [] if decision in (None, 2) else [f"({DECISIONS.get(int(decision or 0), '')})"]
            if reasoning := text(move.get("reasoning")):
                yield REASONING, reasoning
            if sent or (ended and not mapping(move.get("messages"))):
                yield words(text(move.get("agent"))), "\n".join([*sent, *ended])


def _conversations(run: RunRecord, nodes: Sequence[Node]) -> Iterator[Entry]:
    """Yield the held-out conversations; training trees have no counterpart."""
    return _time_by_time(
        Entry(prompt, prompt, "", [], _attacked(sorted(turns, key=lambda node: node.depth)))
        for (_, _, prompt), turns in sorted(conversations_of(nodes).items())
    )


def _attacked(turns: Sequence[Node]) -> Side:
    scores = [node.response_score for node in turns if node.response_score is not None]
    outcomes = [node.outcome for node in turns]
    outcome = episode_outcome(outcomes)
    failed = outcome is Outcome.FAILURE
    facts = f"highest score {decimal(max(scores))}" if scores else "no score"
    return Side(
        "",
        failed if outcome.is_known else None,
        max(scores, default=None),
        f"{facts}, fails at turn {outcomes.index(outcome) + 1}" if failed else facts,
        [message for node in turns for message in node.messages_with_reasoning],
    )
