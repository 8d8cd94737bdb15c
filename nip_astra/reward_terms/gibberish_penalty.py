"""A charge for probes that nobody would say."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.registry import register_reward_term
from nip_astra.reward_terms.token_means import mean_token_nll


@register_reward_term(RewardTermType.GIBBERISH_PENALTY)
class GibberishPenalty(RewardTerm):
    """-max(0, NLL - threshold), the probe's NLL per token under the reference, nats.

    0 for every probe that the reference finds likely enough, and falling from there on: unlike a
    likelihood term it does not pull ordinary probes towards the most ordinary.
    """

    class Parameters(RewardTerm.Parameters):
        """From where on a probe is gibberish."""

        threshold: float = Field(ge=0)
        """Nats per token that are free. Larger allows stranger probes. `probe_nll` of a run's
        `before` shows what is ordinary; one or two nats more is a start."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        nll_N = mean_token_nll(nodes.reference_logprobs_NT, nodes.probe_mask_NT)
        threshold: float = self.parameters.threshold
        return -(nll_N - threshold).clamp(min=0.0)
