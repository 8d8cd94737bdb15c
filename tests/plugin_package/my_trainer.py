"""A custom trainer: python run.py --plugin my_trainer.py --trainer my_trainer"""

import torch

import nip_astra as na


@na.register_trainer("my_trainer")
class MyTrainer(na.AstTrainer):
    """Maximise the likelihood of probes, weighted by their reward among siblings.

    Loss: `-mean_i(w_i log pi(probe_i))`, where `w = G softmax(reward / temperature)` over the G
    siblings. Groups with nearly equal rewards are skipped.
    """

    class Parameters(na.SubParameters):
        """How rewards become weights."""

        temperature: float = na.Field(default=0.3, gt=0)
        """Reward difference that multiplies a weight by e. Larger makes weights more equal."""
        min_reward_range: float = na.Field(default=0.5, ge=0)
        """Smallest range of rewards in a group. Larger skips more groups."""

    def flatten(self, tree: na.RolloutTree) -> list[na.Sample]:
        """One sample per probe."""
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
        """The loss of a batch and a metric."""
        (logprobs_BT,) = self.policy_logprobs(batch, "probe")
        likelihood_B = logprobs_BT.sum(dim=1)
        loss = -(batch["weight"].to(likelihood_B.device) * likelihood_B).mean()
        return na.LossOutput(loss, {"log_likelihood": likelihood_B.detach().mean()})
