"""Failures: groups and clusters of failing probes, with the conversations that led to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from nip_astra.errors import ConfigurationError
from nip_astra.report.records import Key, Node, RunRecord, items, mapping, node_of, number, text
from nip_astra.report.transcripts import Paths, Table, label_of, order_of
from nip_astra.scenario_base.conversation.planted_failures import PlantedFailure
from nip_astra.utils.formatting import decimal

MIN_SIMILARITY = 0.6
"""Minimum share of words, in order, shared with the group's most likely probe."""
MAX_DISTINCT = 1_000
"""Maximum number of grouped distinct failing probes, the most likely ones."""
MAX_WORDS = 100
"""Maximum number of compared words of a probe, the first."""
MAX_MEMBERS = 12
"""Maximum number of distinct probes shown per group."""
MAX_CLUSTERS = 40
"""Maximum number of selectable clusters per table, as on the page."""
Links = Mapping[tuple[str, Key], str]
"""Ids of the conversations on a page, by table and conversation."""


@dataclass
class Member:
    """A distinct failing probe, the number of its occurrences, and the most likely one."""

    node: Node
    num_occurrences: int


@dataclass
class FailureGroup:
    """Similar failing probes, the most likely first."""

    members: list[Member]

    @property
    def size(self) -> int:
        """Number of failing responses in the group."""
        return sum(member.num_occurrences for member in self.members)


@dataclass
class GroupedFailures:
    """All failures of one table."""

    table: str
    criterion: str  # the meaning of "most likely" here
    groups: list[FailureGroup]
    num_failures: int
    num_distinct: int
    num_left_out: int  # distinct probes beyond those that were grouped


def group_failures(run: RunRecord) -> GroupedFailures | None:
    """Group the failures of the trained attacker, or of training if there is no evaluation.

    A group is led by its most likely probe. A probe joins if at least `MIN_SIMILARITY` of its words
    match the leader's in order (twice their longest common subsequence over the words of both).
    Returns None where no table holds a response with a verdict.
    """
    for table in sorted(run.tables, key=lambda name: (order_of(name), name)):
        nodes = [node for node in run.tables[table] if node.response_score is not None]
        if nodes and nodes[0].threshold is not None:
            return _grouped(table, [node for node in nodes if node.is_failure])
    return None


def probe_key(probe: str) -> str:
    """Return the normalised words of a probe, for comparison."""
    return " ".join(probe.casefold().split())


def _grouped(table: str, failures: Sequence[Node]) -> GroupedFailures:
    has_logprobs = all(node.logprob is not None for node in failures)
    by_probe: dict[str, Node] = {}
    num_occurrences: Counter[str] = Counter()
    for node in sorted(failures, key=lambda node: _unlikeliness(node, has_logprobs)):
        key = probe_key(node.probe)
        by_probe.setdefault(key, node)
        num_occurrences[key] += 1
    groups: list[FailureGroup] = []
    leaders: list[list[str]] = []
    for key, node in list(by_probe.items())[:MAX_DISTINCT]:
        words = key.split()[:MAX_WORDS]
        leader = _similar(words, leaders)
        if leader is None:
            leaders.append(words)
            groups.append(FailureGroup([Member(node, num_occurrences[key])]))
        else:
            groups[leader].members.append(Member(node, num_occurrences[key]))
    criterion = (
        "log-probability of the whole probe under the reference"
        if has_logprobs
        else "lowest NLL per token of the probe"
    )
    num_left_out = max(len(by_probe) - MAX_DISTINCT, 0)
    return GroupedFailures(table, criterion, groups, len(failures), len(by_probe), num_left_out)


def _similar(words: Sequence[str], leaders: Sequence[Sequence[str]]) -> int | None:
    """Return the first leader with a sufficiently long common subsequence.

    Bit-parallel (Hyyro 2004): after each word, as many bits are 0 as words are in common.
    """
    positions: dict[str, int] = {}
    for position, word in enumerate(words):
        positions[word] = positions.get(word, 0) | 1 << position
    every = (1 << len(words)) - 1
    for number_of, leader in enumerate(leaders):
        row = every
        for word in leader:
            common = row & positions.get(word, 0)
            row = (row + common | row - common) & every
        num_in_order = len(words) - row.bit_count()
        if num_in_order >= MIN_SIMILARITY * (len(words) + len(leader)) / 2:
            return number_of
    return None


