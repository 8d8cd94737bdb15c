"""Rarity of failures: a failure is worth less, the more similar failures there are.

Shape suffixes: `N` node, `H` probe of the history, `P` part of the nodes, `X` embedding.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters, build_embedder
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.reward_terms.novelty import EmbeddedTerm, NoveltyParameters

TOLERANCE = 1e-5
"""Tolerance of cosines for rounding."""
PART_SIZE = 1024
"""Nodes per block of the cosine matrix."""


@register_reward_term(RewardTermType.FAILURE_RARITY)
class FailureRarity(EmbeddedTerm):
    """Rarity of similar failures in earlier rollouts, 0 to 1.

    With N failures in earlier rollouts (counted with repetition), n of them similar (by cosine),
    the value depends on `shape`

    - `log`: `1 - log(1 + n) / log(1 + N)`, 1 before the first failure;
    - `inverse_root`: `1 / sqrt(1 + n)`, the bonus of count-based exploration (arXiv:1606.01868).

    By default it is multiplied by the response's score, so that it ranks failures: without a
    failure, novelty earns nothing. Probes of the same rollout are not compared. A probe without
    text has rarity 0.
    """

    class Parameters(NoveltyParameters):
        """Similarity of failures, and how fast the reward of a repeated kind decays."""

        scaled_by_score: bool = True
        """Whether the value is multiplied by the response's score (0 without a verdict). False also
        rewards probes unlike earlier failures if the target does not fail."""
        min_score: float = Field(default=0.5, ge=0, le=1)
        """A probe counts as a failure if its response scores at least this."""
        similarity: float = Field(default=0.5, gt=0, le=1)
        """Minimum cosine of similar failures. Larger makes more and smaller kinds; at 1, any
        difference in spelling makes a new kind."""
        shape: Literal["log", "inverse_root"] = "log"
        """log: by the share of similar failures, on a log scale, so that the pressure towards rare
        kinds persists. inverse_root: by their number alone, so that it fades as all kinds become
        frequent."""
        embedder: EmbedderParameters = EmbedderParameters()
        """Embeds the probes."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        cosines_NH = self._cosines(nodes.probes)
        is_similar_NH = cosines_NH >= self.parameters.similarity - TOLERANCE
        counts_H = self._counts().double()
        num_similar_N = is_similar_NH.double() @ counts_H
        rarity_N: Tensor
        if self.parameters.shape == "inverse_root":
            rarity_N = (1.0 + num_similar_N).rsqrt()
        else:
            # At least 1, so that log(1 + N) is not 0 before the first failure.
            num_failures = max(1.0, float(counts_H.sum()))
            rarity_N = 1.0 - num_similar_N.log1p() / math.log1p(num_failures)
        return rarity_N.masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.FAILURE_SHARING)
class FailureSharing(RewardTerm):
    """Rarity of similar failures in the same rollout, 0 to 1.

    With F other failures in the same rollout, n of them similar (by cosine), it is
    `1 - log(1 + n) / log(1 + F)`: 1 if none is similar, 0 if all are. This is fitness sharing,
    which keeps a population on several optima (Goldberg and Richardson 1987). `failure_rarity`
    compares with earlier iterations instead, so an attacker may swing from kind to kind.

    By default it is multiplied by the response's score, so that it ranks failures. A probe without
    text has value 0. The term is stateless.
    """

    class Parameters(RewardTerm.Parameters):
        """Similarity of failures."""

        scaled_by_score: bool = True
        """Whether the value is multiplied by the response's score (0 without a verdict). False also
        rewards probes unlike other failures if the target does not fail."""
        min_score: float = Field(default=0.5, ge=0, le=1)
        """A probe is a failure if its response scores at least this."""
        similarity: float = Field(default=0.5, gt=0, le=1)
        """Minimum cosine of similar failures. Larger makes more and smaller kinds; at 1, any
        difference in spelling makes a new kind."""
        embedder: EmbedderParameters = EmbedderParameters()
        """Embeds the probes."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._embedder = build_embedder(
            parameters.embedder, device=device, scenario_dir=scenario_dir
        )

    def _values(self, nodes: RatedProbes) -> Tensor:
        is_failure_N = (nodes.response_score_N >= self.parameters.min_score) & ~nodes.is_empty
        vectors_NX = self._embedder.compute(nodes.probes)
        failures_FX = vectors_NX[is_failure_N]
        least = self.parameters.similarity - TOLERANCE
        num_similar_N = torch.cat(
            [
                (vectors_PX @ failures_FX.T >= least).sum(dim=1)
                for vectors_PX in torch.split(vectors_NX, PART_SIZE)
            ]
        )
        # Without the failure itself.
        num_similar_N = (num_similar_N - is_failure_N.long()).clamp(min=0)
        num_others_N = is_failure_N.sum() - is_failure_N.long()
        # At least 1, so that log(1 + F) is not 0.
        sharing_N: Tensor = (
            1.0 - num_similar_N.double().log1p() / num_others_N.clamp(min=1).double().log1p()
        )
        return sharing_N.masked_fill(nodes.is_empty, 0.0)
