"""Advantages of tokens in branching conversations, against the recursion and a plain sequence."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.rl_objectives.advantages import tree_gae

DOUBLE = torch.float64


def _random_tree(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two episodes of width 2 and depth 3, turns of one to four tokens."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths, level = [], [], [-1, -1]
    for depth in range(3):
        children = []
        for parent in level:
            for _ in range(2 if depth else 1):
                parents.append(parent)
                depths.append(depth)
                children.append(len(parents) - 1)
        level = children
    count = len(parents)
    lengths = torch.randint(1, 5, (count, 1), generator=generator)
    return {
        "rewards_NT": torch.randn(count, 4, generator=generator, dtype=DOUBLE),
        "values_NT": torch.randn(count, 4, generator=generator, dtype=DOUBLE),
        "mask_NT": torch.arange(4) < lengths,
        "parent_N": torch.tensor(parents),
        "depth_N": torch.tensor(depths),
    }


def _by_recursion(tree: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
    reward, value, mask = tree["rewards_NT"], tree["values_NT"], tree["mask_NT"]
    parents = tree["parent_N"].tolist()
    result = torch.zeros_like(reward)

    def first(node: int) -> tuple[float, float]:
        """Value and advantage of a node's first token."""
        children = [i for i, parent in enumerate(parents) if parent == node]
        after = [first(child) for child in children]
        next_value = gamma * sum(v for v, _ in after) / max(len(after), 1)
        next_advantage = gamma * lam * sum(a for _, a in after) / max(len(after), 1)
        for t in reversed(range(int(mask[node].sum()))):
            delta = float(reward[node, t]) + next_value - float(value[node, t])
            result[node, t] = delta + next_advantage
            next_value, next_advantage = float(value[node, t]), lam * float(result[node, t])
        return float(value[node, 0]), float(result[node, 0])

    for node, parent in enumerate(parents):
        if parent < 0:
            first(node)
    return result


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.9, 0.0), (1.0, 1.0)])
def test_it_equals_the_recursion_over_the_tree(gamma: float, lam: float) -> None:
    tree = _random_tree()
    result = tree_gae(**tree, gamma=gamma, lam=lam)
    assert torch.allclose(result.advantages, _by_recursion(tree, gamma, lam), atol=1e-12)
    expected = result.advantages + tree["values_NT"] * tree["mask_NT"]
    assert torch.allclose(result.returns, expected, atol=1e-12)


def test_padding_and_the_order_of_nodes_change_nothing() -> None:
    tree = _random_tree()
    expected = tree_gae(**tree, gamma=0.9, lam=0.8).advantages
    wide = dict(tree)
    for name in ("rewards_NT", "values_NT"):
        wide[name] = torch.nn.functional.pad(tree[name], (0, 3), value=math.nan)
    wide["mask_NT"] = torch.nn.functional.pad(tree["mask_NT"], (0, 3))
    assert torch.allclose(tree_gae(**wide, gamma=0.9, lam=0.8).advantages[:, :4], expected)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(2))
    place = order.argsort()
    mixed = {name: values[order] for name, values in tree.items()}
    parents = mixed["parent_N"]
    mixed["parent_N"] = torch.where(parents >= 0, place[parents.clamp(min=0)], -1)
    result = tree_gae(**mixed, gamma=0.9, lam=0.8).advantages
    assert torch.allclose(result[place], expected)


def test_a_turn_without_a_verdict_is_left_out() -> None:
    tree = _random_tree()
    leaf = int((tree["depth_N"] == 2).nonzero()[0])
    parent = int(tree["parent_N"][leaf])
    tree["rewards_NT"][leaf, 0] = math.nan
    result = tree_gae(**tree, gamma=0.9, lam=0.8).advantages
    assert result[leaf][tree["mask_NT"][leaf]].isnan().all()
    assert not result[parent].isnan().any()
    kept = torch.arange(len(result)) != leaf
    alone = {name: values[kept] for name, values in tree.items()}
    assert torch.allclose(
        tree_gae(**alone, gamma=0.9, lam=0.8).advantages, result[kept], atol=1e-12
    )
