"""Embedded history of probes.

Shape suffixes: `N` node, `K` stored node, `H` probe of the history, `X` embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.language_models.embeddings import Embedder, build_embedder
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.history import ProbeHistory


class EmbeddedHistory:
    """A `ProbeHistory` with embeddings, to compare probes with earlier ones."""

    def __init__(self, embedder: Embedder, max_size: int) -> None:
        self._embedder = embedder
        self._history = ProbeHistory(max_size)
        self._vectors_HX = torch.zeros(0, embedder.num_dimensions)
        self._latest: tuple[list[str], Tensor] | None = None

    def __len__(self) -> int:
        return len(self._history)

    def __contains__(self, probe: str) -> bool:
        return probe in self._history

    @property
    def counts(self) -> Tensor:
        """Number of occurrences of each stored probe, float32 `[H]`."""
        return torch.tensor(self._history.counts, dtype=torch.float32)

    def cosines(self, probes: Sequence[str]) -> Tensor:
        """Cosine of each probe to each stored one, float32 `[N, H]`."""
        return self._embedded(probes) @ self._vectors_HX.T

    def remember(self, probes: Sequence[str], kept: Sequence[int]) -> None:
        """Store the probes of a rollout at the indices `kept`."""
        vectors_KX = self._embedded(probes)[kept]
        stored = [probes[node] for node in kept]
        row_of = {probe: row for row, probe in enumerate(self._history.probes)}
        first_new = len(row_of)
        for row, probe in enumerate(stored):
            row_of.setdefault(probe, first_new + row)
        self._history.remember(stored)
        vectors = torch.cat([self._vectors_HX, vectors_KX])
        # In the history's order, which a checkpoint restores, so that sums are bit-identical.
        self._vectors_HX = vectors[[row_of[probe] for probe in self._history.probes]]
        self._latest = None

    def state(self) -> dict[str, Any]:
        """The history for a checkpoint."""
        return self._history.state() | {"vectors": self._vectors_HX}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`; a smaller `max_size` drops the oldest."""
        self._history.load_state(state)
        vectors_HX: Tensor = state["vectors"]
        self._vectors_HX = vectors_HX[len(vectors_HX) - len(self._history) :].clone()
        self._latest = None

    def _embedded(self, probes: Sequence[str]) -> Tensor:
        """Embeddings of a rollout, computed once for its values and its storage."""
        if self._latest is None or self._latest[0] != list(probes):
            self._latest = list(probes), self._embedder.compute(probes)
        return self._latest[1]


class EmbeddedTerm(RewardTerm):
    """A term that compares probes with the embedded history.

    Its `Parameters` are `NoveltyParameters` with an `embedder`.
    """

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        embedder = build_embedder(parameters.embedder, device=device, scenario_dir=scenario_dir)
        self._history = EmbeddedHistory(embedder, parameters.max_history)

    def observe(self, nodes: RatedProbes) -> None:
        self._history.remember(nodes.probes, self.parameters.remembered(nodes))

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
