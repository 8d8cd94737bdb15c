"""Losses of agents in a protocol that anticipate how other agents learn from them.

A plain policy loss, `-mean(A log pi)`, has the first derivative of an expected return and no other.
The mixed derivative of agent i's return by the parameters of agents l and f holds both their scores
`s_k = d_k log pi_k`, also those of earlier rounds of the episode,

    d_l d_f E[return] = E[sum over rounds t of A_t (s_lt s_ft' + s_lt S_ft' + S_lt s_ft')],

with `S_kt` the sum of `s_k` over the rounds before t. Where agents move in turn no round has two
scores, and only the sums over earlier rounds remain. For l = f there is also `d_l s_lt`.

The magic box, `box(x) = exp(x - x without gradient)`, has the value 1 and the derivative
`box(x) dx` (arXiv:1802.05098, eq. 4). In its form for advantages (arXiv:1909.10549) a loss is

    L_i = -1/n sum over frames b of A_ib (box(joint_b) - 1) box(earlier_b)  -  1/n sum_b A_ib

with `joint` the log-probability of all agents' moves in a frame, `earlier` its sum over earlier
rounds of the episode, and n the number of frames. Its gradient by any agent's parameters is that of
the plain policy loss; its second derivative is the one above.

Shape suffixes: `B` frame (one round of one episode), `A` agent, `I` agent whose loss it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.trainers import CommonPpoParameters, RlTrainerParameters
from nip_astra.rl_objectives.objective import (
    EPISODE_KEY,
    AgentModules,
    Frames,
    Objective,
    PolicyView,
    frames_of,
    sum_of_losses,
    whiten_advantages,
)
from nip_astra.rl_objectives.reductions import bounded, masked_fill_zero
from nip_astra.rl_objectives.stackelberg import VARIANTS, SpgParameters, agent_updates
from nip_astra.utils.seeding import SeedPart, derive_seed

_OF_POLICY = ("loss_policy", "loss_entropy", "loss_logits")
"""Losses of an agent whose learning step others anticipate."""


class _Evaluations(NamedTuple):
    """Policies and values of the learning agents in a minibatch, by name."""

    views: dict[str, PolicyView]
    values_B: dict[str, Tensor]
    is_acting_BA: Tensor


class SpgObjective(Objective):
    """Policy, entropy and value losses, with opponent shaping in the gradients.

    The policy loss of an agent depends on the policies of all (`shaping_losses`, or
    `clipped_shaping_losses` for the clipped variants), and others anticipate its entropy bonus too.
    `agent_updates` gives the directions in place of the gradients of

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
    rule : SpgParameters
        The algorithm and its settings.
    step_sizes : Callable
        Returns the present step size of each agent, as its leaders anticipate it.
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
        rule: SpgParameters,
        step_sizes: Callable[[], Sequence[float]],
        key: tuple[SeedPart, ...],
    ) -> None:
        super().__init__(agents)
        self.ppo = ppo
        self.rl = rl
        self.groups = tuple(tuple(agents.number(name) for name in group) for group in groups)
        self.rule = rule
        self.step_sizes = step_sizes
        self._policy_weights = {name: list(weights) for name, weights in policy_parameters.items()}
        self._key = key
        # A buffer, so that a checkpoint has it and a resumed run draws the same.
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long))

    def agent_losses(self, name: str, batch: Frames) -> dict[str, Tensor]:
        """Return an agent's losses from its own policy alone, without opponent shaping."""
        evaluations = self._evaluate([name], batch)
        policy = self._policy_losses(evaluations, batch)[self.agents.number(name)]
        return {"loss_policy": policy, **self._further_losses(name, evaluations, batch)}

    def compute_gradients(
        self, batch: TensorDict, names: Sequence[str]
    ) -> dict[str, dict[str, Tensor]]:
        """Add each agent's direction to its gradients; return the metrics by agent.

        `names` are the agents that learn; the updates of the others are not foreseen.
        """
        frames, agents = frames_of(batch), self.agents
        # Fused attention cannot be differentiated twice.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            evaluations = self._evaluate(names, frames)
            losses = list(self._policy_losses(evaluations, frames))
            entries = {}
            for name in names:
                number = agents.number(name)
                further = self._further_losses(name, evaluations, frames)
                entries[name] = further | {"loss_policy": losses[number]}
                losses[number] = sum_of_losses(
                    (key, entries[name][key]) for key in _OF_POLICY if key in entries[name]
                )
            # An agent that does not learn now has no weights to differentiate by.
            weights_by_agent = [
                self._policy_weights.get(name, []) if name in names else [] for name in agents.names
            ]
            self.num_updates += 1
            seed = derive_seed(*self._key, int(self.num_updates))
            updates = agent_updates(
                losses,
                weights_by_agent,
                rule=self.rule,
                step_sizes=self.step_sizes(),
                groups=self.groups,
                generator=torch.Generator().manual_seed(seed),
            )
            if entries:
                values = [losses_of["loss_value"] for losses_of in entries.values()]
                torch.autograd.backward(torch.stack(values).sum())
        for parameters, update in zip(weights_by_agent, updates, strict=True):
            for parameter, direction in zip(parameters, update.update, strict=True):
                value_grad = parameter.grad
                parameter.grad = direction if value_grad is None else value_grad + direction
        figures = {}
        for name, losses_of in entries.items():
            update = updates[agents.number(name)]
            figures[name] = {key: value.detach() for key, value in losses_of.items()} | {
                "policy_grad_norm": update.gradient_P.norm(),
                "shaping_norm": update.shaping_P.norm(),
                "lookahead_norm": update.lookahead_P.norm(),
                "shaping_share": update.share,
            }
        return figures

    def _evaluate(self, names: Sequence[str], frames: Frames) -> _Evaluations:
        views, values_B = {}, {}
        for name in names:
            views[name], values_B[name] = self.policy_view_and_values(name, frames)
        acting = [self.agents.is_acting(name, frames) for name in self.agents.names]
        return _Evaluations(views, values_B, torch.stack(acting, dim=1))

    def _policy_losses(self, evaluations: _Evaluations, frames: Frames) -> Tensor:
        """Return every agent's policy loss, [A], from the evaluated policies."""
        is_acting_BA = evaluations.is_acting_BA
        advantages_BA = frames["agents", "advantage"].squeeze(-1)
        if self.ppo.normalize_advantage:
            columns = [whiten_advantages(values_B) for values_B in advantages_BA.unbind(dim=1)]
            advantages_BA = torch.stack(columns, dim=1)
        old_BA = frames["agents", "logprob"]
        logprobs_B = list(old_BA.unbind(dim=1))
        for name, view in evaluations.views.items():
            number = self.agents.number(name)
            logprobs_B[number] = _on_all_frames(view, is_acting_BA[:, number])
        logprobs_BA = torch.stack(logprobs_B, dim=1)
        episode_B, round_B = frames[EPISODE_KEY], frames["round"]
        if not VARIANTS[self.rule.variant].is_clipped:
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
        view = evaluations.views[name]
        entropies_B = view.evaluation.entropies_B
        log_ratios_B = view.evaluation.logprobs_B.detach() - view.of_agent("logprob")
        entropy, log_ratio = view.figures(entropies_B, log_ratios_B)
        value_loss = self.value_loss(name, evaluations.values_B[name], frames, self.rl)
        return self.logit_losses(name, view) | {
            "loss_value": self.ppo.critic_coef * value_loss,
            "loss_entropy": -self.ppo.entropy_weight * view.mean(entropies_B),
            "entropy": entropy,
            "kl": -log_ratio,
        }


