"""Returns and advantages of chains and trees equal the recursions that define them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import (
    best_child_backup,
    mean_child_return,
    nstep_returns,
    tree_gae,
)

Join = Callable[[list[float]], float]

DOUBLE = torch.float64


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def _random_tree(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A forest of uneven width in random order; some nodes lack a reward."""
    generator = torch.Generator().manual_seed(seed)
    parents, depths = [-1, -1], [0, 0]
    for node in range(2, 60):
        parent = int(torch.randint(0, node, (1,), generator=generator))
        parents.append(parent)
        depths.append(depths[parent] + 1)
    rewards = torch.randn(60, generator=generator, dtype=torch.float64)
    rewards[torch.rand(60, generator=generator) < 0.15] = math.nan
    order = torch.randperm(60, generator=generator)
    place = order.argsort()
    parent_N = torch.tensor(parents)[order]
    parent_N = torch.where(parent_N >= 0, place[parent_N.clamp(min=0)], -1)
    return rewards[order], parent_N, torch.tensor(depths)[order]


def _by_recursion(
    rewards: list[float], parents: list[int], factor: float, join: Join
) -> list[float]:
    def value(node: int) -> float:
        below = [value(child) for child, parent in enumerate(parents) if parent == node]
        known = [x for x in below if not math.isnan(x)]
        return rewards[node] + (factor * join(known) if known else 0.0)

    return [value(node) for node in range(len(rewards))]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.0, 0.9, 1.0])
def test_both_backups_equal_the_recursion(seed: int, factor: float) -> None:
    reward, parent, depth = _random_tree(seed)
    best = best_child_backup(reward, parent, depth, decay=factor)
    mean = mean_child_return(reward, parent, depth, discount=factor)
    for result, join in ((best, max), (mean, _mean)):
        expected = _by_recursion(reward.tolist(), parent.tolist(), factor, join)
        assert result.tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


#   0 (1.0)          parents before children
#   |-- 1 (-2.0)
#   |   `-- 3 (4.0)
#   `-- 2 (0.5)
REWARD = torch.tensor([1.0, -2.0, 0.5, 4.0])
PARENT = torch.tensor([-1, 0, 0, 1])
DEPTH = torch.tensor([0, 1, 1, 2])


def test_a_small_tree_by_hand() -> None:
    best = best_child_backup(REWARD, PARENT, DEPTH, decay=0.5)
    # -2 + 0.5 * 4 = 0; the best of 0 and 0.5 is 0.5
    assert best.tolist() == [1.25, 0.0, 0.5, 4.0]
    mean = mean_child_return(REWARD, PARENT, DEPTH, discount=0.5)
    assert mean.tolist() == [1.125, 0.0, 0.5, 4.0]


def test_the_rewards_stay_as_they_were_and_no_tree_is_a_tree() -> None:
    reward = REWARD.clone().requires_grad_()
    assert not best_child_backup(reward, PARENT, DEPTH, decay=0.5).requires_grad
    assert torch.equal(reward.detach(), REWARD)
    none = torch.zeros(0, dtype=torch.long)
    assert mean_child_return(torch.zeros(0), none, none, discount=0.5).shape == (0,)


def by_loop(values: list[float], n: int, gamma: float) -> list[float]:
    """As the guide writes it."""
    result = []
    for i in range(len(values)):
        result.append(sum(gamma**j * values[i + j] for j in range(min(n, len(values) - i))))
    return result


@pytest.mark.parametrize("n", [1, 2, 3, 9])
def test_nstep_returns_equal_the_loop_of_the_guide(n: int) -> None:
    values = [1.0, -2.0, 0.5, 3.0, 0.25]
    mask = torch.ones(1, 5, dtype=torch.bool)
    result = nstep_returns(rewards(*values)[None], mask, n=n, gamma=0.9)
    assert result[0].tolist() == pytest.approx(by_loop(values, n, 0.9), abs=1e-12)


def test_nstep_returns_skip_masked_steps_and_bootstrap_from_values() -> None:
    row = rewards(1, 99, 2, 4)[None]
    mask = torch.tensor([[True, False, True, True]])
    values = rewards(10, 99, 20, 40)[None]
    result = nstep_returns(row, mask, n=2, gamma=0.5, values_EH=values)
    # 1 + 0.5 * 2 + 0.25 * 40; 2 + 0.5 * 4; 4
    assert result[0].tolist() == [12.0, 0.0, 4.0, 4.0]
    whole = nstep_returns(row, mask, n=None, gamma=0.5)
    assert whole[0].tolist() == [3.0, 0.0, 4.0, 4.0]
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
