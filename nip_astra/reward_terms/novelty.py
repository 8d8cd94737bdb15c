"""Novelty: a probe is worth less, the more similar it is to earlier ones, by embeddings or n-grams.

Shape suffixes: `N` node, `H` probe of the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.reward_terms.embedded_history import EmbeddedTerm
from nip_astra.reward_terms.history import NoveltyParameters, ProbeHistory
from nip_astra.utils.diversity import BleuReferences


@register_reward_term(RewardTermType.COSINE_NOVELTY)
class CosineNovelty(EmbeddedTerm):
    """1 - cosine to earlier probes (curiosity-driven red teaming, arXiv:2402.19464).

    From 0 to 1; a negative cosine counts as 0. 1 with an empty history. Probes of the same rollout
    are not compared. A probe without text has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """Similarity measure."""

        embedder: EmbedderParameters = EmbedderParameters()
        """Embeds the probes."""
        reduction: Literal["max", "mean"] = "max"
        """max: cosine to the nearest probe, so that a repeated probe has novelty 0. mean: mean
        cosine over the history, counted with repetition as in the paper's code, so that a repeated
        probe still has some novelty."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        if len(self._history) == 0:
            return (~nodes.is_empty).float()
        cosines_NH = self._history.cosines(nodes.probes)
        if self.parameters.reduction == "max":
            cosine_N = cosines_NH.amax(dim=1)
            # Exactly 1 for repeated probes, despite rounding.
            is_known_N = torch.tensor([probe in self._history for probe in nodes.probes])
            cosine_N = cosine_N.masked_fill(is_known_N, 1.0)
        else:
            counts_H = self._history.counts
            cosine_N = cosines_NH @ counts_H / counts_H.sum()
        return (1.0 - cosine_N).clamp(0.0, 1.0).masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.SELF_BLEU_NOVELTY)
class SelfBleuNovelty(RewardTerm):
    """1 - BLEU against earlier probes (curiosity-driven red teaming, arXiv:2402.19464).

    BLEU is the mean of BLEU-n over `orders`, with all distinct probes of earlier rollouts as
    references; settings in `nip_astra.utils.diversity`. From 0 (an exact repetition) to 1 (no
    common word, or an empty history). Probes of the same rollout are not compared. A probe without
    text has novelty 0.
    """

    class Parameters(NoveltyParameters):
        """N-grams of BLEU."""

        orders: list[Annotated[int, Field(ge=1, le=8)]] = Field(default=[3, 4, 5], min_length=1)
        """Orders n of the averaged BLEU-n. Larger detects only long copies; 1 compares single
        words."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._history = ProbeHistory(parameters.max_history)
        self._references = BleuReferences(max_order=max(parameters.orders))

    def _values(self, nodes: RatedProbes) -> Tensor:
        novelty_N = 1.0 - self._references.bleu(nodes.probes, orders=self.parameters.orders)
        return novelty_N.masked_fill(nodes.is_empty, 0.0)

    def observe(self, nodes: RatedProbes) -> None:
        kept = self.parameters.remembered(nodes)
        change = self._history.remember([nodes.probes[node] for node in kept])
        self._references.add(change.added)
        self._references.remove(change.forgotten)

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._history.load_state(state)
        self._references = BleuReferences(max_order=max(self.parameters.orders))
        self._references.add(self._history.probes)