def _on_all_frames(view: PolicyView, is_acting_B: Tensor) -> Tensor:
    """Return log-probabilities on all frames, 0 where the agent does not act."""
    logprobs_B: Tensor = view.evaluation.logprobs_B
    if view.is_acting_B is None:
        zeros_B = logprobs_B.new_zeros(len(is_acting_B))
        return zeros_B.index_put((is_acting_B.nonzero().flatten(),), logprobs_B)
    if len(view.is_acting_B) == len(is_acting_B):
        return torch.where(is_acting_B, logprobs_B, 0.0)
    # A single frame in place of an empty batch.
    return (0.0 * logprobs_B).expand(len(is_acting_B))


def shaping_losses(
    logprobs_BA: Tensor,
    advantages_BA: Tensor,
    mask_BA: Tensor,
    *,
    episode_B: Tensor | None = None,
    round_B: Tensor | None = None,
) -> Tensor:
    """Compute each agent's loss as a function of all agents' parameters (spg, lola, sos), `[A]`.

    Every derivative is unbiased on frames of whole episodes that the present policies played, with
    advantages that are right in expectation and no discount of later rounds beside the one in the
    advantages. It is biased by reuse of frames (later epochs), as that of any loss without ratios;
    second derivatives miss the rounds outside the batch where it cuts episodes. The value is minus
    the mean advantage.

    Parameters
    ----------
    logprobs_BA : Tensor
        Log-probability of each agent's whole move, nats, with gradient.
    advantages_BA : Tensor
        Of each agent, also in frames where others move. No gradient flows.
    mask_BA : Tensor
        bool; True where the agent moved. Elsewhere its log-probability never matters, not even NaN.
        A frame in which no agent moved is padding and does not matter.
    episode_B, round_B : Tensor, optional
        long; the episode and the round of a frame, in any order. Without them each frame is an
        episode.
    """
    logprobs_BA = masked_fill_zero(logprobs_BA, mask_BA)
    joint_BI = magic_box(logprobs_BA.sum(dim=1, keepdim=True)).expand_as(logprobs_BA)
    earlier_B = _sum_over_earlier_rounds(logprobs_BA.sum(dim=1), episode_B, round_B)
    return _losses(joint_BI, earlier_B, advantages_BA, mask_BA)


