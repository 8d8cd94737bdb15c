"""Trees are read in the right direction, and only real preferences become pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from nip_astra.language_models.base import pad_right
from nip_astra.rollouts.samples import collate
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.dpo import select_pairs
from tests.kit.tiny import CPU


def make_tree(rewards: list[float], scores: list[float], probes: list[list[int]]) -> RolloutTree:
    """One level, width 2: consecutive pairs are siblings."""
    count = len(rewards)
    ids, mask = pad_right(probes, CPU)
    values = {"reward": torch.tensor(rewards), "response_score": torch.tensor(scores)}
    values |= {"parent": torch.full((count,), -1), "probe": ids, "probe_mask": mask}
    names = [str(i) for i in range(count)]
    contexts = [[9, group] for group in range(count // 2)]
    nodes = TensorDict(values, batch_size=[count])
    return RolloutTree(nodes, 2, names[: count // 2], names, names, contexts)


@pytest.mark.parametrize(
    ("rewards", "scores", "probes", "options", "pairs"),
    [
        # A tie, identical probes, and a gap below the margin, beside a pair.
        (
            [0.1, 0.9, 0.5, 0.5, 0.2, 0.8, 0.2, 0.25],
            [0.0, 0.8, 0.5, 0.5, 0.2, 0.8, 0.2, 0.25],
            [[1], [2], [3], [4], [5, 6], [5, 6], [7], [8]],
            *({"min_reward_difference": 0.1}, ([1], [0], 1, 1, 1)),
        ),
        # A gap equal to the margin does not count.
        ([0.0, 0.5], [0.0, 0.5], [[1], [2]], {"min_reward_difference": 0.5}, ([], [], 0, 0, 1)),
        ([0.0, 0.5], [0.0, 0.5], [[1], [2]], {"min_reward_difference": 0.49}, ([1], [0], 0, 0, 0)),
        # The better reward comes from likelihood, despite the score.
        ([0.9, 0.1], [0.2, 0.6], [[1], [2]], {"min_reward_difference": 0.1}, ([0], [1], 0, 0, 0)),
        (
            *([0.9, 0.1], [0.2, 0.6], [[1], [2]]),
            *({"min_reward_difference": 0.1, "min_score_difference": 0.0}, ([], [], 0, 0, 1)),
        ),
        # The chosen probe must have failed the target.
        (
            *([0.3, 0.0, 0.9, 0.6], [0.1, 0.0, 0.8, 0.8], [[1], [2], [3], [4]]),
            *({"min_reward_difference": 0.1, "min_chosen_score": 0.5}, ([2], [3], 0, 0, 1)),
        ),
        # Without a score, which the reward did not need, no minimum is met.
        (
            *([0.3, 0.0, 0.9, 0.6], [0.9, float("nan"), float("nan"), 0.8], [[1], [2], [3], [4]]),
            *({"min_reward_difference": 0.1, "min_score_difference": 0.1}, ([], [], 0, 0, 2)),
        ),
        (
            *([0.3, 0.0, 0.9, 0.6], [0.9, float("nan"), float("nan"), 0.8], [[1], [2], [3], [4]]),
            *({"min_reward_difference": 0.1, "min_chosen_score": 0.5}, ([0], [1], 0, 0, 1)),
        ),
        # A prefix is not an identical probe.
        (
            *([0.9, 0.1], [0.9, 0.1], [[1, 2], [1]]),
            *({"min_reward_difference": 0.0}, ([0], [1], 0, 0, 0)),
        ),
    ],
)
def test_pairs_exclude_ties_identical_probes_and_gaps_below_a_margin(
    rewards: list[float],
    scores: list[float],
    probes: list[list[int]],
    options: dict[str, float],
    pairs: tuple[Any, ...],
) -> None:
    assert select_pairs(make_tree(rewards, scores, probes), **options) == pairs


def test_width_one_gives_no_pairs() -> None:
    tree = make_tree([0.9, 0.1], [0.9, 0.1], [[1], [2]])
    tree.tree_width = 1
    tree.contexts = [[9, 0], [9, 1]]
    result = select_pairs(tree, min_reward_difference=0.0)
    assert (result.chosen, result.num_ties) == ([], 2)


def test_collate_pads_contexts_left_and_continuations_right() -> None:
    rows = (([1, 2, 3], [4], 1.0), ([5], [6, 7], 2.0))
    names = ("context", "chosen", "x")
    batch = collate([dict(zip(names, map(torch.tensor, values), strict=True)) for values in rows])
    assert batch["context"].tolist() == [[1, 2, 3], [0, 0, 5]]
    assert batch["context_mask"].tolist() == [[True] * 3, [False, False, True]]
    assert batch["chosen"].tolist() == [[4, 0], [6, 7]]
    assert batch["chosen_mask"].tolist() == [[True, False], [True, True]]
    assert batch["x"].tolist() == [1.0, 2.0]
