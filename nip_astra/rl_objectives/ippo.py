"""Proximal policy optimisation of each agent on its own (IPPO).

Shapes: B frames, A agents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.advantages import whiten
from nip_astra.rl_objectives.objective import (
    AgentLosses,
    AgentModules,
    Frames,
    Objective,
    PolicyView,
    value_loss_of_agent,
)
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.rl_objectives.reductions import bounded

MIN_ADVANTAGE_STD = 1e-6
"""Smallest deviation that the advantages of a minibatch are divided by."""

KL_TOLERANCE = 1.5
"""The weight of the penalty changes where the divergence is off its target by this factor."""


class IppoObjective(Objective):
    """Clipped or KL-penalised policy loss, value loss and entropy bonus of every agent.

    With the ratio `r = pi(a) / pi_old(a)` of the agent's joint move and its advantage `A`, means
    over the frames in which the agent acts:

        clip        loss_policy = mean of ppo.loss, by default
                    -mean min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        kl_penalty  loss_policy = -mean r A + beta * mean -log r
        loss_value  = critic_coef * mean distance(V, target)       over all frames
        loss_entropy = -entropy_weight * mean H

    (arXiv:1707.06347, eq. 7 and 8; arXiv:2011.09533 for several agents). The mean of `-log r` under
    the old policy is `KL(pi_old || pi)`. `beta`, one an agent, is multiplied by kl_increment after
    an iteration whose mean divergence exceeds kl_target by 1.5 times, and by kl_decrement where it
    falls short of it by as much. Beyond 20 nats (`reductions.MAX_LOG_RATIO`) a ratio is held and
    has no gradient; the penalty still has one.

    Advantages are shifted and scaled by mean and (unbiased) deviation over those frames, where
    normalize_advantage; a deviation below 1e-6 counts as that, and a single frame gets 0. With
    clip_value, a value counts as no closer to its target than one that has moved by clip_value from
    the value at collection.
    """

    beta: Tensor
    _kl_sum: Tensor
    _kl_count: Tensor

    def __init__(
        self, agents: AgentModules, ppo: CommonPpoParameters, rl: RlTrainerParameters
    ) -> None:
        super().__init__(agents)
        self.ppo = ppo
        self.rl = rl
        self.loss = PolicyLoss.of("importance_sampling")
        if ppo.loss_type == "clip":
            clip = {"clip_low": ppo.clip_low, "clip_high": ppo.clip_high}
            self.loss = PolicyLoss.of(ppo.loss, ppo.loss_options, **clip)
        num_agents = len(agents.names)
        device = next((p.device for p in agents.parameters()), torch.device("cpu"))
        self.register_buffer("beta", torch.full((num_agents,), ppo.kl_beta, device=device))
        for name in ("_kl_sum", "_kl_count"):
            self.register_buffer(name, torch.zeros(num_agents, device=device), persistent=False)

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """`loss_policy`, `loss_value`, `loss_entropy` and metrics."""
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
        logprobs_B, old_B = view.evaluation.logprobs_B, view.of_agent("logprob")
        is_acting_B = view.is_acting_B
        if is_acting_B is None:
            is_acting_B = torch.ones_like(logprobs_B, dtype=torch.bool)
        advantages_B = view.of_agent("advantage").to(logprobs_B.dtype)
        if self.ppo.normalize_advantage:
            advantages_B = whiten(
                advantages_B, view.is_acting_B, epsilon=0.0, min_std=MIN_ADVANTAGE_STD
            )
        columns = (one.unsqueeze(1) for one in (logprobs_B, old_B, advantages_B, is_acting_B))
        policy_loss = view.mean(self.loss.of_tokens(*columns).squeeze(1))
        if self.ppo.loss_type == "kl_penalty":
            policy_loss = policy_loss + self.beta[view.number] * view.mean(old_B - logprobs_B)
        losses = {
            "loss_policy": policy_loss,
            "loss_entropy": -self.ppo.entropy_weight * view.mean(view.evaluation.entropies_B),
        }
        metrics = self._metrics(view, logprobs_B - old_B, advantages_B)
        return losses | self.logit_losses(name, view) | metrics

    def _value_entries(self, name: str, values_B: Tensor, batch: Frames) -> dict[str, Tensor]:
        loss = value_loss_of_agent(
            self.agents.number(name),
            values_B,
            batch,
            loss_type=self.rl.loss_critic_type,
            clip_value=self.rl.clip_value,
        )
        return {"loss_value": self.ppo.critic_coef * loss}

    @torch.no_grad()
    def _metrics(
        self, view: PolicyView, log_ratios_B: Tensor, advantages_B: Tensor
    ) -> dict[str, Tensor]:
        ratios_B = bounded(log_ratios_B).exp()
        is_above_B = ratios_B > 1 + self.ppo.clip_high
        is_below_B = ratios_B < 1 - self.ppo.clip_low
        is_outside_B = is_above_B | is_below_B
        is_clipped_B = (is_above_B & (advantages_B > 0)) | (is_below_B & (advantages_B < 0))
        is_clipped_B = is_clipped_B & (self.ppo.loss_type == "clip")
        ratio, square, log_ratio, clip_fraction, outside, entropy = view.figures(
            *(ratios_B, ratios_B.square(), log_ratios_B),
            *(is_clipped_B.to(ratios_B.dtype), is_outside_B.to(ratios_B.dtype)),
            view.evaluation.entropies_B,
        )
        return {
            "kl": -log_ratio,
            # The share of frames whose gradient the clip removes, and of those beyond the clip.
            "clip_fraction": clip_fraction,
            "ratio_outside_clip": outside,
            # The effective sample size, as a share of the frames: 1 where all ratios are equal.
            "ess": ratio.square() / square.clamp(min=1e-12),
            "entropy": entropy,
        }

    def finish_minibatch(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add up divergences, without minibatches in which an agent never acts."""
        if self.ppo.loss_type != "kl_penalty":
            return
        for name, of_agent in entries.items():
            number, kl = self.agents.number(name), of_agent["kl"]
            self._kl_sum[number] += kl.nan_to_num()
            self._kl_count[number] += ~kl.isnan()

    def finish_iteration(self) -> None:
        """Adapt the weights of the penalty to the divergences of the iteration."""
        if self.ppo.loss_type == "kl_penalty":
            kl_A = self._kl_sum / self._kl_count.clamp(min=1)
            is_far_A = kl_A > KL_TOLERANCE * self.ppo.kl_target
            is_near_A = (kl_A < self.ppo.kl_target / KL_TOLERANCE) & (self._kl_count > 0)
            self.beta.mul_(torch.where(is_far_A, self.ppo.kl_increment, 1.0))
            self.beta.mul_(torch.where(is_near_A, self.ppo.kl_decrement, 1.0))
        self._kl_sum.zero_()
        self._kl_count.zero_()
