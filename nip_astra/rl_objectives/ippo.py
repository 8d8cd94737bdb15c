"""Proximal policy optimisation of each agent on its own (IPPO).

Shapes: B frames, A agents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.distances import value_losses
from nip_astra.rl_objectives.objective import (
    AgentLosses,
    Frames,
    Objective,
    PlayingAgents,
    PolicyView,
)
from nip_astra.rl_objectives.ratios import bounded, is_gradient_clipped

MIN_ADVANTAGE_STD = 1e-6
"""Advantages of a minibatch that differ by less are shifted to mean 0 and not scaled up further."""

KL_TOLERANCE = 1.5
"""The weight of the charge changes where the divergence is this many times off its target."""


class IppoObjective(Objective):
    """Clipped or charged policy loss, value loss and entropy bonus of every agent.

    With the ratio `r = pi(a) / pi_old(a)` of the agent's joint move and its advantage `A`, means
    over the frames in which the agent acts:

        clip        loss_policy = -mean min(r A, clip(r, 1 - eps, 1 + eps) A)
        kl_penalty  loss_policy = -mean r A + beta * mean -log r
        loss_value  = critic_coef * mean distance(V, target)       over all frames
        loss_entropy = -entropy_coef * mean H

    (arXiv:1707.06347, eq. 7 and 8; arXiv:2011.09533 for several agents). The mean of `-log r` under
    the old policy is `KL(pi_old || pi)`. `beta`, one an agent, is multiplied by kl_increment after
    an iteration whose mean divergence exceeds kl_target by 1.5 times, and by kl_decrement where it
    falls short of it by as much. Beyond 20 nats (`ratios.MAX_LOG_RATIO`) a ratio is held and has no
    gradient; the charge has one still.

    Advantages are shifted and scaled by mean and (unbiased) deviation over those frames, where
    normalize_advantage; a deviation below 1e-6 counts as that, and a single frame gets 0. With
    clip_value, a value counts as no closer to its target than one that has moved by clip_value from
    the value at collection.
    """

    beta: Tensor
    _kl_sum: Tensor
    _kl_count: Tensor

    def __init__(
        self, agents: PlayingAgents, ppo: CommonPpoParameters, rl: RlTrainerParameters
    ) -> None:
        super().__init__(agents)
        self.ppo = ppo
        self.rl = rl
        num_agents = len(agents.names)
        device = next((p.device for p in agents.parameters()), torch.device("cpu"))
        self.register_buffer("beta", torch.full((num_agents,), ppo.kl_beta, device=device))
        for name in ("_kl_sum", "_kl_count"):
            self.register_buffer(name, torch.zeros(num_agents, device=device), persistent=False)

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """`loss_policy`, `loss_value`, `loss_entropy` and what to log."""
        view, values_B = self.policy_view_and_values(name, batch)
        return self._policy_entries(name, view) | self._value_entries(name, values_B, batch)

    def loss_parts(self, name: str) -> tuple[AgentLosses, ...]:
        if self.agents[name].shares_body:
            return (self.agent_losses,)
        return (
            lambda name, batch: self._policy_entries(name, self.policy_view(name, batch)),
            lambda name, batch: self._value_entries(name, self.agents.values(name, batch), batch),
        )

    def _policy_entries(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        log_ratios_B = view.evaluation.logprobs_B - view.of_agent("logprob")
        entropy = view.mean(view.evaluation.entropies_B)
        ratios_B = bounded(log_ratios_B).exp()
        advantages_B = view.of_agent("advantage").to(log_ratios_B.dtype)
        if self.ppo.normalize_advantage:
            advantages_B = normalise(advantages_B, view.is_acting_B)
        gains_B = ratios_B * advantages_B
        if self.ppo.loss_type == "clip":
            clipped_B = self._clip(ratios_B) * advantages_B
            policy_loss = -view.mean(torch.minimum(gains_B, clipped_B))
            is_clipped_B = is_gradient_clipped(clipped_B, gains_B)
        else:
            kl = view.mean(-log_ratios_B)
            policy_loss = -view.mean(gains_B) + self.beta[view.number] * kl
            is_clipped_B = torch.zeros_like(gains_B, dtype=torch.bool)
        losses = {
            "loss_policy": policy_loss,
            "loss_entropy": -self.ppo.entropy_coef * entropy,
        }
        metrics = self._metrics(view, log_ratios_B, ratios_B, is_clipped_B)
        return losses | self.logit_losses(name, view) | metrics

    def _value_entries(self, name: str, values_B: Tensor, batch: Frames) -> dict[str, Tensor]:
        return {"loss_value": self._value_loss(self.agents.number(name), values_B, batch)}

    def _clip(self, ratios_B: Tensor) -> Tensor:
        return ratios_B.clamp(1 - self.ppo.clip_epsilon, 1 + self.ppo.clip_epsilon)

    @torch.no_grad()
    def _metrics(
        self, view: PolicyView, log_ratios_B: Tensor, ratios_B: Tensor, is_clipped_B: Tensor
    ) -> dict[str, Tensor]:
        is_outside_B = self._clip(ratios_B) != ratios_B
        ratio, square, log_ratio, clip_fraction, outside_fraction, entropy = view.figures(
            *(ratios_B, ratios_B.square(), log_ratios_B),
            *(is_clipped_B.to(ratios_B.dtype), is_outside_B.to(ratios_B.dtype)),
            view.evaluation.entropies_B,
        )
        return {
            "kl": -log_ratio,
            # The share of frames whose gradient the clip takes away, and of those beyond it.
            "clip_fraction": clip_fraction,
            "outside_fraction": outside_fraction,
            # The effective sample size, as a share of the frames: 1 where all ratios are equal.
            "ess": ratio.square() / square.clamp(min=1e-12),
            "entropy": entropy,
        }

    def _value_loss(self, number: int, values_B: Tensor, batch: Frames) -> Tensor:
        losses_B = value_losses(
            values_B,
            batch["agents", "value_target"][:, number, 0],
            self.rl.loss_critic_type,
            old_values_B=batch["agents", "value"][:, number, 0],
            clip_value=self.rl.clip_value,
        )
        return self.ppo.critic_coef * losses_B.mean()

    def finish_minibatch(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add up divergences; a minibatch in which an agent never acts says nothing of it."""
        if self.ppo.loss_type != "kl_penalty":
            return
        for name, of_agent in entries.items():
            number, kl = self.agents.number(name), of_agent["kl"]
            self._kl_sum[number] += kl.nan_to_num()
            self._kl_count[number] += ~kl.isnan()

    def finish_iteration(self) -> None:
        """Adapt the weights of the charge to the divergences of the iteration."""
        if self.ppo.loss_type == "kl_penalty":
            kl_A = self._kl_sum / self._kl_count.clamp(min=1)
            is_far_A = kl_A > KL_TOLERANCE * self.ppo.kl_target
            is_near_A = (kl_A < self.ppo.kl_target / KL_TOLERANCE) & (self._kl_count > 0)
            self.beta.mul_(torch.where(is_far_A, self.ppo.kl_increment, 1.0))
            self.beta.mul_(torch.where(is_near_A, self.ppo.kl_decrement, 1.0))
        self._kl_sum.zero_()
        self._kl_count.zero_()


def normalise(values_B: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Shift and scale values to mean 0 and unbiased deviation 1.

    A deviation below `MIN_ADVANTAGE_STD` counts as that.

    Parameters
    ----------
    counts_B : Tensor, optional
        bool; frames over which mean and deviation are taken. All where it is not given.
    """
    if counts_B is None:
        centred_B = values_B - values_B.mean()
        variance = centred_B.square().sum() / max(len(values_B) - 1, 1)
        return centred_B / variance.sqrt().clamp(min=MIN_ADVANTAGE_STD)
    kept_B = counts_B.to(values_B.dtype)
    num = kept_B.sum()
    centred_B = values_B - (values_B * kept_B).sum() / num.clamp(min=1)
    variance = (centred_B.square() * kept_B).sum() / (num - 1).clamp(min=1)
    return centred_B / variance.sqrt().clamp(min=MIN_ADVANTAGE_STD)
