"""REINFORCE of each agent on its own.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from torch import Tensor

from nip_astra.parameters.trainers import LossCriticType
from nip_astra.rl_objectives.objective import (
    AgentLosses,
    AgentModules,
    Frames,
    Objective,
    PolicyView,
    value_loss_of_agent,
)


class ReinforceObjective(Objective):
    """Log-likelihood of each agent's moves, weighted by what they led to.

    With the log-probability `log pi(a)` of the agent's joint move, and as weight `G` its reward to
    go or its advantage, means over the frames in which the agent acts (Williams 1992):

        loss_policy  = -mean log pi(a) G
        loss_value   = critic_coef * mean distance(V, target)     over all frames, with advantages
        loss_entropy = -entropy_weight * mean H

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
        agents: AgentModules,
        *,
        weight: str = "reward_to_go",
        critic_coef: float = 1.0,
        entropy_weight: float = 0.0,
        loss_critic_type: LossCriticType = "smooth_l1",
        clip_value: float | None = None,
    ) -> None:
        super().__init__(agents)
        self.weight = weight
        self.critic_coef = critic_coef
        self.entropy_weight = entropy_weight
        self.loss_critic_type: LossCriticType = loss_critic_type
        self.clip_value = clip_value

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """`loss_policy`, `loss_entropy`, with advantages `loss_value`, and the entropy."""
        if self.weight != "advantage":
            return self._policy_entries(name, self.policy_view(name, batch))
        view, values_B = self.policy_view_and_values(name, batch)
        return self._policy_entries(name, view) | self._value_entries(view.number, values_B, batch)

    def loss_parts(self, name: str) -> tuple[AgentLosses, ...]:
        if self.weight != "advantage" or self.agents[name].shares_body:
            return (self.agent_losses,)
        number = self.agents.number(name)
        return (
            lambda name, batch: self._policy_entries(name, self.policy_view(name, batch)),
            lambda name, batch: self._value_entries(number, self.agents.values(name, batch), batch),
        )

    def _policy_entries(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        entropies_B = view.evaluation.entropies_B
        losses = {
            "loss_policy": -view.mean(view.evaluation.logprobs_B * view.of_agent(self.weight)),
            "loss_entropy": -self.entropy_weight * view.mean(entropies_B),
            **self.logit_losses(name, view),
        }
        (entropy,) = view.figures(entropies_B)
        return losses | {"entropy": entropy}

    def _value_entries(self, number: int, values_B: Tensor, batch: Frames) -> dict[str, Tensor]:
        loss = value_loss_of_agent(
            *(number, values_B, batch), loss_type=self.loss_critic_type, clip_value=self.clip_value
        )
        return {"loss_value": self.critic_coef * loss}
