"""Group failing probes that say nearly the same, the most likely first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from nip_astra.report.conversations import order_of
from nip_astra.report.records import Node, RunRecord

MIN_SIMILARITY = 0.6
"""Share of words, in order, that a probe has in common with the group's most likely one."""
MAX_DISTINCT = 1_000
"""Distinct failing probes that are grouped; the likeliest."""
MAX_MEMBERS = 12
"""Distinct probes shown of a group."""


@dataclass
class Member:
    """A distinct failing probe, how often it was said, and the likeliest time of that."""

    node: Node
    num_said: int


@dataclass
class FailureGroup:
    """Failing probes that resemble one another, the most likely first."""

    members: list[Member]

    @property
    def size(self) -> int:
        """Failing responses of the group."""
        return sum(member.num_said for member in self.members)

    @property
    def most_likely(self) -> Node:
        """The failure whose probe is the most likely."""
        return self.members[0].node


@dataclass
class GroupedFailures:
    """All failures of one table.

    Attributes
    ----------
    table : str
        The table that they come from.
    criterion : str
        What "most likely" means here.
    num_left_out : int
        Distinct probes beyond those that were grouped.
    """

    table: str
    criterion: str
    groups: list[FailureGroup]
    num_failures: int
    num_distinct: int
    num_left_out: int


def group_failures(run: RunRecord) -> GroupedFailures | None:
    """Group the failures of the trained attacker, or of training where there is no evaluation.

    A group is led by its most likely probe and takes in each probe of whose words at least
    `MIN_SIMILARITY`, in order, are the leader's (twice the matching words over all words of both).
    Returns None where no table holds a response with a verdict.
    """
    for table in sorted(run.tables, key=lambda name: (order_of(name), name)):
        nodes = [node for node in run.tables[table] if node.response_score is not None]
        if nodes and run.threshold is not None:
            return _grouped(table, [node for node in nodes if node.is_failure(run.threshold)])
    return None


def probe_key(probe: str) -> str:
    """Return the words of a probe, by which equal ones are known."""
    return " ".join(probe.casefold().split())


def _grouped(table: str, failures: Sequence[Node]) -> GroupedFailures:
    has_logprobs = all(node.logprob is not None for node in failures)
    by_probe: dict[str, Node] = {}
    num_said: Counter[str] = Counter()
    for node in sorted(failures, key=lambda node: _unlikeliness(node, has_logprobs)):
        key = probe_key(node.probe)
        by_probe.setdefault(key, node)
        num_said[key] += 1
    groups: list[FailureGroup] = []
    leaders: list[tuple[list[str], Counter[str]]] = []
    for key, node in list(by_probe.items())[:MAX_DISTINCT]:
        words = key.split()
        place = _similar(words, leaders)
        if place is None:
            leaders.append((words, Counter(words)))
            groups.append(FailureGroup([Member(node, num_said[key])]))
        else:
            groups[place].members.append(Member(node, num_said[key]))
    criterion = (
        "log-probability of the whole probe under the reference"
        if has_logprobs
        else "lowest NLL per token of the probe"
    )
    num_left_out = max(len(by_probe) - MAX_DISTINCT, 0)
    return GroupedFailures(table, criterion, groups, len(failures), len(by_probe), num_left_out)


def _similar(words: list[str], leaders: Sequence[tuple[list[str], Counter[str]]]) -> int | None:
    """The first leader that is similar enough."""
    counts = Counter(words)
    for place, (leader, leader_counts) in enumerate(leaders):
        needed = MIN_SIMILARITY * (len(words) + len(leader)) / 2
        # Words in common, in any order, bound those in order; most leaders fail this already.
        if (counts & leader_counts).total() < needed:
            continue
        blocks = SequenceMatcher(None, leader, words, autojunk=False).get_matching_blocks()
        if sum(block.size for block in blocks) >= needed:
            return place
    return None


def _unlikeliness(node: Node, has_logprobs: bool) -> tuple[float, float]:
    logprob = node.logprob if has_logprobs else None
    nll = node.probe_nll if node.probe_nll is not None else float("inf")
    return (nll if logprob is None else -logprob), -(node.response_score or 0.0)
