"""Advantages of single tokens in conversations that branch.

Shape suffixes: `N` node (one turn of the attacker), `T` token of the turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.rl_objectives.advantages import AdvantageEstimate
from nip_astra.rl_objectives.masked import masked_fill_zero


def token_gae(
    rewards_NT: Tensor,
    values_NT: Tensor,
    mask_NT: Tensor,
    parent_N: Tensor,
    depth_N: Tensor,
    *,
    gamma: float,
    lam: float,
) -> AdvantageEstimate:
    """Generalised advantage estimation over the tokens of a tree of turns (arXiv:1506.02438).

    A path of the tree is one sequence of tokens, the turns one after the other. With
    `delta_t = r_t + g_t * V_(t+1) - V_t`, the advantage is `A_t = delta_t + g_t * lam * A_(t+1)`.
    `g_t` is 1 within a turn and `gamma` from a turn's last token to the next turn's first, so that
    long turns are not discounted for their length. Where the conversation branches, `V_(t+1)` and
    `A_(t+1)` are means over the children. In a chain this is the advantage of the whole sequence.

    Parameters
    ----------
    rewards_NT : Tensor
        Reward of each token; that of the turn stands at its last token. A turn with a reward of
        NaN has no verdict: it gets NaN throughout, and its parent takes no account of it.
    values_NT : Tensor
        Expected return before each token.
    mask_NT : Tensor
        bool, right-padded; True on sampled tokens, at least one a turn.
    gamma, lam : float
        In [0, 1].

    Returns
    -------
    AdvantageEstimate
        `[N, T]` advantages and returns, no gradient, 0 on padding.
    """
    values_NT = values_NT.detach()
    is_known_N = masked_fill_zero(rewards_NT, mask_NT).sum(dim=1).isnan().logical_not()
    rewards_NT = masked_fill_zero(rewards_NT.detach(), mask_NT & is_known_N[:, None])
    values_NT = masked_fill_zero(values_NT, mask_NT)
    length_N = mask_NT.sum(dim=1)
    place_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    is_last_NT = place_T == length_N[:, None] - 1
    next_NT = torch.cat([values_NT[:, 1:], torch.zeros_like(values_NT[:, :1])], dim=1)
    after_N = _mean_over_children(values_NT[:, 0], parent_N, is_known_N)
    next_NT = torch.where(is_last_NT, gamma * after_N[:, None], next_NT)
    delta_NT = masked_fill_zero(rewards_NT + next_NT - values_NT, mask_NT)
    # Within the turn: weight[s, t] = lam**(s - t) for s >= t.
    distance_TT = (place_T[:, None] - place_T).clamp(min=0)
    base = torch.full((), lam, dtype=delta_NT.dtype, device=delta_NT.device)
    own_NT = delta_NT @ (base**distance_TT).tril()
    # From later turns, deepest first: what follows reaches token t over length - t steps of lam.
    steps_NT = (length_N[:, None] - place_T).clamp(min=0)
    reach_NT = gamma * base**steps_NT
    advantage_NT = own_NT
    for level in torch.unique(depth_N).flip(0)[1:]:
        below_N = _mean_over_children(advantage_NT[:, 0], parent_N, is_known_N)
        is_here_N = (depth_N == level)[:, None]
        advantage_NT = torch.where(is_here_N, own_NT + reach_NT * below_N[:, None], advantage_NT)
    advantage_NT = masked_fill_zero(advantage_NT, mask_NT)
    unknown_NT = mask_NT & ~is_known_N[:, None]
    return AdvantageEstimate(
        advantage_NT.masked_fill(unknown_NT, torch.nan),
        masked_fill_zero(advantage_NT + values_NT, mask_NT).masked_fill(unknown_NT, torch.nan),
    )


def _mean_over_children(values_N: Tensor, parent_N: Tensor, counts_N: Tensor) -> Tensor:
    """Mean over the children that count; 0 for who has none."""
    is_child_N = (parent_N >= 0) & counts_N
    index = parent_N[is_child_N]
    sums = torch.zeros_like(values_N).index_add(0, index, values_N[is_child_N])
    ones = torch.zeros_like(values_N).index_add(0, index, torch.ones_like(values_N[is_child_N]))
    return sums / ones.clamp(min=1)