def _unlikeliness(node: Node, has_logprobs: bool) -> tuple[float, float]:
    logprob = node.logprob if has_logprobs else None
    nll = node.probe_nll if node.probe_nll is not None else float("inf")
    return (nll if logprob is None else -logprob), -(node.response_score or 0.0)


def failures(
    run: RunRecord,
    grouped: GroupedFailures | None,
    tables: Sequence[Table],
    anchor: str,
) -> dict[str, Any] | None:
    """Return the section's values; None if no response has a verdict.

    Examples link to the conversations of `tables`, whose section has the id `anchor`.
    """
    links = {
        (table.name, episode.turns[0].node.conversation): episode.anchor
        for table in tables
        for episode in table.episodes
    }
    clustered: list[dict[str, Any]] = []
    first = 0
    for name, evaluation in run.evaluations.items():
        clusters = clusters_of(evaluation)
        make = _examples(run, f"evaluations/{name}", links)
        likeliest = mapping(evaluation.get("most_likely_failure"))
        groups = [
            vars(cluster)
            | {"number": number, "medoid": None, "shortest": None}
            | {kind: make(node, False) for kind, node in cluster.examples.items()}
            for number, cluster in enumerate(clusters, start=first)
        ]
        if groups:
            clustered.append(
                {
                    "title": f"Evaluation {name}",
                    "groups": groups,
                    "likeliest": make(node_of(likeliest), False) if likeliest else None,
                }
            )
        first += len(clusters)
    if grouped is None and not clustered:
        return None
    groups_shown = grouped.groups[:MAX_CLUSTERS] if grouped else []
    small = grouped.groups[MAX_CLUSTERS:] if grouped else []
    make = _examples(run, grouped.table if grouped else "", links)
    return {
        "clustered": clustered,
        "grouped": grouped if groups_shown else None,
        "shown": [
            {
                "size": group.size,
                "members": group.members,
                "example": make(group.members[0].node, True),
                "others": group.members[1 : MAX_MEMBERS + 1],
                "number": number,
            }
            for number, group in enumerate(groups_shown, start=first)
        ],
        "anchor": anchor,
        "place": "" if anchor == "conversations" else f"{anchor}-",
        "has_filter": bool(tables),
        "num_small": len(small),
        "num_in_small": sum(group.size for group in small),
    }


@dataclass(frozen=True)
class Cluster:
    """A cluster of failures of an evaluation.

    `examples` has the `most_likely` probe, and the `medoid` and the `shortest` where they are
    others; `turns` the episode and depth of the stored members.
    """

    size: float
    share: float | None
    plants: list[str]
    examples: dict[str, Node]
    turns: set[tuple[int, int]]


def clusters_of(evaluation: Mapping[str, Any]) -> list[Cluster]:
    """Return the failure clusters of an evaluation, starting with that of the most likely probe."""
    clusters_stored = [mapping(stored) for stored in items(evaluation.get("clusters"))]
    total = sum(number(stored.get("size")) or 0.0 for stored in clusters_stored)
    clusters = []
    for stored in clusters_stored:
        medoid, likely, shortest = (
            mapping(stored.get(kind)) for kind in ("medoid", "most_likely", "shortest")
        )
        examples = {"most_likely": node_of(likely or medoid)}
        if medoid and likely and medoid != likely:
            examples["medoid"] = node_of(medoid)
        if shortest and shortest.get("probe") != (likely or medoid).get("probe"):
            examples["shortest"] = node_of(shortest)
        size = number(stored.get("size")) or 0.0
        turns = {
            (int(turn[0]), int(turn[1]))
            for turn in items(stored.get("turns"))
            if isinstance(turn, list) and [type(part) for part in turn] == [int, int]
        }
        plants = [text(plant) for plant in items(stored.get("plants"))]
        clusters.append(Cluster(size, size / total if total else None, plants, examples, turns))

    def unlikeliness(cluster: Cluster) -> float:
        node = cluster.examples["most_likely"]
        return (
            -node.reference_logprob if node.reference_logprob is not None else node.probe_nll or 0.0
        )

    # Unknown likelihoods leave the order of the file.
    return sorted(clusters, key=unlikeliness)[:MAX_CLUSTERS]


