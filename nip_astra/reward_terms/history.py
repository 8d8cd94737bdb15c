"""History of probes, for novelty terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from nip_astra.reward_terms.base import RatedProbes, RewardTerm


class NoveltyParameters(RewardTerm.Parameters):
    """Which earlier probes novelty is measured against."""

    max_history: int = Field(default=10_000, ge=1)
    """Maximum number of distinct probes in the history; beyond it the least recent are dropped.
    Larger keeps the attacker from returning to earlier probes."""
    min_score: float | None = Field(default=None, ge=0, le=1)
    """Only probes whose response scores at least this are stored; null stores all. With it a
    failure counts as new until a similar failure is stored, however common its words."""

    def remembered(self, nodes: RatedProbes) -> list[int]:
        """Indices of the nodes whose probes are stored."""
        if self.min_score is None:
            return list(range(nodes.num_nodes))
        stored: list[int] = (nodes.response_score_N >= self.min_score).nonzero().flatten().tolist()
        return stored


class HistoryChange(NamedTuple):
    """Distinct probes added to and dropped from a history; disjoint."""

    added: list[str]
    forgotten: list[str]


class ProbeHistory:
    """Distinct probes by recency, with their counts.

    A repeated probe becomes the newest. Beyond `max_size` the oldest are dropped with their counts.
    Probes without text are not stored.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, probe: str) -> bool:
        return probe in self._counts

    @property
    def probes(self) -> list[str]:
        """The probes, most recent last."""
        return list(self._counts)

    @property
    def counts(self) -> list[int]:
        """Occurrences of each probe since it was added."""
        return list(self._counts.values())

    def remember(self, probes: Sequence[str]) -> HistoryChange:
        """Add probes in order; the change of the set."""
        before = set(self._counts)
        for probe in probes:
            if probe.strip():
                self._counts[probe] = self._counts.pop(probe, 0) + 1
        forgotten = list(self._counts)[: max(0, len(self._counts) - self.max_size)]
        for probe in forgotten:
            del self._counts[probe]
        return HistoryChange(
            [probe for probe in dict.fromkeys(probes) if probe in self and probe not in before],
            [probe for probe in forgotten if probe in before],
        )

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"probes": self.probes, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; a smaller `max_size` drops the oldest."""
        self._counts = dict(zip(state["probes"], state["counts"], strict=True))
        self.remember([])
