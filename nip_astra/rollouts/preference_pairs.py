"""Choose preference pairs among siblings: the best child of a conversation against the worst.

Shape suffixes: `N` node, `P` group of siblings, `G` sibling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from nip_astra.rollouts.tree import RolloutTree


@dataclass(frozen=True)
class PairSelection:
    """The pairs of a tree, and why other groups gave none.

    Attributes
    ----------
    chosen, rejected : list[int]
        Node indices, one a pair.
    num_ties : int
        Groups whose credits are all equal, or which have fewer than two rated siblings.
    num_identical : int
        Groups whose best and worst probe are the same tokens.
    num_below_margin : int
        Groups whose credits or scores differ by too little, or whose best score is too low.
    """

    chosen: list[int]
    rejected: list[int]
    num_ties: int
    num_identical: int
    num_below_margin: int


def select_pairs(
    tree: RolloutTree,
    *,
    min_reward_difference: float,
    min_score_difference: float | None = None,
    min_chosen_score: float | None = None,
) -> PairSelection:
    """Pair the best with the worst sibling of every node (arXiv:2407.09447, section 3).

    Siblings are ranked by the nodes' `credit`, or by their `reward` where there is none; those
    without a verdict are left out. A pair is kept where these differ by more than
    `min_reward_difference` and, unless these are None, the response scores differ by more than
    `min_score_difference` in the same direction and the chosen node's response score is at least
    `min_chosen_score`.
    Each group that gives no pair is counted once, under the first reason that holds: tie,
    identical probes, below a margin.
    """
    groups_PG = tree.sibling_groups()
    reward_N = tree.nodes.get("credit", tree.nodes["reward"])
    rewards_PG = reward_N[groups_PG]
    best_P = _node_at(groups_PG, rewards_PG.nan_to_num(nan=-math.inf).argmax(dim=1))
    worst_P = _node_at(groups_PG, rewards_PG.nan_to_num(nan=math.inf).argmin(dim=1))
    # A group without any verdict has nothing to choose between.
    reward_gap_P = (reward_N[best_P] - reward_N[worst_P]).nan_to_num(nan=0.0)
    scores_N = tree.nodes["response_score"]

    is_tie_P = reward_gap_P == 0
    probes = tree.nodes["probe"] * tree.nodes["probe_mask"]
    is_same_P = (probes[best_P] == probes[worst_P]).all(dim=1) & ~is_tie_P
    is_close_P = reward_gap_P <= min_reward_difference
    if min_score_difference is not None:
        is_close_P |= scores_N[best_P] - scores_N[worst_P] <= min_score_difference
    if min_chosen_score is not None:
        is_close_P |= scores_N[best_P] < min_chosen_score
    is_close_P &= ~is_tie_P & ~is_same_P
    is_pair_P = ~(is_tie_P | is_same_P | is_close_P)
    return PairSelection(
        chosen=best_P[is_pair_P].tolist(),
        rejected=worst_P[is_pair_P].tolist(),
        num_ties=int(is_tie_P.sum()),
        num_identical=int(is_same_P.sum()),
        num_below_margin=int(is_close_P.sum()),
    )


def _node_at(groups_PG: Tensor, index_P: Tensor) -> Tensor:
    return groups_PG.gather(1, index_P.unsqueeze(1)).squeeze(1)
