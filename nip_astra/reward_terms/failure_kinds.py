"""Kinds of failures: a failure is worth less, the more of its kind there are.

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
from nip_astra.reward_terms.embedded_history import EmbeddedTerm
from nip_astra.reward_terms.history import NoveltyParameters

TOLERANCE = 1e-5
"""By how much rounding may lower a cosine."""
PART_SIZE = 1024
"""Nodes whose cosines to all others are held at once."""


@register_reward_term(RewardTermType.FAILURE_RARITY)
class FailureRarity(EmbeddedTerm):
    """How rare failures like this one are among those found so far, 0 to 1.

    With N failures found in earlier rollouts, n of them alike (by cosine), each as often as it was
    found, the value is by `shape`

    - `log`: `1 - log(1 + n) / log(1 + N)`, 1 while nothing was found;
    - `inverse_root`: `1 / sqrt(1 + n)`, the bonus of count-based exploration (arXiv:1606.01868).

    By default it is multiplied by the response's score, so that it chooses among failures: what
    does not fail earns nothing, however new. Probes of one rollout do not know of each other. A
    probe without text has rarity 0.
    """

    class Parameters(NoveltyParameters):
        """What a kind of failure is, and how fast more of it stops to pay."""

        scaled_by_score: bool = True
        """Whether the value is multiplied by the response's score, 0 where there is no verdict.
        False pays for words unlike those of failures too where the target does not fail."""
        min_score: float = Field(default=0.5, ge=0, le=1)
        """A probe counts as a failure found where its response scores at least this."""
        similarity: float = Field(default=0.5, gt=0, le=1)
        """Cosine from which on two failures are of a kind. Larger makes more and smaller kinds: 1
        tells all probes apart that differ in a letter."""
        shape: Literal["log", "inverse_root"] = "log"
        """log: by the kind's share of all failures, on a log scale, so that the push from common
        kinds to rare ones lasts. inverse_root: by the kind's number alone, so that it ebbs away as
        all kinds are found often."""
        embedder: EmbedderParameters = EmbedderParameters()
        """What turns probes into vectors."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        cosines_NH = self._history.cosines(nodes.probes)
        is_alike_NH = cosines_NH >= self.parameters.similarity - TOLERANCE
        counts_H = self._history.counts.double()
        num_alike_N = is_alike_NH.double() @ counts_H
        rarity_N: Tensor
        if self.parameters.shape == "inverse_root":
            rarity_N = (1.0 + num_alike_N).rsqrt()
        else:
            # At least 1, so that log(1 + N) is not 0 before the first failure.
            num_found = max(1.0, float(counts_H.sum()))
            rarity_N = 1.0 - num_alike_N.log1p() / math.log1p(num_found)
        return rarity_N.masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.FAILURE_SHARING)
class FailureSharing(RewardTerm):
    """How few of the rollout's other failures are like this one, 0 to 1.

    With F other failures in the same rollout, n of them alike (by cosine), it is
    `1 - log(1 + n) / log(1 + F)`: 1 where none is alike, 0 where all are. Fitness sharing, which
    keeps a population on several optima at once (Goldberg and Richardson 1987): what many siblings
    and episodes do at the same time is worth less, at once. `failure_rarity` compares with earlier
    iterations in place of this one; an attacker of one kind only may then swing from kind to kind.

    By default it is multiplied by the response's score, so that it chooses among failures where
    scores are near 0 or 1. A probe without text has 0. Nothing is remembered.
    """

    class Parameters(RewardTerm.Parameters):
        """What a kind of failure is."""

        scaled_by_score: bool = True
        """Whether the value is multiplied by the response's score, 0 where there is no verdict.
        False pays for words unlike those of failures too where the target does not fail."""
        min_score: float = Field(default=0.5, ge=0, le=1)
        """A probe counts as a failure where its response scores at least this."""
        similarity: float = Field(default=0.5, gt=0, le=1)
        """Cosine from which on two failures are of a kind. Larger makes more and smaller kinds: 1
        tells all probes apart that differ in a letter."""
        embedder: EmbedderParameters = EmbedderParameters()
        """What turns probes into vectors."""

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
        num_alike_N = torch.cat(
            [
                (vectors_PX @ failures_FX.T >= least).sum(dim=1)
                for vectors_PX in torch.split(vectors_NX, PART_SIZE)
            ]
        )
        # A failure is like itself, and shares with the others only.
        num_alike_N = (num_alike_N - is_failure_N.long()).clamp(min=0)
        num_others_N = is_failure_N.sum() - is_failure_N.long()
        # At least 1, so that log(1 + F) is not 0 where no other fails.
        sharing_N: Tensor = (
            1.0 - num_alike_N.double().log1p() / num_others_N.clamp(min=1).double().log1p()
        )
        return sharing_N.masked_fill(nodes.is_empty, 0.0)
