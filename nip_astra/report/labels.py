"""Say of each conversation which planted failures and which clusters it belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nip_astra.report import evaluations
from nip_astra.report.failure_groups import GroupedFailures, probe_key
from nip_astra.report.paths import Paths
from nip_astra.report.records import Node, RunRecord, items, mapping, text

MAX_CLUSTERS = 40
"""Clusters of a table that a reader can choose, those that the page shows."""


class ClusterLabel(NamedTuple):
    """A cluster of failures that a reader can choose."""

    table: str
    number: int
    size: int


class _Plant(NamedTuple):
    """A planted failure as the parameters have it."""

    name: str
    probe: re.Pattern[str]
    previous_probe: re.Pattern[str] | None

    def is_met(self, path: Sequence[Node]) -> bool:
        if self.probe.search(path[-1].probe) is None:
            return False
        if self.previous_probe is None:
            return True
        return len(path) > 1 and self.previous_probe.search(path[-2].probe) is not None


class Labels:
    """Planted failures and clusters of a run, each by its place in a list.

    Attributes
    ----------
    plants : list[str]
        Names of the planted failures.
    clusters : list[ClusterLabel]
        Clusters of all tables; those of an evaluation are its own, others are by wording.
    """

    def __init__(self, run: RunRecord, grouped: GroupedFailures | None) -> None:
        self._threshold = run.threshold
        self._planted = list(_plants_of(run))
        self.plants = [plant.name for plant in self._planted]
        self.clusters: list[ClusterLabel] = []
        self._by_turn: dict[tuple[str, int, int], int] = {}
        self._by_probe: dict[tuple[str, str], int] = {}
        for name, evaluation in run.evaluations.items():
            table = f"evaluations/{name}"
            found = evaluations.clusters_of(evaluation)[:MAX_CLUSTERS]
            for number, cluster in enumerate(found, start=1):
                self._by_turn |= {(table, *turn): len(self.clusters) for turn in cluster.turns}
                self.clusters.append(ClusterLabel(table, number, int(cluster.size)))
        for number, group in enumerate(grouped.groups[:MAX_CLUSTERS] if grouped else (), start=1):
            assert grouped is not None
            keys = {(grouped.table, probe_key(one.node.probe)) for one in group.members}
            self._by_probe |= dict.fromkeys(keys, len(self.clusters))
            self.clusters.append(ClusterLabel(grouped.table, number, group.size))

    def of(self, table: str, nodes: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Return the planted failures and the clusters of the failures among nodes."""
        failures = [node for node in nodes if node.is_failure(self._threshold)]
        paths = Paths(nodes) if self._planted else None
        plants: set[int] = set()
        clusters: set[int] = set()
        for node in failures:
            own = self._by_turn.get((table, node.episode, node.depth))
            if own is None:
                own = self._by_probe.get((table, probe_key(node.probe)))
            clusters |= set() if own is None else {own}
            if paths is not None:
                path = paths.to(node)
                plants |= {i for i, plant in enumerate(self._planted) if plant.is_met(path)}
        return sorted(plants), sorted(clusters)


def _plants_of(run: RunRecord) -> Iterable[_Plant]:
    for group in run.hyper_params.values():
        for one in map(mapping, items(mapping(group).get("planted_failures"))):
            previous = one.get("previous_probe")
            try:
                probe = re.compile(text(one.get("probe")) or "(?!)")
                before = None if previous is None else re.compile(text(previous))
            except re.error:
                continue
            yield _Plant(text(one.get("name")), probe, before)
