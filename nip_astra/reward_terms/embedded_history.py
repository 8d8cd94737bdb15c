"""The probes that were found so far, with their vectors.

Shape suffixes: `N` node, `K` node that is remembered, `H` probe of the history, `X` embedding.
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
    """A `ProbeHistory` that tells how alike probes are to those it remembers.

    Parameters
    ----------
    embedder : Embedder
        What turns probes into vectors.
    max_size : int
        Distinct probes that are remembered.
    """

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
        """How often each remembered probe was said, float32 `[H]`."""
        return torch.tensor(self._history.counts, dtype=torch.float32)

    def cosines(self, probes: Sequence[str]) -> Tensor:
        """The cosine of each probe to each that is remembered, float32 `[N, H]`."""
        return self._embedded(probes) @ self._vectors_HX.T

    def remember(self, probes: Sequence[str], kept: Sequence[int]) -> None:
        """Take in a rollout's probes, of which only those at `kept` are remembered."""
        vectors_KX = self._embedded(probes)[kept]
        said = [probes[node] for node in kept]
        place = {probe: row for row, probe in enumerate(self._history.probes)}
        first_new = len(place)
        for row, probe in enumerate(said):
            place.setdefault(probe, first_new + row)
        self._history.remember(said)
        known = torch.cat([self._vectors_HX, vectors_KX])
        # Rows in the history's order, which a checkpoint restores: sums keep their bits.
        self._vectors_HX = known[[place[probe] for probe in self._history.probes]]
        self._latest = None

    def state(self) -> dict[str, Any]:
        """What is remembered, for a checkpoint."""
        return self._history.state() | {"vectors": self._vectors_HX}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; where less is remembered now, the oldest are forgotten."""
        self._history.load_state(state)
        vectors_HX: Tensor = state["vectors"]
        self._vectors_HX = vectors_HX[len(vectors_HX) - len(self._history) :].clone()
        self._latest = None

    def _embedded(self, probes: Sequence[str]) -> Tensor:
        """The rollout's vectors, which are needed when it is rated and when remembered."""
        if self._latest is None or self._latest[0] != list(probes):
            self._latest = list(probes), self._embedder.compute(probes)
        return self._latest[1]


class EmbeddedTerm(RewardTerm):
    """A term that compares probes with those remembered by their vectors.

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
