"""REINFORCE of an attacker, mixed with a divergence from the reference."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import Tensor

from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.advantages import group_advantages
from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.masked import reduce_loss
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.policy_gradient import reinforce_loss
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.trainers.ast_rewards import CreditParameters
from nip_astra.trainers.node_samples import node_samples
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_REINFORCE)
class AstReinforceTrainer(AstTrainer):
    """Raise whole probes by what they were worth (red teaming by RL, arXiv:2202.03286).

    Loss: `(1 - kl_mix) * -A log pi(probe) + kl_mix * KL(pi || ref)(probe) - entropy_weight * H`,
    sums over a probe's tokens, mean over probes; the divergence is the k2 estimate, whose gradient
    is that of KL(pi || ref) on average. Perez et al. take a learnt value as the baseline of `A`;
    here it is the mean of the others: of the siblings, or of the iteration. Unbiased with one
    epoch and one step an iteration (training.batch_size times gradient_accumulation_steps at least
    the nodes of an iteration).
    """

    class Parameters(SubParameters):
        """Baseline, and what holds the attacker near ordinary conversation."""

        kl_mix: float = Field(default=0.3, ge=0, lt=1)
        """Weight of the divergence from the reference against that of the reward, as in the paper
        (0.3 to 0.4 there). Larger stays closer to the reference."""
        baseline: Literal["siblings", "iteration", "none"] = "iteration"
        """With what a probe's credit is compared: the mean of its siblings, of all other probes of
        the iteration, or nothing."""
        divides_by_std: Annotated[bool, where("baseline", "siblings", "iteration")] = True
        """Whether advantages are divided by the standard deviation of what they are compared
        with, so that the scale of the reward does not matter."""
        entropy_weight: float = Field(default=0.0, ge=0)
        """Loss taken off per nat of a probe's summed entropy. Larger keeps probes more varied."""
        credit: CreditParameters = CreditParameters()
        """What a probe is worth."""

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """Give one sample a node with a verdict."""
        credit_N = tree.nodes["credit"]
        baseline = self.parameters.baseline
        has_baseline = baseline != "none"
        groups = (
            tree.sibling_groups()
            if baseline == "siblings"
            else torch.arange(tree.num_nodes).unsqueeze(0)
        )
        found = group_advantages(
            credit_N[groups],
            baseline="leave_one_out" if has_baseline else "none",
            std_epsilon=1e-4 if has_baseline and self.parameters.divides_by_std else None,
        )
        # Groups are rows of consecutive nodes, so flattening gives node order.
        used = groups[found.is_used_PG].tolist()
        return node_samples(tree, used, advantage=found.advantages_PG.flatten())

    def step(self, batch: TensorDict) -> LossOutput:
        """Give the loss of a batch of probes."""
        options = self.parameters
        scores = self.policy_scores(batch, needs_entropy=options.entropy_weight > 0)
        batch = batch.to(scores.logprobs_BT.device)
        mask_BT = batch["probe_mask"]
        loss, metrics = reinforce_loss(scores.logprobs_BT, mask_BT, batch["advantage"])
        kl = self._sum(
            kl_estimate(scores.logprobs_BT, batch["reference_logprobs"], "k2", mask_BT=mask_BT),
            mask_BT,
        )
        loss = (1 - options.kl_mix) * loss + options.kl_mix * kl
        if scores.entropy_BT is not None:
            loss = loss - options.entropy_weight * self._sum(scores.entropy_BT, mask_BT)
        return LossOutput(loss, metrics | {"kl": kl.detach()})

    @staticmethod
    def _sum(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return reduce_loss(values_BT, mask_BT, "sequence_sum")