def clipped_shaping_losses(
    logprobs_BA: Tensor,
    old_logprobs_BA: Tensor,
    advantages_BA: Tensor,
    mask_BA: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    episode_B: Tensor | None = None,
    round_B: Tensor | None = None,
) -> Tensor:
    """Compute losses with the gradients of PPO's clipped losses (pspg, pola, psos), `[A]`.

    With agent k's ratio `r_k = pi_k / pi_k old` and `c_ik = min(r_k, 1 + clip_high)` where the
    advantage of agent i is >= 0, `max(r_k, 1 - clip_low)` elsewhere, the magic box of the joint
    log-probability in the loss of agent i gives way to the product over agents k of `1 + c_ik -
    c_ik without gradient`. So the gradient of `L_i` by agent k's parameters is that of
    `-mean min(r_k A_i, clip(r_k, 1 - clip_low, 1 + clip_high) A_i)` (arXiv:1707.06347, eq. 7),
    and a second derivative has the product of both agents' clipped ratios. A score of an earlier
    round has no ratio, as PPO too neglects how policies change the distribution of states.

    Where policies are those that played, every derivative is that of `shaping_losses`, whose
    parameters these are. In later epochs it is biased by the clip and by the omitted ratios of
    other agents and rounds, and has less variance than with them.

    Parameters
    ----------
    old_logprobs_BA : Tensor
        As `logprobs_BA`, of the policies that played, without gradient.
    clip_low, clip_high : float
        How far a ratio may move below and above 1 with a gain, > 0.
    """
    log_ratio_BA = masked_fill_zero(logprobs_BA - old_logprobs_BA.detach(), mask_BA)
    ratio_BIA = bounded(log_ratio_BA).exp().unsqueeze(1)
    clipped_BIA = torch.where(
        advantages_BA.detach().unsqueeze(2) >= 0,
        ratio_BIA.clamp(max=1 + clip_high),
        ratio_BIA.clamp(min=1 - clip_low),
    )
    joint_BI = (1 + clipped_BIA - clipped_BIA.detach()).prod(dim=2)
    joint_B = masked_fill_zero(logprobs_BA, mask_BA).sum(dim=1)
    earlier_B = _sum_over_earlier_rounds(joint_B, episode_B, round_B)
    return _losses(joint_BI, earlier_B, advantages_BA, mask_BA)


def magic_box(values: Tensor) -> Tensor:
    """Return 1 with the derivative `box(x) dx`."""
    return (values - values.detach()).exp()


def _losses(joint_BI: Tensor, earlier_B: Tensor, advantages_BI: Tensor, mask_BA: Tensor) -> Tensor:
    is_frame_B1 = mask_BA.any(dim=1, keepdim=True)
    advantages_BI = masked_fill_zero(advantages_BI.detach(), is_frame_B1)
    change_BI = (joint_BI - joint_BI.detach()) * magic_box(earlier_B).unsqueeze(1)
    return -(advantages_BI * (1 + change_BI)).sum(dim=0) / is_frame_B1.sum().clamp(min=1)


def _sum_over_earlier_rounds(
    values_B: Tensor, episode_B: Tensor | None, round_B: Tensor | None
) -> Tensor:
    """Sum over the frames of the same episode with an earlier round."""
    if (episode_B is None) != (round_B is None):
        raise ConfigurationError(
            "a loss over episodes needs both episode_B and round_B, or neither for episodes of "
            "one round."
        )
    if episode_B is None or round_B is None or len(values_B) == 0:
        return torch.zeros_like(values_B)
    by_round_B = round_B.argsort(stable=True)
    order_B = by_round_B[episode_B[by_round_B].argsort(stable=True)]
    # One row per episode, so that rounding errors do not spread between episodes.
    sorted_B = episode_B[order_B]
    row_B = (sorted_B.diff(prepend=sorted_B[:1]) != 0).cumsum(0)
    lengths = row_B.bincount()
    first = lengths.cumsum(0) - lengths
    column_B = torch.arange(len(values_B), device=values_B.device) - first[row_B]
    table = values_B.new_zeros(len(lengths), int(lengths.max()))
    table = table.index_put((row_B, column_B), values_B[order_B])
    earlier_B = (table.cumsum(dim=1) - table)[row_B, column_B]
    return torch.zeros_like(values_B).index_put((order_B,), earlier_B)