@dataclass(frozen=True)
class Example:
    """A conversation up to the failing turn that represents a cluster."""

    prompt: str
    turns: list[tuple[Node, bool]]  # each with whether it failed; the last alone if others are lost
    figures: list[tuple[str, str]]  # of the last turn
    label: str = ""  # empty if the conversation is not known
    link: str = ""  # id on the page; empty if it is not shown


def _examples(run: RunRecord, table: str, links: Links) -> Callable[[Node, bool], Example]:
    """Return a builder of examples of a table; nodes not `is_stored` are looked up there."""
    paths = Paths(run.tables.get(table, ()))

    def make(node: Node, is_stored: bool) -> Example:
        stored = node if is_stored else paths.find(node)
        path = [node] if stored is None else paths.to(stored)
        last = node if stored is None else stored
        figures = {"score": last.response_score, "reward": last.reward, "NLL": last.probe_nll}
        figures["log-probability"] = last.logprob
        return Example(
            node.prompt,
            [(turn, turn is path[-1] or turn.is_failure) for turn in path],
            [(name, decimal(value)) for name, value in figures.items() if value is not None],
            "" if stored is None else label_of(table, stored),
            "" if stored is None else links.get((table, stored.conversation), ""),
        )

    return make


class ClusterLabel(NamedTuple):
    """A selectable cluster of failures."""

    table: str
    number: int
    size: int


class Labels:
    """Planted failures and clusters of a run, by index.

    Clusters of an evaluation are its own, others are by wording.
    """

    def __init__(self, run: RunRecord, grouped: GroupedFailures | None) -> None:
        self._planted: list[PlantedFailure] = []
        for group in run.hyper_params.values():
            for stored in map(mapping, items(mapping(group).get("planted_failures"))):
                # Those that cannot be read are omitted.
                with suppress(ConfigurationError):
                    self._planted.append(PlantedFailure.from_dict(stored))
        self.plants = [plant.name for plant in self._planted]
        self.clusters: list[ClusterLabel] = []
        self._by_turn: dict[tuple[str, int, int], int] = {}
        self._by_probe: dict[tuple[str, str], int] = {}
        for name, evaluation in run.evaluations.items():
            table = f"evaluations/{name}"
            for index, cluster in enumerate(clusters_of(evaluation), start=1):
                self._by_turn |= {(table, *turn): len(self.clusters) for turn in cluster.turns}
                self.clusters.append(ClusterLabel(table, index, int(cluster.size)))
        if grouped is None:
            return
        for index, failures in enumerate(grouped.groups[:MAX_CLUSTERS], start=1):
            keys = {(grouped.table, probe_key(member.node.probe)) for member in failures.members}
            self._by_probe |= dict.fromkeys(keys, len(self.clusters))
            self.clusters.append(ClusterLabel(grouped.table, index, failures.size))

    def of(self, table: str, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the planted failures and the clusters of the failures among nodes."""
        failures = [node for node in nodes if node.is_failure]
        paths = Paths(nodes) if self._planted else None
        plants: set[int] = set()
        clusters: set[int] = set()
        for node in failures:
            cluster = self._by_turn.get((table, node.episode, node.depth))
            if cluster is None:
                cluster = self._by_probe.get((table, probe_key(node.probe)))
            clusters |= set() if cluster is None else {cluster}
            if paths is not None:
                previous = next((turn.probe for turn in paths.to(node)[-2:-1]), None)
                met = (plant.matches(node.probe, previous) for plant in self._planted)
                plants |= {index for index, is_met in enumerate(met) if is_met}
        return sorted(plants), sorted(clusters)
