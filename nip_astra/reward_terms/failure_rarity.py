"""Rarity among failures: a failure is worth less, the more of its kind were found.

Shape suffixes: `N` node, `H` probe of the history.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field
from torch import Tensor

from nip_astra.language_models.embeddings import EmbedderParameters
from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes
from nip_astra.reward_terms.embedded_history import EmbeddedTerm
from nip_astra.reward_terms.history import NoveltyParameters
from nip_astra.reward_terms.registry import register_reward_term

TOLERANCE = 1e-5
"""By how much rounding may lower a cosine."""


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
