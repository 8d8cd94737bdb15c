"""Losses of agents in a protocol who foresee how others learn from them.

Shapes: B frames, A agents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.advantages import whiten
from nip_astra.rl_objectives.ippo import MIN_ADVANTAGE_STD
from nip_astra.rl_objectives.objective import (
    EPISODE_KEY,
    AgentModules,
    Frames,
    Objective,
    PolicyView,
    frames_of,
    sum_of_losses,
    value_loss_of_agent,
)
from nip_astra.rl_objectives.shaping_losses import clipped_shaping_losses, shaping_losses
from nip_astra.rl_objectives.stackelberg import AgentUpdate, agent_updates
from nip_astra.rl_objectives.stackelberg_variants import UpdateRule
from nip_astra.utils.seeding import SeedPart, derive_seed

_OF_POLICY = ("loss_policy", "loss_entropy", "loss_logits")
"""Losses of an agent that others foresee."""


class _Evaluations(NamedTuple):
    """Policies and values of the agents that learn, by name, in a minibatch."""

    views: dict[str, PolicyView]
    values_B: dict[str, Tensor]
    is_acting_BA: Tensor


class SpgObjective(Objective):
    """Policy, entropy and value losses, with opponent shaping in the gradients.

    The policy loss of an agent depends on the policies of all (`shaping_losses`, or
    `clipped_shaping_losses` for the clipped variants), and its entropy bonus belongs to what others
    foresee. `agent_updates` gives the directions in place of the gradients of

        L_i = loss_policy_i - entropy_weight mean H_i [+ loss_logits_i]

    (the last where a protocol rewards logits, as zero knowledge does), and the gradient of
    `critic_coef mean distance(V, target)` is added to them. Frames of a minibatch
    must be of whole episodes, as far as the batch holds them, and have `EPISODE_KEY`.

    Parameters
    ----------
    policy_parameters : Mapping[str, Sequence[Parameter]]
        By agent, the weights that its policy has and may learn. An agent without an entry does not
        learn.
    groups : Sequence of Sequence of str
        Agents by name, leaders first.
    rule : UpdateRule
        The algorithm and its settings.
    step_factor : Callable
        Gives what the step sizes are to be multiplied with at present.
    key : tuple
        Path of names that the random numbers of Nystrom's method derive from.
    """

    reads_episodes: ClassVar[bool] = True
    num_updates: Tensor

    def __init__(
        self,
        agents: AgentModules,
        ppo: CommonPpoParameters,
        rl: RlTrainerParameters,
        *,
        policy_parameters: Mapping[str, Sequence[nn.Parameter]],
        groups: Sequence[Sequence[str]],
        rule: UpdateRule,
        step_factor: Callable[[], float],
        key: tuple[SeedPart, ...],
    ) -> None:
        super().__init__(agents)
        self.ppo = ppo
        self.rl = rl
        self.groups = tuple(tuple(agents.number(name) for name in group) for group in groups)
        self.rule = rule
        self.step_factor = step_factor
        self._policy_weights = {name: list(own) for name, own in policy_parameters.items()}
        self._key = key
        # A buffer, so that a checkpoint has it and a resumed run draws the same.
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long))

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """An agent's losses by its own policy alone, without opponent shaping."""
        evaluations = self._evaluate([name], batch)
        number = self.agents.number(name)
        policy = self._policy_losses(evaluations, batch)[number]
        return {"loss_policy": policy, **self._further_losses(name, evaluations, batch)}

    def compute_gradients(
        self, batch: TensorDict, names: Sequence[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Add to the agents' gradients their directions, and give what to log by agent.

        Parameters
        ----------
        names : Sequence[str]
            Agents that learn; nobody foresees the others to.
        """
        frames = frames_of(batch)
        # Fused attention cannot be differentiated twice.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            evaluations = self._evaluate(names, frames)
            policy_A = self._policy_losses(evaluations, frames)
            entries = {
                name: self._further_losses(name, evaluations, frames)
                | {"loss_policy": policy_A[self.agents.number(name)]}
                for name in names
            }
            own = [self._weights(name, names) for name in self.agents.names]
            losses = [
                sum_of_losses(
                    (key, entries[name][key]) for key in _OF_POLICY if key in entries[name]
                )
                if name in entries
                else policy_A[number]
                for number, name in enumerate(self.agents.names)
            ]
            updates = agent_updates(
                losses,
                own,
                rule=self._present_rule(),
                groups=self.groups,
                generator=self._generator(),
            )
            if entries:
                values = [found["loss_value"] for found in entries.values()]
                torch.autograd.backward(torch.stack(values).sum())
        for parameters, update in zip(own, updates, strict=True):
            for parameter, direction in zip(parameters, update.update, strict=True):
                value_grad = parameter.grad
                parameter.grad = direction if value_grad is None else value_grad + direction
        return {
            name: {key: value.detach() for key, value in found.items()}
            | _figures(updates[self.agents.number(name)])
            for name, found in entries.items()
        }

    def _weights(self, name: str, names: Sequence[str]) -> list[nn.Parameter]:
        return self._policy_weights.get(name, []) if name in names else []

    def _present_rule(self) -> UpdateRule:
        factor = self.step_factor()
        return replace(self.rule, step_sizes=tuple(factor * size for size in self.rule.step_sizes))

    def _generator(self) -> torch.Generator:
        self.num_updates += 1
        seed = derive_seed(*self._key, int(self.num_updates))
        return torch.Generator().manual_seed(seed)

    def _evaluate(self, names: Sequence[str], frames: Frames) -> _Evaluations:
        views, values_B = {}, {}
        for name in names:
            views[name], values_B[name] = self.policy_view_and_values(name, frames)
        acting = [self.agents.is_acting(name, frames) for name in self.agents.names]
        return _Evaluations(views, values_B, torch.stack(acting, dim=1))

    def _policy_losses(self, evaluations: _Evaluations, frames: Frames) -> Tensor:
        """The policy loss of every agent, [A], by the policies of those evaluated."""
        is_acting_BA = evaluations.is_acting_BA
        advantages_BA = frames["agents", "advantage"].squeeze(-1)
        if self.ppo.normalize_advantage:
            columns = [
                whiten(values_B, epsilon=0.0, min_std=MIN_ADVANTAGE_STD)
                for values_B in advantages_BA.unbind(dim=1)
            ]
            advantages_BA = torch.stack(columns, dim=1)
        old_BA = frames["agents", "logprob"]
        logprobs_BA = torch.stack(
            [
                _on_all_frames(evaluations.views[name], is_acting_BA[:, number])
                if name in evaluations.views
                else old_BA[:, number]
                for number, name in enumerate(self.agents.names)
            ],
            dim=1,
        )
        episode_B, round_B = frames[EPISODE_KEY], frames["round"]
        if not self.rule.variant.is_clipped:
            return shaping_losses(
                logprobs_BA, advantages_BA, is_acting_BA, episode_B=episode_B, round_B=round_B
            )
        return clipped_shaping_losses(
            logprobs_BA,
            old_BA,
            advantages_BA,
            is_acting_BA,
            clip_low=self.ppo.clip_low,
            clip_high=self.ppo.clip_high,
            episode_B=episode_B,
            round_B=round_B,
        )

    def _further_losses(
        self, name: str, evaluations: _Evaluations, frames: Frames
    ) -> dict[str, Tensor]:
        view, number = evaluations.views[name], self.agents.number(name)
        value_loss = value_loss_of_agent(
            *(number, evaluations.values_B[name], frames),
            loss_type=self.rl.loss_critic_type,
            clip_value=self.rl.clip_value,
        )
        entropies_B = view.evaluation.entropies_B
        log_ratios_B = view.evaluation.logprobs_B.detach() - view.of_agent("logprob")
        entropy, log_ratio = view.figures(entropies_B, log_ratios_B)
        return self.logit_losses(name, view) | {
            "loss_value": self.ppo.critic_coef * value_loss,
            "loss_entropy": -self.ppo.entropy_weight * view.mean(entropies_B),
            "entropy": entropy,
            "kl": -log_ratio,
        }


def _on_all_frames(view: PolicyView, is_acting_B: Tensor) -> Tensor:
    """Log-probabilities of all frames, 0 where the agent does not act."""
    logprobs_B = view.evaluation.logprobs_B
    if view.is_acting_B is None:
        zeros_B = logprobs_B.new_zeros(len(is_acting_B))
        return zeros_B.index_put((is_acting_B.nonzero().flatten(),), logprobs_B)
    if len(view.is_acting_B) == len(is_acting_B):
        return torch.where(is_acting_B, logprobs_B, 0.0)
    # The one frame that stands for none.
    return (0.0 * logprobs_B).expand(len(is_acting_B))


def _figures(update: AgentUpdate) -> dict[str, Tensor]:
    return {
        "policy_grad_norm": update.gradient_P.norm(),
        "shaping_norm": update.shaping_P.norm(),
        "lookahead_norm": update.lookahead_P.norm(),
        "shaping_share": update.share,
    }
