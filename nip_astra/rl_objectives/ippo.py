"""Objectives of independent PPO (IPPO) and REINFORCE.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.kl import step_kl_weights
from nip_astra.rl_objectives.objective import (
    AgentLosses,
    AgentModules,
    Frames,
    Objective,
    PolicyView,
    whiten_advantages,
)
from nip_astra.rl_objectives.policy_losses import PolicyLoss
from nip_astra.rl_objectives.reductions import bounded


class _PolicyGradientObjective(Objective):
    """Per-agent losses of policy, value function and entropy."""

    def __init__(
        self, agents: AgentModules, rl: RlTrainerParameters, *, critic_coef: float, has_values: bool
    ) -> None:
        super().__init__(agents)
        self.rl = rl
        self.critic_coef = critic_coef
        self.has_values = has_values

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """Return `loss_policy`, `loss_entropy`, `loss_value` if values are learned, and metrics."""
        if not self.has_values:
            return self._policy_entries(name, self.policy_view(name, batch))
        view, values_B = self.policy_view_and_values(name, batch)
        return self._policy_entries(name, view) | self._value_entries(name, values_B, batch)

    def loss_parts(self, name: str) -> tuple[AgentLosses, ...]:
        if not self.has_values or self.agents[name].shares_body:
            return (self.agent_losses,)
        return (
            lambda name, batch: self._policy_entries(name, self.policy_view(name, batch)),
            lambda name, batch: self._value_entries(name, self.agents.values(name, batch), batch),
        )

    def _policy_entries(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        raise NotImplementedError

    def _value_entries(self, name: str, values_B: Tensor, batch: Frames) -> dict[str, Tensor]:
        return {"loss_value": self.critic_coef * self.value_loss(name, values_B, batch, self.rl)}


class IppoObjective(_PolicyGradientObjective):
    """Clipped or KL-penalised policy loss, value loss and entropy bonus for each agent.

    With the ratio `r = pi(a) / pi_old(a)` of the agent's joint move and its advantage `A`, means
    over the frames in which the agent acts:

        clip        loss_policy = mean of ppo.loss, by default
                    -mean min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
        kl_penalty  loss_policy = -mean r A + beta * mean -log r
        loss_value  = critic_coef * mean distance(V, target)       over all frames
        loss_entropy = -entropy_weight * mean H

    (arXiv:1707.06347, eq. 7 and 8; arXiv:2011.09533 for several agents). The mean of `-log r` under
    the old policy is `KL(pi_old || pi)`. `beta`, one per agent, is adapted after each iteration
    (`kl.step_kl_weights`). Beyond 20 nats (`reductions.MAX_LOG_RATIO`) a ratio is held and
    has no gradient; the penalty still has one.

    With normalize_advantage, advantages are shifted and scaled by mean and (unbiased) deviation
    over those frames; the deviation is at least 1e-6, and a single frame gets 0. With clip_value, a
    value counts as no closer to its target than one that has moved by clip_value from the value at
    collection.
    """

    beta: Tensor
    _kl_sum: Tensor
    _kl_count: Tensor

    def __init__(
        self, agents: AgentModules, ppo: CommonPpoParameters, rl: RlTrainerParameters
    ) -> None:
        super().__init__(agents, rl, critic_coef=ppo.critic_coef, has_values=True)
        self.ppo = ppo
        clip = (ppo.clip_low, ppo.clip_high)
        self.clip = PolicyLoss.of("ppo", None, *clip)
        self.loss = PolicyLoss.of("importance_sampling")
        if ppo.loss_type == "clip":
            self.loss = PolicyLoss.of(ppo.loss, ppo.loss_options, *clip)
        num_agents = len(agents.names)
        device = next((p.device for p in agents.parameters()), torch.device("cpu"))
        self.register_buffer("beta", torch.full((num_agents,), ppo.kl_beta, device=device))
        for name in ("_kl_sum", "_kl_count"):
            self.register_buffer(name, torch.zeros(num_agents, device=device), persistent=False)

    def _policy_entries(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        logprobs_B, old_B = view.evaluation.logprobs_B, view.of_agent("logprob")
        is_acting_B = view.is_acting_B
        if is_acting_B is None:
            is_acting_B = torch.ones_like(logprobs_B, dtype=torch.bool)
        advantages_B = view.of_agent("advantage").to(logprobs_B.dtype)
        if self.ppo.normalize_advantage:
            advantages_B = whiten_advantages(advantages_B, view.is_acting_B)
        # A frame is a row with one token.
        losses_B1 = self.loss.of_tokens(
            logprobs_B.unsqueeze(1),
            old_B.unsqueeze(1),
            advantages_B.unsqueeze(1),
            is_acting_B.unsqueeze(1),
        )
        policy_loss = view.mean(losses_B1.squeeze(1))
        if self.ppo.loss_type == "kl_penalty":
            policy_loss = policy_loss + self.beta[view.number] * view.mean(old_B - logprobs_B)
        losses = {
            "loss_policy": policy_loss,
            "loss_entropy": -self.ppo.entropy_weight * view.mean(view.evaluation.entropies_B),
        }
        metrics = self._metrics(view, logprobs_B - old_B, advantages_B)
        return losses | self.logit_losses(name, view) | metrics

    @torch.no_grad()
    def _metrics(
        self, view: PolicyView, log_ratios_B: Tensor, advantages_B: Tensor
    ) -> dict[str, Tensor]:
        held_B = bounded(log_ratios_B)
        ratios_B = held_B.exp()
        mask_B1 = torch.ones_like(held_B, dtype=torch.bool).unsqueeze(1)
        columns = held_B.unsqueeze(1), advantages_B.unsqueeze(1), mask_B1
        outside_B = self.clip.clip_columns(*columns)["ratio_outside_clip"].squeeze(1)
        # A loss without a clip takes every gradient.
        of_loss = self.loss.clip_columns(*columns)
        clipped_B = of_loss["clip_fraction"].squeeze(1) if of_loss else torch.zeros_like(outside_B)
        ratio, square, log_ratio, clip_fraction, outside, entropy = view.figures(
            *(ratios_B, ratios_B.square(), log_ratios_B, clipped_B, outside_B),
            view.evaluation.entropies_B,
        )
        return {
            "kl": -log_ratio,
            "clip_fraction": clip_fraction,
            "ratio_outside_clip": outside,
            # The effective sample size, as a share of the frames: 1 where all ratios are equal.
            "ess": ratio.square() / square.clamp(min=1e-12),
            "entropy": entropy,
        }

    def finish_minibatch(self, entries: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Accumulate divergences; skip minibatches in which an agent never acts."""
        if self.ppo.loss_type != "kl_penalty":
            return
        for name, of_agent in entries.items():
            number, kl = self.agents.number(name), of_agent["kl"]
            self._kl_sum[number] += kl.nan_to_num()
            self._kl_count[number] += ~kl.isnan()

    def finish_iteration(self) -> None:
        """Adapt the penalty weights to the divergences of the iteration."""
        if self.ppo.loss_type == "kl_penalty":
            step_kl_weights(
                self.beta,
                self._kl_sum / self._kl_count,
                target=self.ppo.kl_target,
                increment=self.ppo.kl_increment,
                decrement=self.ppo.kl_decrement,
            )
        self._kl_sum.zero_()
        self._kl_count.zero_()


