"""REINFORCE of each agent on its own.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from torch import Tensor

from nip_astra.parameters.trainers import LossCriticType
from nip_astra.rl_objectives.distances import value_losses
from nip_astra.rl_objectives.objective import Frames, Objective, PlayingAgents


class ReinforceObjective(Objective):
    """Log-likelihood of each agent's moves, weighted by what they led to.

    With the log-probability `log pi(a)` of the agent's joint move, and as weight `G` its reward to
    go or its advantage, means over the frames in which the agent acts (Williams 1992):

        loss_policy  = -mean log pi(a) G
        loss_value   = critic_coef * mean distance(V, target)     over all frames, with advantages
        loss_entropy = -entropy_coef * mean H

    Parameters
    ----------
    weight : str
        Entry of `agents` that holds `G`, of shape [B, A, 1]: "reward_to_go" or "advantage".
    critic_coef : float
        Weight of the value loss; there is none for rewards to go.
    clip_value : float, optional
        See `RlTrainerParameters`.
    """

    def __init__(
        self,
        agents: PlayingAgents,
        *,
        weight: str = "reward_to_go",
        critic_coef: float = 1.0,
        entropy_coef: float = 0.0,
        loss_critic_type: LossCriticType = "smooth_l1",
        clip_value: float | None = None,
    ) -> None:
        super().__init__(agents)
        self.weight = weight
        self.critic_coef = critic_coef
        self.entropy_coef = entropy_coef
        self.loss_critic_type: LossCriticType = loss_critic_type
        self.clip_value = clip_value

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """Give `loss_policy`, `loss_entropy`, with advantages `loss_value`, and the entropy."""
        values_B = None
        if self.weight == "advantage":
            view, values_B = self.policy_view_and_values(name, batch)
        else:
            view = self.policy_view(name, batch)
        logprobs_B = view.evaluation.logprobs_B
        entropy = view.mean(view.evaluation.entropies_B)
        found = {
            "loss_policy": -view.mean(logprobs_B * view.of_agent(self.weight)),
            "loss_entropy": -self.entropy_coef * entropy,
            "entropy": view.figure(view.evaluation.entropies_B),
        }
        found |= self.logit_losses(name, view)
        if values_B is not None:
            targets_B = batch["agents", "value_target"][:, view.number, 0]
            losses_B = value_losses(
                values_B,
                targets_B,
                self.loss_critic_type,
                old_values_B=batch["agents", "value"][:, view.number, 0],
                clip_value=self.clip_value,
            )
            found["loss_value"] = self.critic_coef * losses_B.mean()
        return found
