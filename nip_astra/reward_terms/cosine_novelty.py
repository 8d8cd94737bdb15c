"""Novelty by embeddings: a probe is worth less, the nearer it is to what was said before.

Shape suffixes: `N` node, `H` probe of the history, `X` embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.history import NoveltyParameters, ProbeHistory
from nip_astra.reward_terms.registry import register_reward_term


@register_reward_term(RewardTermType.COSINE_NOVELTY)
class CosineNovelty(RewardTerm):
    """1 - cosine to everything found so far (curiosity-driven red teaming, arXiv:2402.19464).

    From 0 to 1; a cosine below 0 counts as 0. 1 where nothing was found yet. Probes of one rollout
    do not know of each other: each is compared with what was found before it. A probe without text
    has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """What alike means."""

        embedder: EmbedderParameters = EmbedderParameters()
        """What turns probes into vectors."""
        reduction: Literal["max", "mean"] = "max"
        """max: the cosine to the nearest, so a probe said before has novelty 0: never the same
        again. mean: over all that was said, as often as it was said, as the paper's code does: away
        from the bulk, where a repeated probe still earns something."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._embedder = build_embedder(
            parameters.embedder, device=device, scenario_dir=scenario_dir
        )
        self._history = ProbeHistory(parameters.max_history)
        self._vectors_HX = torch.zeros(0, self._embedder.num_dimensions)
        self._latest: tuple[list[str], Tensor] | None = None

    def _values(self, nodes: RatedProbes) -> Tensor:
        vectors_NX = self._embedded(nodes.probes)
        if len(self._history) == 0:
            return (~nodes.is_empty).float()
        cosines_NH = vectors_NX @ self._vectors_HX.T
        if self.parameters.reduction == "max":
            cosine_N = cosines_NH.amax(dim=1)
            # Rounding must not tell a probe from itself.
            is_known_N = torch.tensor([probe in self._history for probe in nodes.probes])
            cosine_N = cosine_N.masked_fill(is_known_N, 1.0)
        else:
            counts_H = torch.tensor(self._history.counts, dtype=torch.float32)
            cosine_N = cosines_NH @ counts_H / counts_H.sum()
        return (1.0 - cosine_N).clamp(0.0, 1.0).masked_fill(nodes.is_empty, 0.0)

    def observe(self, nodes: RatedProbes) -> None:
        kept = self.parameters.remembered(nodes)
        probes = [nodes.probes[node] for node in kept]
        vectors_KX = self._embedded(nodes.probes)[kept]
        place = {probe: row for row, probe in enumerate(self._history.probes)}
        first_new = len(place)
        for row, probe in enumerate(probes):
            place.setdefault(probe, first_new + row)
        self._history.remember(probes)
        known = torch.cat([self._vectors_HX, vectors_KX])
        # Rows in the history's order, which a checkpoint restores: sums keep their bits.
        self._vectors_HX = known[[place[probe] for probe in self._history.probes]]
        self._latest = None

    def state(self) -> dict[str, Any]:
        return self._history.state() | {"vectors": self._vectors_HX}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
        vectors_HX: Tensor = state["vectors"]
        self._vectors_HX = vectors_HX[len(vectors_HX) - len(self._history) :].clone()

    def _embedded(self, probes: list[str]) -> Tensor:
        """Give the rollout's vectors, which `values` and `observe` both need."""
        if self._latest is None or self._latest[0] != probes:
            self._latest = list(probes), self._embedder.compute(probes)
        return self._latest[1]
