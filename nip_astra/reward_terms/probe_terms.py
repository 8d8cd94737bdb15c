"""Terms of a probe by itself: how likely it is under attacker and reference, and its score.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import RewardTermType
from nip_astra.reward_terms.base import RatedProbes, RewardTerm, register_reward_term
from nip_astra.rl_objectives.rewards import mean_nll
from nip_astra.rollouts.prompts import columns_of
from nip_astra.scorers.base import Exchange, ScorerParameters, build_scorer

logger = logging.getLogger(__name__)


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
        nll_N = mean_nll(nodes.probe_logprobs_NT, nodes.probe_mask_NT)
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
        nll_N = mean_nll(nodes.reference_logprobs_NT, nodes.probe_mask_NT)
        threshold: float = self.parameters.threshold
        return -(nll_N - threshold).clamp(min=0.0)


@register_reward_term(RewardTermType.SCORER_TERM)
class ScorerTerm(RewardTerm):
    """A scorer's score of the probe, 0 to 1; a negative weight makes it a penalty.

    The scorer reads the probe alone, with the role "user". A probe without a verdict gets the mean
    of the rollout's other probes, which is neutral; without any verdict all values are 0. If the
    scorer fails, its `on_failure` applies.
    """

    class Parameters(RewardTerm.Parameters):
        """The scorer."""

        scorer: ScorerParameters  # type: ignore[valid-type]
        """Scorer of the probes; it may differ from the scorer of responses."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        self._scorer = build_scorer(
            parameters.scorer, device=self.device, scenario_dir=self.scenario_dir
        )
        self.scorers = (self._scorer,)

    def state(self) -> dict[str, Any]:
        return {"verdicts": self._scorer.verdicts()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._scorer.load_verdicts(state["verdicts"])

    def _values(self, nodes: RatedProbes) -> Tensor:
        exchanges = [
            Exchange(probe, role="user", columns=columns_of(prompt))
            for probe, prompt in zip(nodes.probes, nodes.prompts, strict=True)
        ]
        scores_N = self._scorer.rate(exchanges).scores_N
        is_missing_N = scores_N.isnan()
        num_missing = int(is_missing_N.sum())
        if num_missing:
            logger.warning(
                "reward term 'scorer_term': no verdict for %d of %d probes, which get the mean of "
                "the others",
                num_missing,
                nodes.num_nodes,
            )
        mean = scores_N.nanmean().nan_to_num(0.0)
        return torch.where(is_missing_N, mean, scores_N)
