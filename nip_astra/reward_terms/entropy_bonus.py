"""A bonus for not being set on one probe."""

from __future__ import annotations

from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm
from nip_astra.reward_terms.registry import register_reward_term
from nip_astra.reward_terms.token_means import mean_token_nll


@register_reward_term(RewardTermType.ENTROPY_BONUS)
class EntropyBonus(RewardTerm):
    """-log pi(probe) per token under the attacker that sampled it, nats (arXiv:2402.19464).

    Its mean over probes estimates the attacker's entropy per token, from one sample each; rewarding
    it raises that entropy. A probe without text has 0, so that it does not pay to end at once.
    """

    class Parameters(RewardTerm.Parameters):
        """The bonus has a weight only; the paper's is 0.01."""

        weight: float = 0.01
        """Reward per nat per token. Larger keeps the attacker more random."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        nll_N = mean_token_nll(nodes.probe_logprobs_NT, nodes.probe_mask_NT)
        return nll_N.masked_fill(nodes.is_empty, 0.0)
