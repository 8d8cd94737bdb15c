"""Returns and advantages of chains and trees equal the recursions that define them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import (
    best_child_backup,
    mean_child_return,
    nstep_returns,
    tree_gae,
)

DOUBLE = torch.float64


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


#   0 (1.0)                  order of nodes: 2 1 4 0 3 5
#   |-- 1 (-2.0)
#   |   |-- 3 (4.0)
#   |   `-- 4 (no verdict)
#   |       `-- 5 (7.0)
#   `-- 2 (0.5)
REWARD = rewards(0.5, -2, math.nan, 1, 4, 7)
PARENT = torch.tensor([3, 3, 1, -1, 1, 2])
DEPTH = torch.tensor([1, 1, 2, 0, 2, 3])


@pytest.mark.parametrize(
    ("backup", "expected"),
    [
        # -2 + 0.5 * 4 = 0; the best of 0 and 0.5 is 0.5
        (partial(best_child_backup, decay=0.5), [0.5, 0.0, math.nan, 1.25, 4.0, 7.0]),
        (partial(mean_child_return, discount=0.5), [0.5, 0.0, math.nan, 1.125, 4.0, 7.0]),
        (partial(best_child_backup, decay=0.0), REWARD.tolist()),
        (partial(mean_child_return, discount=1.0), [0.5, 2.0, math.nan, 2.25, 4.0, 7.0]),
    ],
)
def test_a_small_tree_by_hand(backup: Callable[..., torch.Tensor], expected: list[float]) -> None:
    reward = REWARD.clone().requires_grad_()
    result = backup(reward, PARENT, DEPTH)
    assert result.tolist() == pytest.approx(expected, nan_ok=True)
    assert not result.requires_grad
    assert torch.allclose(reward.detach(), REWARD, equal_nan=True)
    none = torch.zeros(0, dtype=torch.long)
    assert backup(torch.zeros(0), none, none).shape == (0,)


def test_nstep_returns_skip_masked_steps_and_bootstrap_from_values() -> None:
    row = rewards(1, 99, 2, 4)[None]
    mask = torch.tensor([[True, False, True, True]])
    values = rewards(10, 99, 20, 40)[None]
    result = nstep_returns(row, mask, n=2, gamma=0.5, values_EH=values)
    # 1 + 0.5 * 2 + 0.25 * 40; 2 + 0.5 * 4; 4
    assert result[0].tolist() == [12.0, 0.0, 4.0, 4.0]
    whole = nstep_returns(row, mask, n=None, gamma=0.5)
    assert whole[0].tolist() == [3.0, 0.0, 4.0, 4.0]
    assert nstep_returns(row, mask, n=9, gamma=0.5).equal(whole)
    assert nstep_returns(row, mask, n=1, gamma=0.5).equal(row * mask)
    with pytest.raises(ConfigurationError, match="got 0"):
        nstep_returns(row, mask, n=0, gamma=0.5)


def _token_tree(seed: int = 0) -> dict[str, torch.Tensor]:
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


def _gae_by_recursion(tree: dict[str, torch.Tensor], gamma: float, lam: float) -> torch.Tensor:
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
def test_gae_of_tokens_equals_the_recursion_over_the_tree(gamma: float, lam: float) -> None:
    tree = _token_tree()
    result = tree_gae(**tree, gamma=gamma, lam=lam)
    assert torch.allclose(result.advantages, _gae_by_recursion(tree, gamma, lam), atol=1e-12)
    expected = result.advantages + tree["values_NT"] * tree["mask_NT"]
    assert torch.allclose(result.returns, expected, atol=1e-12)


def test_padding_and_the_order_of_nodes_do_not_change_gae() -> None:
    tree = _token_tree()
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
    tree = _token_tree()
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
