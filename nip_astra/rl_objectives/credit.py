"""Credit for what a node made possible: rewards carried up a rollout tree.

Shape suffix: `N` node. `parent_N` int64 is the index of the parent, -1 at the root; `depth_N`
int64 counts from 0, a child is one deeper than its parent; nodes may stand in any order. No
gradient flows. A node whose reward is NaN has no verdict: its own result is NaN, and its parent
takes no account of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nip_astra.rl_objectives.masked import masked_fill_zero

Gather = Callable[[Tensor, Tensor, int], Tensor]


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
