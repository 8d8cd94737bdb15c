"""The probes that were found so far, as far as novelty remembers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from nip_astra.reward_terms.base import RatedProbes, RewardTerm


class NoveltyParameters(RewardTerm.Parameters):
    """What novelty is measured against."""

    max_history: int = Field(default=10_000, ge=1)
    """Distinct probes of training rollouts that are remembered; beyond it, those not said for the
    longest time are forgotten. Larger keeps the attacker from coming back to what it left."""
    min_score: float | None = Field(default=None, ge=0, le=1)
    """A probe is remembered where its response scores at least this; null remembers all. With it
    a failure counts as new until another of its kind was found, however ordinary its words."""

    def remembered(self, nodes: RatedProbes) -> list[int]:
        """The nodes whose probes are remembered."""
        if self.min_score is None:
            return list(range(nodes.num_nodes))
        found: list[int] = (nodes.response_score_N >= self.min_score).nonzero().flatten().tolist()
        return found


class HistoryChange(NamedTuple):
    """Distinct probes that came and went; none is in both."""

    added: list[str]
    forgotten: list[str]


class ProbeHistory:
    """Distinct probes in the order in which each was last said, with how often.

    A probe that is said again becomes the newest. Where there are more than `max_size`, the oldest
    are forgotten with their counts. Probes without text are not remembered.
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
        """The probes, that said last at the end."""
        return list(self._counts)

    @property
    def counts(self) -> list[int]:
        """How often each was said since it came."""
        return list(self._counts.values())

    def remember(self, probes: Sequence[str]) -> HistoryChange:
        """Take in what was said, in order, and tell what came and went."""
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
        """Take what `state` gave; where less is remembered now, the oldest are forgotten."""
        self._counts = dict(zip(state["probes"], state["counts"], strict=True))
        self.remember([])
