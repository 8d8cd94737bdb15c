"""Reward terms from a probe's likelihood under the attacker and under the reference.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term


@register_reward_term(RewardTermType.ENTROPY_BONUS)
class EntropyBonus(RewardTerm):
    """-log pi(probe) per token under the attacker that sampled it, nats (arXiv:2402.19464).

    Its mean over probes is a one-sample estimate of the attacker's entropy per token; rewarding it
    raises that entropy. A probe without text has value 0, so that ending at once earns nothing.
    """

    class Parameters(RewardTerm.Parameters):
        """The bonus has a weight only; the paper's is 0.01."""

        weight: float = 0.01
        """Reward per nat per token. Larger keeps the attacker more random."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        nll_N = _mean_token_nll(nodes.probe_logprobs_NT, nodes.probe_mask_NT)
        return nll_N.masked_fill(nodes.is_empty, 0.0)


@register_reward_term(RewardTermType.GIBBERISH_PENALTY)
class GibberishPenalty(RewardTerm):
    """-max(0, NLL - threshold), the probe's NLL per token under the reference, nats.

    0 for every sufficiently likely probe: unlike a likelihood term, it does not pull ordinary
    probes towards the most likely one.
    """

    class Parameters(RewardTerm.Parameters):
        """Threshold of gibberish."""

        threshold: float = Field(ge=0)
        """Nats per token without a penalty. Larger allows stranger probes. Start with one or two
        nats above `probe_nll` of a run's `before`."""

    def _values(self, nodes: RatedProbes) -> Tensor:
        nll_N = _mean_token_nll(nodes.reference_logprobs_NT, nodes.probe_mask_NT)
        threshold: float = self.parameters.threshold
        return -(nll_N - threshold).clamp(min=0.0)


def _mean_token_nll(logprobs_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return the mean negative log-likelihood per token, `[N]` nats; 0 without tokens."""
    sums_N = logprobs_NT.masked_fill(~mask_NT, 0.0).sum(dim=1)
    return -sums_N / mask_NT.sum(dim=1).clamp(min=1)
