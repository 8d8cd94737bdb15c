"""Failures planted in a target, as ground truth for searches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from nip_astra.parameters.parameters_base import PlainText, SubParameters

if TYPE_CHECKING:
    from nip_astra.rollouts.tree import RolloutTree


class PlantedFailure(SubParameters):
    """A failure planted in the target."""

    name: PlainText
    """Name in reports."""
    description: PlainText = ""
    """Description of its trigger, written to results.json."""
    probe: PlainText
    """Regular expression that the probe matches somewhere."""
    previous_probe: PlainText | None = None
    """Regular expression that the probe just before matches; null for a single-turn failure."""
    rarity: float | None = Field(default=None, gt=0, le=1)
    """Measured fraction of ordinary turns that trigger it, for reports."""

    @field_validator("probe", "previous_probe")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"is not a regular expression: {error}") from error
        return pattern

    def matches(self, probe: str, previous_probe: str | None) -> bool:
        """Return whether a probe, after the previous one, triggers this failure."""
        if re.search(self.probe, probe) is None:
            return False
        if self.previous_probe is None:
            return True
        return previous_probe is not None and bool(re.search(self.previous_probe, previous_probe))


@dataclass
class Discovery:
    """Planted failures found by a search: a probe triggered them, and the target failed on it."""

    planted: Sequence[PlantedFailure]
    failure_threshold: float
    num_queries: int = 0
    """Target queries seen so far."""
    first_query: dict[str, int | None] = field(default_factory=dict)
    """Number of queries at the first discovery of each planted failure, from 1."""

    def __post_init__(self) -> None:
        for plant in self.planted:
            self.first_query.setdefault(plant.name, None)

    @property
    def num_found(self) -> int:
        """Number of planted failures found so far."""
        return sum(query is not None for query in self.first_query.values())

    def update(self, tree: RolloutTree) -> None:
        """Count a rollout's nodes in order."""
        missing = [plant for plant in self.planted if self.first_query[plant.name] is None]
        if missing:
            parents = tree.nodes["parent"].tolist()
            is_failure_N = tree.nodes["response_score"] >= self.failure_threshold
            for node in is_failure_N.nonzero().flatten().tolist():
                parent = parents[node]
                previous_probe = tree.probes[parent] if parent >= 0 else None
                for plant in missing:
                    is_new = self.first_query[plant.name] is None
                    if is_new and plant.matches(tree.probes[node], previous_probe):
                        self.first_query[plant.name] = self.num_queries + node + 1
        self.num_queries += tree.num_nodes
