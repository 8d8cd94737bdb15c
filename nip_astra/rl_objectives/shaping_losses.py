"""Policy losses on samples whose higher derivatives are right, as `agent_updates` needs them.

A plain policy loss, `-mean(A log pi)`, has the first derivative of an expected return and no other.
The mixed derivative of agent i's return by the parameters of agents l and f holds both their scores
`s_k = d_k log pi_k`, also those of earlier rounds of the episode,

    d_l d_f E[return] = E[sum over rounds t of A_t (s_lt s_ft' + s_lt S_ft' + S_lt s_ft')],

with `S_kt` the sum of `s_k` over the rounds before t. Where agents move in turn no round has two
scores, so that the sums over earlier rounds are all there is. For l = f there is also `d_l s_lt`.

The magic box, `box(x) = exp(x - x without gradient)`, has the value 1 and the derivative
`box(x) dx` (arXiv:1802.05098). In its form for advantages (arXiv:1909.10549) a loss is

    L_i = -1/n sum over frames b of A_ib (box(joint_b) - 1) box(earlier_b)  -  1/n sum_b A_ib

with `joint` the log-probability of all agents' moves in a frame, `earlier` its sum over earlier
rounds of the episode, and n the number of frames. Its gradient by any agent's parameters is that of
the plain policy loss; its second derivative is the one above.

Shape suffixes: `B` frame (one round of one episode), `A` agent, `I` agent whose loss it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import bounded, masked_fill_zero


def shaping_losses(
    logprobs_BA: Tensor,
    advantages_BA: Tensor,
    mask_BA: Tensor,
    *,
    episode_B: Tensor | None = None,
    round_B: Tensor | None = None,
) -> Tensor:
    """The loss of every agent as a function of all agents' parameters (spg, lola, sos).

    Every derivative is unbiased on frames of whole episodes that the present policies played, with
    advantages that are right in expectation and no discount of later rounds beside the one in the
    advantages. It is biased by reuse of frames (later epochs), as that of any loss without ratios;
    second derivatives lose what lies outside the batch where it cuts episodes.

    Parameters
    ----------
    logprobs_BA : Tensor
        Log-probability of each agent's whole move, nats, with gradient.
    advantages_BA : Tensor
        Of each agent, also in frames where others move: how much better it fares than it was to
        expect before that round. No gradient flows.
    mask_BA : Tensor
        bool; True where the agent moved. Elsewhere its log-probability never matters, not even NaN.
        A frame in which nobody moved is padding: nothing in it matters.
    episode_B, round_B : Tensor, optional
        long; which episode a frame is of, and which round. No two frames have both in common. The
        order of frames makes no difference. Without them each frame is an episode.

    Returns
    -------
    Tensor
        `[A]`, with the graph for derivatives of any order. The value is minus the mean advantage;
        the derivatives alone matter.
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
    """Losses whose gradients are those of PPO's clipped ones (pspg, pola, psos).

    With agent k's ratio `r_k = pi_k / pi_k old` and `c_ik = min(r_k, 1 + clip_high)` where the
    advantage of agent i is >= 0, `max(r_k, 1 - clip_low)` elsewhere, the magic box of the joint
    log-probability in the loss of agent i gives way to the product over agents k of `1 + c_ik -
    c_ik without gradient`. So the gradient of `L_i` by agent k's parameters is that of
    `-mean min(r_k A_i, clip(r_k, 1 - clip_low, 1 + clip_high) A_i)` (arXiv:1707.06347, eq. 7),
    and a second derivative has the product of both agents' clipped ratios. A score of an earlier
    round has no ratio, as PPO too neglects how policies change the distribution of states.

    Where policies are those that played, every derivative is that of `shaping_losses`. In later
    epochs it is biased by the clip and by the ratios of other agents and rounds that are left out,
    and has less variance than with them.

    Parameters
    ----------
    old_logprobs_BA : Tensor
        As `logprobs_BA`, of the policies that played, without gradient.
    clip_low, clip_high : float
        How far a ratio may move below and above 1 with a gain, > 0.
    logprobs_BA, advantages_BA, mask_BA, episode_B, round_B
        See `shaping_losses`.

    Returns
    -------
    Tensor
        `[A]`, as of `shaping_losses`.
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
    """1 with the derivative `box(x) dx` (arXiv:1802.05098, eq. 4)."""
    return (values - values.detach()).exp()


def _losses(joint_BI: Tensor, earlier_B: Tensor, advantages_BI: Tensor, mask_BA: Tensor) -> Tensor:
    is_frame_B1 = mask_BA.any(dim=1, keepdim=True)
    advantages_BI = masked_fill_zero(advantages_BI.detach(), is_frame_B1)
    change_BI = (joint_BI - joint_BI.detach()) * magic_box(earlier_B).unsqueeze(1)
    return -(advantages_BI * (1 + change_BI)).sum(dim=0) / is_frame_B1.sum().clamp(min=1)


def _sum_over_earlier_rounds(
    values_B: Tensor, episode_B: Tensor | None, round_B: Tensor | None
) -> Tensor:
    """Sum over those frames of the same episode whose round is earlier."""
    if episode_B is None or round_B is None:
        if episode_B is not None or round_B is not None:
            raise ConfigurationError(
                "a loss over episodes was given only one of episode_B and round_B; which frame is "
                "earlier than which takes both. Give both, or neither for episodes of one round."
            )
        return torch.zeros_like(values_B)
    if len(values_B) == 0:
        return values_B
    by_round_B = round_B.argsort(stable=True)
    order_B = by_round_B[episode_B[by_round_B].argsort(stable=True)]
    # One row an episode, so that no rounding error passes from one to another.
    sorted_B = episode_B[order_B]
    row_B = (sorted_B.diff(prepend=sorted_B[:1]) != 0).cumsum(0)
    lengths = row_B.bincount()
    first = lengths.cumsum(0) - lengths
    column_B = torch.arange(len(values_B), device=values_B.device) - first[row_B]
    table = values_B.new_zeros(len(lengths), int(lengths.max()))
    table = table.index_put((row_B, column_B), values_B[order_B])
    earlier_B = (table.cumsum(dim=1) - table)[row_B, column_B]
    return torch.zeros_like(values_B).index_put((order_B,), earlier_B)