class ReinforceObjective(_PolicyGradientObjective):
    """Log-likelihood of each agent's moves, weighted by their returns or advantages.

    With the log-probability `log pi(a)` of the agent's joint move, and as weight `G` its reward to
    go or its advantage, means over the frames in which the agent acts (Williams 1992):

        loss_policy  = -mean log pi(a) G
        loss_value   = critic_coef * mean distance(V, target)     over all frames, with advantages
        loss_entropy = -entropy_weight * mean H

    Parameters
    ----------
    rl : RlTrainerParameters, optional
        Distance and clip of the value loss.
    weight : str
        Entry of `agents` that holds `G`, of shape [B, A, 1]: "reward_to_go" or "advantage".
    critic_coef : float
        Weight of the value loss; there is none for rewards to go.
    """

    def __init__(
        self,
        agents: AgentModules,
        rl: RlTrainerParameters | None = None,
        *,
        weight: str = "reward_to_go",
        critic_coef: float = 1.0,
        entropy_weight: float = 0.0,
    ) -> None:
        rl = rl or RlTrainerParameters()
        super().__init__(agents, rl, critic_coef=critic_coef, has_values=weight == "advantage")
        self.weight = weight
        self.entropy_weight = entropy_weight

    def _policy_entries(self, name: str, view: PolicyView) -> dict[str, Tensor]:
        entropies_B = view.evaluation.entropies_B
        (entropy,) = view.figures(entropies_B)
        return {
            "loss_policy": -view.mean(view.evaluation.logprobs_B * view.of_agent(self.weight)),
            "loss_entropy": -self.entropy_weight * view.mean(entropies_B),
            **self.logit_losses(name, view),
            "entropy": entropy,
        }
