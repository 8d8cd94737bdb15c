"""REINFORCE of an attacker, mixed with a divergence from the reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import group_advantages
from nip_astra.rl_objectives.kl import kl_estimate, sequence_kl_estimate
from nip_astra.rl_objectives.policy_losses import policy_loss
from nip_astra.rl_objectives.reductions import LossOutput, mean_over_rows, reduce_loss
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.base import AstTrainer
from nip_astra.trainers.ast.behaviour import (
    BehaviourParameters,
    CorrectedStalenessParameters,
    importance_weights_of,
)
from nip_astra.trainers.ast.rollouts import CreditParameters, node_samples
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_REINFORCE)
class AstReinforceTrainer(AstTrainer):
    """REINFORCE on whole probes, mixed with a KL penalty (red teaming by RL, arXiv:2202.03286).

    Loss: `(1 - kl_mix) * -A log pi(probe) + kl_mix * KL(pi || ref)(probe) - entropy_weight * H`,
    sums over a probe's tokens, mean over probes; `kl_estimator` says how the divergence is
    estimated. Perez et al. take a learned value as the baseline of `A`; here it is the mean of the
    others: of the siblings, or of the iteration.

    The gradient is unbiased with one epoch and one step per iteration, a baseline that does not
    depend on the probe (`none` or `siblings`; the iteration includes its descendants),
    `kl_estimator` sequence_k2, `entropy_weight` 0, and `divides_by_std` off. The preset trades that
    for less variance.
    """

    class Parameters(CorrectedStalenessParameters):
        """Baseline and KL penalty."""

        kl_mix: float = Field(default=0.3, ge=0, lt=1)
        """Weight of the divergence from the reference, against that of the reward, as in the paper
        (0.3 to 0.4 there). Larger stays closer to the reference."""
        kl_estimator: Literal["sequence_k2", "token_k2"] = "sequence_k2"
        """Form of the divergence in the loss. sequence_k2: half the square of a probe's summed
        log-ratio, whose gradient is on average that of KL(pi || ref) between whole probes.
        token_k2: the sum of half the squares of its tokens' log-ratios, which has less variance;
        its gradient ignores that a token affects which tokens follow, and is that of no divergence.
        """
        baseline: Literal["siblings", "iteration", "none"] = "iteration"
        """Baseline of a probe's credit: the mean of its siblings, of all other probes of the
        iteration, or none."""
        divides_by_std: Annotated[bool, where("baseline", "siblings", "iteration")] = True
        """Whether advantages are divided by the standard deviation of the compared credits, so that
        the scale of the reward does not matter. The gradient is then biased."""
        std_epsilon: Annotated[float, where("divides_by_std", True)] = Field(default=1e-6, ge=0)
        """Added to that deviation."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Weight of the entropy bonus, a probe's summed entropy. Larger diversifies probes."""
        credit: CreditParameters = CreditParameters()
        """Credit of a probe."""
        behaviour: BehaviourParameters = BehaviourParameters()
        """Which log-probabilities are trained if sampling is tempered or truncated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.parameters.baseline == "siblings" and self.scenario.tree_width < 2:
            raise ConfigurationError(
                "ast_reinforce.baseline=siblings compares siblings, but tree_width is 1: every "
                "advantage would be 0. Set the scenario's tree_width to 2 or more, or the baseline "
                "to iteration or none."
            )

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        options = self.parameters
        # Siblings are consecutive nodes.
        width = tree.tree_width if options.baseline == "siblings" else tree.num_nodes
        group_N = torch.arange(tree.num_nodes) // width
        has_baseline = options.baseline != "none"
        found = group_advantages(
            tree.nodes["credit"],
            group_N,
            baseline="leave_one_out" if has_baseline else "none",
            scale="group" if has_baseline and options.divides_by_std else "none",
            std_epsilon=options.std_epsilon,
        )
        used = found.is_used_N.nonzero().flatten().tolist()
        return node_samples(tree, used, advantage=found.advantages_N)

    def loss(self, batch: TensorDict) -> LossOutput:
        options = self.parameters
        scores = self.policy_scores(batch, needs_entropy=options.entropy_weight > 0)
        batch = batch.to(scores.logprobs_BT.device)
        mask_BT = batch["probe_mask"]
        weights_BT = importance_weights_of(batch, scores.logprobs_BT.device)
        loss, metrics = policy_loss(
            *(scores.logprobs_BT, None, batch["advantage"], mask_BT),
            loss="reinforce",
            reduction="sequence_sum",
            weights_BT=weights_BT,
        )
        kl = self._divergence(scores.logprobs_BT, batch, weights_BT)
        loss = (1 - options.kl_mix) * loss + options.kl_mix * kl
        if scores.entropy_BT is not None:
            loss = loss - options.entropy_weight * self._sum(scores.entropy_BT, mask_BT)
        return LossOutput(loss, metrics | {"kl": kl.detach()})

    def _divergence(
        self, logprobs_BT: Tensor, batch: TensorDict, weights_BT: Tensor | None
    ) -> Tensor:
        """Return the estimated divergence, a mean over probes."""
        reference_BT, mask_BT = batch["reference_logprobs"], batch["probe_mask"]
        if self.parameters.kl_estimator == "sequence_k2":
            return mean_over_rows(
                sequence_kl_estimate(logprobs_BT, reference_BT, mask_BT, weights_BT=weights_BT)
            )
        kl_BT = kl_estimate(logprobs_BT, reference_BT, "k2", mask_BT=mask_BT)
        return self._sum(kl_BT if weights_BT is None else weights_BT * kl_BT, mask_BT)

    @staticmethod
    def _sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return reduce_loss(values_BT, mask_BT, "sequence_sum")
