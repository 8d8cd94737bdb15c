"""Advantages over steps and among siblings equal their definitions; missing values are left out."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import (
    Baseline,
    Scale,
    codes_of,
    compute_advantages,
    gae,
    group_advantages,
    whiten,
)
from nip_astra.rl_objectives.values import explained_variance

DOUBLE = torch.float64
NAN = math.nan


def of_siblings(
    rewards_PG: torch.Tensor, *, std_epsilon: float | None, **options: Any
) -> SimpleNamespace:
    """Advantages of groups of one size, a row per group."""
    shape = rewards_PG.shape
    result = group_advantages(
        rewards_PG.flatten(),
        torch.arange(shape[0]).repeat_interleave(shape[1]),
        scale="none" if std_epsilon is None else "group",
        std_epsilon=std_epsilon or 0.0,
        **options,
    )
    return SimpleNamespace(
        advantages_PG=result.advantages_N.reshape(shape),
        is_used_PG=result.is_used_N.reshape(shape),
        is_zero_variance_P=result.is_zero_variance_P,
    )


def _episodes(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(5, 6, generator=generator, dtype=DOUBLE)
    values = torch.randn(5, 6, generator=generator, dtype=DOUBLE)
    bootstrap = torch.randn(5, generator=generator, dtype=DOUBLE)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2, [0, 2, 3]] = False
    mask[3] = False
    return rewards, values, mask, bootstrap


def _by_recursion(
    rewards: list[float], values: list[float], last: float, gamma: float, lam: float
) -> list[float]:
    advantages, following, advantage = [], last, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        advantages.append(advantage)
        following = value
    return advantages[::-1]


def test_two_steps_by_hand() -> None:
    result = gae(
        torch.tensor([[1.0, 2.0]]),
        torch.tensor([[0.5, 1.0]]),
        torch.ones(1, 2, dtype=torch.bool),
        gamma=0.5,
        lam=0.5,
    )
    # delta_1 = 2 - 1 = 1; delta_0 = 1 + 0.5 * 1 - 0.5 = 1; A_0 = 1 + 0.25 * 1
    assert result.advantages.tolist() == [[1.25, 1.0]]
    assert result.returns.tolist() == [[1.75, 2.0]]


@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 1.0), (0.9, 0.0), (0.0, 0.7)])
@pytest.mark.parametrize("is_cut_off", [False, True])
def test_gae_equals_the_recursion_over_the_steps_that_count(
    gamma: float, lam: float, is_cut_off: bool
) -> None:
    rewards, values, mask, bootstrap = _episodes()
    bootstrap_E = bootstrap if is_cut_off else None
    result = gae(
        rewards, values.requires_grad_(), mask, gamma=gamma, lam=lam, bootstrap_E=bootstrap_E
    )
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad
    for episode in range(5):
        steps = mask[episode]
        last = bootstrap[episode].item() if is_cut_off else 0.0
        reward, value = rewards[episode, steps].tolist(), values[episode, steps].tolist()
        expected = _by_recursion(reward, value, last, gamma, lam)
        assert result.advantages[episode, steps].tolist() == pytest.approx(expected, abs=1e-12)
        assert result.advantages[episode, ~steps].eq(0).all()
        assert result.returns[episode, ~steps].eq(0).all()


def test_padding_and_the_order_of_episodes_do_not_change_gae() -> None:
    rewards, values, mask, bootstrap = _episodes()
    whole = gae(rewards, values, mask, gamma=0.9, lam=0.8, bootstrap_E=bootstrap).advantages
    pad = torch.nn.functional.pad
    order = torch.tensor([4, 2, 0, 3, 1])
    other = gae(
        pad(rewards, (0, 3), value=NAN)[order],
        pad(values, (0, 3), value=NAN)[order],
        pad(mask, (0, 3))[order],
        gamma=0.9,
        lam=0.8,
        bootstrap_E=bootstrap[order],
    ).advantages
    assert torch.allclose(other[:, :6], whole[order], atol=1e-12)
    assert other[:, 6:].eq(0).all()


REWARDS = torch.tensor([[1.0, 2.0, 6.0], [0.1, 0.1, 0.1], [4.0, NAN, 2.0]], dtype=DOUBLE)


def test_the_mean_as_baseline_with_the_unbiased_deviation_by_hand() -> None:
    # TRL adds 1e-4 to the deviation; the default is 1e-6, as in verl.
    by_default = compute_advantages("group", REWARDS.flatten(), torch.arange(9) // 3).advantages_N
    for epsilon, advantages_PG in (
        (1e-6, by_default.reshape(3, 3)),
        (1e-4, of_siblings(REWARDS, baseline="mean", std_epsilon=1e-4).advantages_PG),
    ):
        for group, rewards in ((0, [1.0, 2.0, 6.0]), (2, [4.0, 2.0])):
            mean, std = statistics.mean(rewards), statistics.stdev(rewards)
            expected = [(reward - mean) / (std + epsilon) for reward in rewards]
            known = ~REWARDS[group].isnan()
            assert advantages_PG[group, known].tolist() == pytest.approx(expected, abs=1e-12)


def test_leaving_one_out_by_hand() -> None:
    result = of_siblings(REWARDS, baseline="leave_one_out", std_epsilon=None)
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    assert result.advantages_PG[0].tolist() == pytest.approx([-3.0, -1.5, 4.5], abs=1e-12)
    assert result.advantages_PG[2].tolist() == pytest.approx([2.0, 0.0, -2.0], abs=1e-12)


def test_without_a_baseline_rewards_are_advantages_and_no_group_is_idle() -> None:
    result = of_siblings(REWARDS, baseline="none", std_epsilon=None, zero_variance="drop")
    assert torch.equal(result.advantages_PG, REWARDS.nan_to_num(0.0))
    assert torch.equal(result.is_used_PG, ~REWARDS.isnan())
    assert not result.is_zero_variance_P.any()


BASELINES: list[Baseline] = ["mean", "leave_one_out"]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("std_epsilon", [None, 0.0, 1e-4])
def test_a_group_of_equal_rewards_gives_exactly_nothing_and_is_counted(
    baseline: Baseline, std_epsilon: float | None
) -> None:
    rewards = REWARDS.float()
    kept = of_siblings(rewards, baseline=baseline, std_epsilon=std_epsilon)
    assert kept.advantages_PG[1].tolist() == [0.0, 0.0, 0.0]
    assert kept.is_zero_variance_P.tolist() == [False, True, False]
    assert kept.is_used_PG.tolist() == [[True] * 3, [True] * 3, [True, False, True]]
    dropped = of_siblings(rewards, baseline=baseline, std_epsilon=std_epsilon, zero_variance="drop")
    assert torch.equal(dropped.advantages_PG, kept.advantages_PG)
    assert dropped.is_used_PG.tolist() == [[True] * 3, [False] * 3, [True, False, True]]


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_rounding_of_a_mean_is_no_advantage(baseline: Baseline) -> None:
    rewards = torch.full((1, 6), 0.3)
    # In float32 the mean of these differs from each; divided by a deviation as small, it is near 1.
    assert (rewards - rewards.sum() / 6).abs().max() > 0
    result = of_siblings(rewards, baseline=baseline, std_epsilon=0.0)
    assert result.advantages_PG.eq(0).all()
    assert whiten(rewards, torch.ones(1, 6, dtype=torch.bool)).eq(0).all()


@pytest.mark.parametrize("baseline", BASELINES)
def test_a_single_sibling_or_verdict_gives_no_advantage(baseline: Baseline) -> None:
    alone = of_siblings(torch.tensor([[3.0], [5.0]]), baseline=baseline, std_epsilon=1e-4)
    assert alone.advantages_PG.tolist() == [[0.0], [0.0]]
    assert alone.is_zero_variance_P.tolist() == [True, True]
    result = of_siblings(
        torch.tensor([[NAN, 3.0, NAN], [NAN, NAN, NAN]]), baseline=baseline, std_epsilon=0.0
    )
    assert result.advantages_PG.tolist() == [[0.0] * 3, [0.0] * 3]
    assert result.is_used_PG.tolist() == [[False, True, False], [False] * 3]
    # A group without any verdict is not a group of equal rewards.
    assert result.is_zero_variance_P.tolist() == [True, False]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_of_nothing_there_are_no_advantages(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    assert gae(nothing, nothing, nothing.bool(), gamma=0.9, lam=0.8).advantages.shape == shape
    result = of_siblings(nothing, baseline="mean", std_epsilon=1e-4)
    assert result.advantages_PG.shape == shape
    assert not result.is_zero_variance_P.any()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"baseline": "median", "scale": "none"}, "'median'.*mean, leave_one_out, none"),
        ({"baseline": "none"}, "'none'.*group"),
        ({"scale": "global"}, "global.*group, batch, none"),
    ],
)
def test_meaningless_values_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        group_advantages(doubles(1), torch.zeros(1).long(), **options)


def test_whitened_values_have_mean_zero_and_deviation_one_over_the_mask() -> None:
    values = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]], dtype=DOUBLE)
    result = whiten(values, ~values.isnan())
    std = statistics.stdev([1.0, 2.0, 6.0])
    assert result[~values.isnan()].tolist() == pytest.approx(
        [-2 / std, -1 / std, 3 / std], abs=1e-7
    )
    assert result[values.isnan()].eq(0).all()


@pytest.mark.parametrize("values", [[0.1, 0.1, 0.1], [5.0], []])
def test_values_that_do_not_vary_whiten_to_zero(values: list[float]) -> None:
    result = whiten(torch.tensor([values]), torch.ones(1, len(values), dtype=torch.bool))
    assert result.tolist() == [[0.0] * len(values)]


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0], dtype=DOUBLE)
    mask = torch.tensor([True, True, True, False])
    # The errors 0, 0.5, 1 have half the deviation of the returns.
    values = torch.tensor([1.0, 1.5, 2.0, NAN], dtype=DOUBLE)
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.75, abs=1e-12)
    assert explained_variance(returns + 4, returns, mask).item() == 1.0
    assert explained_variance(torch.zeros(4), returns, mask).item() == 0.0
    assert explained_variance(returns, torch.ones(4), mask).isnan()


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_a_run_of_several_samples_weighs_as_much_as_one_of_one() -> None:
    # Run 0 has rewards 0 and 1, mean 0.5; run 1 has reward 2 and a sample without a verdict.
    # mu = 1.25, std = 1.5 / sqrt(2).
    group, run = torch.tensor([7, 7, 7, 7]), torch.tensor([0, 0, 1, 1])
    result = group_advantages(doubles(0, 1, 2, NAN), group, run, std_epsilon=0.0)
    std = 1.5 / math.sqrt(2)
    expected = [*((reward - 1.25) / std for reward in (0, 1, 2)), 0.0]
    assert result.advantages_N.tolist() == pytest.approx(expected, abs=1e-12)
    assert result.std_P.tolist() == pytest.approx([std])
    assert result.is_used_N.tolist() == [True, True, True, False]


def test_one_run_number_in_two_groups_is_two_runs() -> None:
    result = group_advantages(
        doubles(0, 1, 5, 6), torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), scale="none"
    )
    assert result.advantages_N.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_ragged_groups_equal_each_group_alone() -> None:
    values, group = doubles(1, 0, 3, 5, 2, 2.5), torch.tensor([3, 1, 3, 3, 1, 0])
    result = group_advantages(values, group, std_epsilon=1e-4)
    for number in (0, 1, 3):
        alone = values[group == number]
        own = group_advantages(alone, torch.zeros(len(alone)).long(), std_epsilon=1e-4)
        assert torch.allclose(result.advantages_N[group == number], own.advantages_N, atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_run_without_another_in_its_group_learns_nothing(scale: Scale) -> None:
    # nexrl gives a run with a single sample its reward, and a run with two samples NaN.
    result = group_advantages(doubles(3, 1, 0), torch.tensor([0, 1, 1]), scale=scale)
    assert result.advantages_N[0] == 0
    assert result.is_zero_variance_P.tolist() == [True, False]
    twice = group_advantages(
        doubles(0, 4), torch.zeros(2).long(), torch.tensor([5, 5]), scale=scale
    )
    assert twice.advantages_N.tolist() == [0, 0]


def test_the_spread_of_the_batch_is_about_the_mean_of_all_runs() -> None:
    # Run 0 of the second group has two samples, which count once.
    result = group_advantages(
        doubles(0, 2, 9, 11, 14),
        torch.tensor([0, 0, 1, 1, 1]),
        torch.tensor([0, 1, 0, 0, 1]),
        scale="batch",
        std_epsilon=0.0,
    )
    std = math.sqrt(((0 - 6.5) ** 2 + (2 - 6.5) ** 2 + (10 - 6.5) ** 2 + (14 - 6.5) ** 2) / 3)
    expected = [-1 / std, 1 / std, -3 / std, -1 / std, 2 / std]
    assert result.advantages_N.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_order_a_constant_and_missing_verdicts_change_nothing(
    baseline: Baseline, scale: Scale
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, generator=generator, dtype=DOUBLE)
    group, run = torch.randint(0, 6, (2, 30), generator=generator)
    options: dict[str, Any] = {"baseline": baseline, "scale": scale}
    plain = group_advantages(values, group, run, **options).advantages_N
    # The first rows appear again without a verdict, in runs of their own.
    order = torch.cat([torch.randperm(30, generator=generator), torch.arange(6)])
    others = (values[order] + 5, group[order], run[order])
    others[0][30:], others[2][30:] = NAN, 99
    other = group_advantages(*others, **options)
    assert torch.allclose(plain[order[:30]], other.advantages_N[:30], atol=1e-9)
    assert not other.is_used_N[30:].any()
    assert plain.abs().max() > 0.5


def test_ids_become_numbers_in_order_of_appearance() -> None:
    assert codes_of(["b", "a", "b", 3]).tolist() == [0, 1, 0, 2]
