"""Novelty by embeddings: a probe is worth less, the nearer it is to what was said before.

Shape suffixes: `N` node, `H` probe of the history.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes
from nip_astra.reward_terms.embedded_history import EmbeddedTerm
from nip_astra.reward_terms.history import NoveltyParameters
from nip_astra.reward_terms.registry import register_reward_term


@register_reward_term(RewardTermType.COSINE_NOVELTY)
class CosineNovelty(EmbeddedTerm):
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

    def _values(self, nodes: RatedProbes) -> Tensor:
        if len(self._history) == 0:
            return (~nodes.is_empty).float()
        cosines_NH = self._history.cosines(nodes.probes)
        if self.parameters.reduction == "max":
            cosine_N = cosines_NH.amax(dim=1)
            # Rounding must not tell a probe from itself.
            is_known_N = torch.tensor([probe in self._history for probe in nodes.probes])
            cosine_N = cosine_N.masked_fill(is_known_N, 1.0)
        else:
            counts_H = self._history.counts
            cosine_N = cosines_NH @ counts_H / counts_H.sum()
        return (1.0 - cosine_N).clamp(0.0, 1.0).masked_fill(nodes.is_empty, 0.0)
