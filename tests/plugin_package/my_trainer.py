"""A trainer of one's own: python run.py --plugin my_trainer.py --trainer my_trainer"""

from __future__ import annotations

import torch
from tensordict import TensorDict

from nip_astra import (
    AstTrainer,
    Field,
    LossOutput,
    RolloutTree,
    Sample,
    SubParameters,
    register_trainer,
)


@register_trainer("my_trainer")
class MyTrainer(AstTrainer):
    """Say again what was rewarded more than its siblings.

    Loss: `-mean_i(w_i * log pi(probe_i | context_i))`, log-probabilities summed over the tokens
    of a probe. Among the G siblings of a conversation `w = G * softmax(reward / temperature)`, so
    weights are positive and have mean 1. The minus sign makes minimising the loss raise the
    likelihood of probes, of the best rewarded ones the most.
    """

    class Parameters(SubParameters):
        """How sharply rewards are told apart."""

        temperature: float = Field(default=0.3, gt=0)
        """Reward difference that multiplies a weight by e. Larger weighs siblings more alike."""
        min_reward_range: float = Field(default=0.5, ge=0)
        """Siblings whose rewards lie within this range are left out. Larger learns from fewer."""

    def flatten(self, tree: RolloutTree) -> list[Sample]:
        """One sample a probe, from every conversation whose probes fared differently."""
        probes, masks = tree.nodes["probe"], tree.nodes["probe_mask"]
        samples: list[Sample] = []
        for nodes_G in tree.sibling_groups():
            rewards_G = tree.nodes["reward"][nodes_G]
            if rewards_G.max() - rewards_G.min() <= self.parameters.min_reward_range:
                continue
            weights_G = len(nodes_G) * (rewards_G / self.parameters.temperature).softmax(dim=0)
            samples += [
                {
                    "context": torch.tensor(tree.context_of(node)),
                    "probe": probes[node][masks[node]],
                    "weight": weight,
                }
                for node, weight in zip(nodes_G.tolist(), weights_G, strict=True)
            ]
        return samples

    def step(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, and a number to log."""
        (logprobs_BT,) = self.policy_logprobs(batch, "probe")
        log_likelihood_B = logprobs_BT.sum(dim=1)
        weights_B = batch["weight"].to(log_likelihood_B.device)
        return LossOutput(
            loss=-(weights_B * log_likelihood_B).mean(),
            metrics={"log_likelihood": log_likelihood_B.detach().mean()},
        )
