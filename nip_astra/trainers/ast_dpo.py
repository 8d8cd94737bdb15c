"""Online direct preference optimisation of an attacker."""

from __future__ import annotations

import torch
from pydantic import Field
from tensordict import TensorDict

from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.parameters.types import TrainerType
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.preference import dpo_loss
from nip_astra.rollouts.preference_pairs import select_pairs
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast_base import AstTrainer
from nip_astra.trainers.registry import register_trainer


@register_trainer(TrainerType.AST_DPO)
class AstDpoTrainer(AstTrainer):
    """Prefer, at every point of a conversation, the best probe to the worst.

    Loss: `-log sigmoid(beta * ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)))`
    (arXiv:2305.18290, eq. 7), log-probabilities summed over the tokens that the attacker sampled,
    mean over pairs. Pairs: best and worst sibling of every node of the tree (ASTPrompter,
    arXiv:2407.09447).
    """

    class Parameters(SubParameters):
        """Strength of the preference and choice of pairs."""

        beta: float = Field(default=0.1, gt=0)
        """Inverse temperature of DPO. Larger stays closer to the reference."""
        min_reward_difference: float = Field(default=0.0, ge=0)
        """A pair needs rewards that differ by more than this."""
        min_score_difference: float | None = Field(default=None, ge=0, le=1)
        """A pair needs response scores that differ by more than this; null asks for none. Where
        failures are rare, pairs that differ in likelihood only drown the others, and the attacker
        collapses onto the most ordinary probes."""
        min_chosen_score: float | None = Field(default=None, ge=0, le=1)
        """A pair needs a chosen probe whose response scores at least this; null asks for none.
        Other than min_score_difference it keeps pairs of two failures that differ in likelihood,
        which teach to fail plausibly."""

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """Give one sample a preference pair."""
        pairs = select_pairs(
            tree,
            min_reward_difference=self.parameters.min_reward_difference,
            min_score_difference=self.parameters.min_score_difference,
            min_chosen_score=self.parameters.min_chosen_score,
        )
        self.flatten_metrics = {
            "pairs/kept": float(len(pairs.chosen)),
            "pairs/ties": float(pairs.num_ties),
            "pairs/identical": float(pairs.num_identical),
            "pairs/below_margin": float(pairs.num_below_margin),
        }
        probe, mask = tree.nodes["probe"], tree.nodes["probe_mask"]
        reference_N = tree.nodes["reference_logprobs"].sum(dim=1)
        return [
            {
                "context": torch.tensor(tree.context_of(chosen)),
                "chosen": probe[chosen][mask[chosen]],
                "rejected": probe[rejected][mask[rejected]],
                "reference_logratio": reference_N[chosen] - reference_N[rejected],
                "episode": tree.nodes["episode"][chosen],
            }
            for chosen, rejected in zip(pairs.chosen, pairs.rejected, strict=True)
        ]

    def step(self, batch: TensorDict) -> LossOutput:
        """Give the DPO loss of a batch of pairs."""
        chosen_BT, rejected_BT = self.policy_logprobs(batch, "chosen", "rejected")
        policy_logratios_B = chosen_BT.sum(dim=1) - rejected_BT.sum(dim=1)
        return dpo_loss(
            policy_logratios_B,
            batch["reference_logratio"].to(policy_logratios_B.device),
            beta=self.parameters.beta,
        )
