"""A trainer of one's own: python run.py --plugin my_trainer.py --trainer my_trainer"""

import torch

import nip_astra as na


@na.register_trainer("my_trainer")
class MyTrainer(na.AstTrainer):
    """Say again what was rewarded more than its siblings.

    Loss: `-mean_i(w_i log pi(probe_i))`, where `w = G softmax(reward / temperature)` among G
    siblings. Siblings that were rewarded alike teach nothing and are left out.
    """

    class Parameters(na.SubParameters):
        """How sharply rewards are told apart."""

        temperature: float = na.Field(default=0.3, gt=0)
        """Reward difference that multiplies a weight by e. Larger weighs siblings more alike."""
        min_reward_range: float = na.Field(default=0.5, ge=0)
        """Siblings whose rewards differ by less are left out. Larger learns from fewer."""

    def flatten(self, tree: na.RolloutTree) -> list[na.Sample]:
        """One sample a probe."""
        probes, masks, rewards = (tree.nodes[x] for x in ("probe", "probe_mask", "reward"))
        samples = []
        for nodes_G in tree.sibling_groups():
            rewards_G = rewards[nodes_G]
            if rewards_G.max() - rewards_G.min() > self.parameters.min_reward_range:
                weights_G = len(nodes_G) * (rewards_G / self.parameters.temperature).softmax(0)
                for node, weight in zip(nodes_G.tolist(), weights_G, strict=True):
                    context = torch.tensor(tree.context_of(node))
                    probe = probes[node][masks[node]]
                    samples.append({"context": context, "probe": probe, "weight": weight})
        return samples

    def loss(self, batch):
        """The loss of a batch, and a number to log."""
        (logprobs_BT,) = self.policy_logprobs(batch, "probe")
        said_B = logprobs_BT.sum(dim=1)
        weighted_B = batch["weight"].to(said_B.device) * said_B
        return na.LossOutput(-weighted_B.mean(), {"log_likelihood": said_B.detach().mean()})
