"""Returns: rewards that follow a step of an episode or a node of a rollout tree, summed.

Shape suffixes: `E` episode, `H` step of an episode (turn or token), `N` node of a tree. No gradient
flows.

In a tree, `parent_N` int64 is the index of the parent, -1 at the root; `depth_N` int64 counts from
0, a child is one deeper than its parent; nodes may stand in any order. A node whose reward is NaN
has no verdict: its own result is NaN, and its parent takes no account of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.masked import masked_fill_zero

Gather = Callable[[Tensor, Tensor, int], Tensor]
"""`(values, parents, num_nodes) -> below_N`, what the children of each node amount to."""


def nstep_returns(
    rewards_EH: Tensor,
    mask_EH: Tensor,
    *,
    n: int | None,
    gamma: float,
    values_EH: Tensor | None = None,
) -> Tensor:
    """Discounted sum of the next n rewards, and with values the discounted value after them.

    `G_t = sum_(j<n) gamma**j r_(t+j) + gamma**n V_(t+n)`, without the last term where no values are
    given or the episode ends before. Steps where the mask is False do not exist: those around them
    follow each other. No gradient flows.

    Parameters
    ----------
    n : int, optional
        At least 1; None sums to the end of the episode (reward to go).
    gamma : float
        In [0, 1].
    values_EH : Tensor, optional
        Expected return from each step on.

    Returns
    -------
    Tensor
        `[E, H]`; 0 where the mask is False.

    Raises
    ------
    ConfigurationError
        When n is below 1.
    """
    if n is not None and n < 1:
        raise ConfigurationError(
            f"returns over {n} steps were asked for; a return holds at least the reward of its own "
            "step. Give n >= 1, or None for all steps to the end."
        )
    rewards_EH = rewards_EH.detach()
    order = torch.argsort(mask_EH.logical_not().to(torch.uint8), dim=1, stable=True)
    place_H = torch.arange(mask_EH.shape[1], device=mask_EH.device)
    is_step_EH = place_H < mask_EH.sum(dim=1, keepdim=True)
    reward_EH = masked_fill_zero(rewards_EH.gather(1, order), is_step_EH)
    distance_HH = place_H.unsqueeze(1) - place_H
    base = torch.full((), gamma, dtype=reward_EH.dtype, device=reward_EH.device)
    is_within = (distance_HH >= 0) & (distance_HH < (len(place_H) if n is None else n))
    # weight[s, t] = gamma**(s - t) for t <= s < t + n: no loop over steps.
    weight_HH = masked_fill_zero(base ** distance_HH.clamp(min=0), is_within)
    returns_EH = reward_EH @ weight_HH
    if values_EH is not None and n is not None:
        value_EH = masked_fill_zero(values_EH.detach().gather(1, order), is_step_EH)
        later_EH = torch.zeros_like(value_EH)
        later_EH[:, : max(len(place_H) - n, 0)] = value_EH[:, n:]
        returns_EH = returns_EH + base**n * later_EH
    returns_EH = torch.zeros_like(returns_EH).scatter(1, order, returns_EH)
    return masked_fill_zero(returns_EH, mask_EH)


def best_child_backup(
    reward_N: Tensor, parent_N: Tensor, depth_N: Tensor, *, decay: float
) -> Tensor:
    """Each node's reward and a part of what its best child got, `[N]`.

    `b(n) = r(n) + decay * max over children c of b(c)`, and `b(n) = r(n)` without children: an
    optimistic return, since the attacker may choose the branch (the backup of MALIBU).

    Parameters
    ----------
    decay : float
        In [0, 1]. 0 gives the rewards themselves.
    """
    return _carry_up(reward_N, parent_N, depth_N, decay, _best_of)


def mean_child_return(
    reward_N: Tensor, parent_N: Tensor, depth_N: Tensor, *, discount: float
) -> Tensor:
    """The discounted return of the turns that follow, averaged over branches, `[N]`.

    `R(n) = r(n) + discount * mean over children c of R(c)`, and `R(n) = r(n)` without children.
    In a chain this is the return; in a tree an estimate of its mean under the policy that sampled
    the children.

    Parameters
    ----------
    discount : float
        In [0, 1]. 0 gives the rewards themselves.
    """
    return _carry_up(reward_N, parent_N, depth_N, discount, _mean_of)


def _carry_up(
    reward_N: Tensor, parent_N: Tensor, depth_N: Tensor, factor: float, gather: Gather
) -> Tensor:
    """Add to each node `factor` times what `gather` makes of its children, deepest level first."""
    total_N = reward_N.detach().clone()
    for level in torch.unique(depth_N).flip(0):
        is_child_N = (depth_N == level) & (parent_N >= 0) & total_N.isnan().logical_not()
        below_N = gather(total_N[is_child_N], parent_N[is_child_N], len(total_N))
        total_N = total_N + factor * below_N
    return total_N


def _mean_of(values: Tensor, parents: Tensor, num_nodes: int) -> Tensor:
    """Mean by parent, `[N]`; 0 for who has no child."""
    sums = values.new_zeros(num_nodes).index_add(0, parents, values)
    counts = values.new_zeros(num_nodes).index_add(0, parents, torch.ones_like(values))
    return sums / counts.clamp(min=1)


def _best_of(values: Tensor, parents: Tensor, num_nodes: int) -> Tensor:
    """Maximum by parent, `[N]`; 0 for who has no child."""
    best = values.new_full((num_nodes,), -torch.inf)
    best = best.scatter_reduce(0, parents, values, "amax")
    return masked_fill_zero(best, best > -torch.inf)
