"""Advantages and returns along sequences, among siblings and in trees equal their definitions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.rl_objectives.advantages import (
    Baseline,
    GroupAdvantages,
    Scale,
    best_child_backup,
    codes_of,
    compute_advantages,
    gae,
    group_advantages,
    mean_child_return,
    nstep_returns,
    reverse_kl_advantages,
    tree_gae,
    whiten,
)
from nip_astra.rl_objectives.values import explained_variance

DOUBLE = torch.float64
NAN = math.nan


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


# ---- along sequences


@pytest.mark.parametrize(
    ("bootstrap", "advantages"),
    [
        # delta_1 = 2 - 1 = 1; delta_0 = 1 + 0.5 * 1 - 0.5 = 1; A_0 = 1 + 0.125 * 1
        (None, [1.125, 0.0, 1.0, 0.0]),
        # delta_1 = 2 + 0.5 * 4 - 1 = 3; A_0 = 1 + 0.125 * 3
        (4.0, [1.375, 0.0, 3.0, 0.0]),
    ],
)
def test_gae_of_the_steps_that_count_by_hand(
    bootstrap: float | None, advantages: list[float]
) -> None:
    rewards, values = doubles(1, NAN, 2, NAN), doubles(0.5, NAN, 1, NAN).requires_grad_()
    # Of two episodes, the first has no step at all.
    mask = torch.stack([torch.zeros(4, dtype=torch.bool), ~rewards.isnan()])
    bootstrap_E = None if bootstrap is None else doubles(7, bootstrap)
    given = (rewards.expand(2, 4), values.expand(2, 4), mask)
    result = gae(*given, gamma=0.5, lam=0.25, bootstrap_E=bootstrap_E)
    assert result.advantages.tolist() == [[0.0] * 4, advantages]
    returns = [advantages[0] + 0.5, 0.0, advantages[2] + 1.0, 0.0]
    assert result.returns.tolist() == [[0.0] * 4, returns]
    assert not result.advantages.requires_grad
    assert not result.returns.requires_grad


def test_nstep_returns_skip_masked_steps_and_bootstrap_from_values() -> None:
    row = doubles(1, 99, 2, 4)[None]
    mask = torch.tensor([[True, False, True, True]])
    values = doubles(10, 99, 20, 40)[None]
    result = nstep_returns(row, mask, n=2, gamma=0.5, values_EH=values)
    # 1 + 0.5 * 2 + 0.25 * 40; 2 + 0.5 * 4; 4
    assert result[0].tolist() == [12.0, 0.0, 4.0, 4.0]
    whole = nstep_returns(row, mask, n=None, gamma=0.5)
    assert whole[0].tolist() == [3.0, 0.0, 4.0, 4.0]
    assert nstep_returns(row, mask, n=9, gamma=0.5, values_EH=values).equal(whole)
    assert nstep_returns(row, mask, n=1, gamma=0.5).equal(row * mask)
    with pytest.raises(ConfigurationError, match="got 0"):
        nstep_returns(row, mask, n=0, gamma=0.5)


def test_later_gaps_count_over_masked_tokens_without_being_discounted_for_them() -> None:
    student, mask = doubles(1, 9, 2, 4)[None], torch.tensor([[True, False, True, True]])
    given = (student, torch.zeros_like(student), mask)
    result = reverse_kl_advantages(*given, weight=2.0, discount=0.5)
    assert result.tolist() == [[-2 * (1 + 1 + 1), 0.0, -2 * (2 + 2), -8.0]]
    assert reverse_kl_advantages(*given, weight=2.0).tolist() == [[-2.0, 0.0, -4.0, -8.0]]


# ---- among siblings


# Groups 0 (1, 2, 6), 1 (equal rewards), 2 (4, 2, and one without a verdict) and 3 (one sibling).
REWARDS = doubles(4, 1, 0.1, 2, NAN, 6, 0.1, 2, 0.1, 3)
GROUP = torch.tensor([2, 0, 1, 0, 2, 0, 1, 2, 1, 3])
STD_0, STD_2 = math.sqrt(7), math.sqrt(2)


@pytest.mark.parametrize(
    ("options", "of_group_0", "of_group_2"),
    [
        # TRL adds 1e-4 to the deviation; the default is 1e-6, as in verl.
        ({}, [x / (STD_0 + 1e-6) for x in (-2, -1, 3)], [x / (STD_2 + 1e-6) for x in (1, 0, -1)]),
        (
            {"std_epsilon": 1e-4},
            [x / (STD_0 + 1e-4) for x in (-2, -1, 3)],
            [x / (STD_2 + 1e-4) for x in (1, 0, -1)],
        ),
        # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
        ({"baseline": "leave_one_out", "scale": "none"}, [-3.0, -1.5, 4.5], [2.0, 0.0, -2.0]),
        ({"baseline": "none", "scale": "none"}, [1.0, 2.0, 6.0], [4.0, 0.0, 2.0]),
    ],
)
@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_advantages_of_ragged_groups_by_hand(
    options: dict[str, Any], of_group_0: list[float], of_group_2: list[float], rule: str
) -> None:
    has_baseline = options.get("baseline") != "none"
    result = compute_advantages("group", REWARDS, GROUP, options=options | {"zero_variance": rule})
    expected = [of_group_0, [0.0] * 3 if has_baseline else [0.1] * 3, of_group_2]
    for number, advantages in enumerate([*expected, [0.0 if has_baseline else 3.0]]):
        found = result.advantages_N[number == GROUP].tolist()
        assert found == pytest.approx(advantages, abs=1e-12)
    assert result.is_zero_variance_P.tolist() == [False, has_baseline, False, has_baseline]
    is_dropped_N = (GROUP % 2 == 1) & (rule == "drop" and has_baseline)
    assert result.is_used_N.equal(~REWARDS.isnan() & ~is_dropped_N)


BASELINES: list[Baseline] = ["mean", "leave_one_out"]


@pytest.mark.parametrize("baseline", BASELINES)
def test_the_rounding_of_a_mean_is_no_advantage(baseline: Baseline) -> None:
    rewards = torch.full((6,), 0.3)
    # In float32 the mean of these differs from each; divided by a deviation as small, it is near 1.
    assert (rewards - rewards.sum() / 6).abs().max() > 0
    result = group_advantages(rewards, torch.zeros(6).long(), baseline=baseline, std_epsilon=0.0)
    assert result.advantages_N.eq(0).all()
    assert whiten(rewards, torch.ones(6, dtype=torch.bool)).eq(0).all()
    # The means of two runs of the same rewards differ by their order.
    rewards, run = doubles(0.1, 0.2, 0.3, 0.2, 0.3, 0.1), torch.arange(6) // 3
    assert rewards[:3].sum() != rewards[3] + rewards[4] + rewards[5]
    result = group_advantages(rewards, torch.zeros(6).long(), run, baseline=baseline)
    assert result.is_zero_variance_P.tolist() == [True]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_run_without_another_in_its_group_learns_nothing(
    baseline: Baseline, scale: Scale
) -> None:
    def advantages(*inputs: torch.Tensor) -> GroupAdvantages:
        return group_advantages(*inputs, baseline=baseline, scale=scale, std_epsilon=0.0)

    # nexrl gives a run with a single sample its reward, and a run with two samples NaN.
    result = advantages(doubles(3, 1, 0, NAN, 2, NAN), torch.tensor([0, 1, 1, 2, 2, 3]))
    assert result.advantages_N[[0, 3, 4, 5]].eq(0).all()
    # A group without any verdict is not a group of equal rewards.
    assert result.is_zero_variance_P.tolist() == [True, False, True, False]
    twice = advantages(doubles(0, 4), torch.zeros(2).long(), torch.tensor([5, 5]))
    assert twice.advantages_N.tolist() == [0, 0]


def test_of_nothing_there_are_no_advantages() -> None:
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape)
        assert gae(nothing, nothing, nothing.bool(), gamma=0.9, lam=0.8).advantages.shape == shape
    result = group_advantages(torch.zeros(0), torch.zeros(0).long())
    assert (result.advantages_N.shape, result.is_zero_variance_P.shape) == ((0,), (0,))


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


def test_the_spread_of_the_batch_is_about_the_mean_of_all_runs() -> None:
    # Run 0 of the second group has two samples, which count once.
    group, run = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([0, 1, 0, 0, 1])
    rewards = doubles(0, 2, 9, 11, 14)
    result = group_advantages(rewards, group, run, scale="batch", std_epsilon=0.0)
    std = statistics.stdev([0, 2, 10, 14])
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


# ---- figures of a batch


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.0, 2.0, NAN], [6.0, NAN, NAN]], [[-2 / STD_0, -1 / STD_0, 0], [3 / STD_0, 0, 0]]),
        ([[0.1, 0.1, 0.1]], [[0.0] * 3]),
        ([[5.0]], [[0.0]]),
        ([[]], [[]]),
    ],
)
def test_whitened_values_have_mean_zero_and_deviation_one_over_the_mask(
    values: list[list[float]], expected: list[list[float]]
) -> None:
    given = torch.tensor(values, dtype=DOUBLE)
    result = whiten(given, ~given.isnan())
    torch.testing.assert_close(result, torch.tensor(expected, dtype=DOUBLE), rtol=0, atol=1e-7)


def test_explained_variance_by_hand() -> None:
    returns = doubles(1, 2, 3, 99)
    mask = torch.tensor([True, True, True, False])
    # The errors 0, 0.5, 1 have half the deviation of the returns.
    values = doubles(1, 1.5, 2, NAN)
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.75, abs=1e-12)
    assert explained_variance(returns + 4, returns, mask).item() == 1.0
    assert explained_variance(torch.zeros(4), returns, mask).item() == 0.0
    assert explained_variance(returns, torch.ones(4), mask).isnan()


# ---- in trees


#   0 (1.0)                  order of nodes: 2 1 4 0 3 5
#   |-- 1 (-2.0)
#   |   |-- 3 (4.0)
#   |   `-- 4 (no verdict)
#   |       `-- 5 (7.0)
#   `-- 2 (0.5)
REWARD = doubles(0.5, -2, math.nan, 1, 4, 7)
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


def test_gae_of_tokens_in_a_tree_by_hand() -> None:
    """An opening, its answer, and three answers to that, one of them without a verdict."""
    rewards = doubles(2, NAN, 0, 1, NAN, NAN, 0, 4, 0.5, NAN).view(5, 2)
    values = doubles(1, NAN, 0.5, 1, 9, NAN, 2, 3, 0.25, NAN).view(5, 2)
    mask = ~values.isnan()
    parent, depth = torch.tensor([1, 4, 1, 1, -1]), torch.tensor([2, 1, 2, 2, 0])
    result = tree_gae(rewards, values.requires_grad_(), mask, parent, depth, gamma=0.5, lam=0.25)
    # Of the last turns, 2 - 1 = 1, and 4 - 3 = 1 and before it 0 + 3 - 2 + 0.25 * 1 = 1.25.
    last = 1 + 0.5 * (1 + 2) / 2 - 1 + 0.125 * (1 + 1.25) / 2
    first = 0 + 1 - 0.5 + 0.25 * last
    opening = 0.5 + 0.5 * 0.5 - 0.25 + 0.125 * first
    expected = doubles(1, 0, first, last, NAN, 0, 1.25, 1, opening, 0).view(5, 2)
    torch.testing.assert_close(result.advantages, expected, equal_nan=True)
    returns = expected + values.detach().nan_to_num(0.0)
    torch.testing.assert_close(result.returns, returns, equal_nan=True)
    assert not result.advantages.requires_grad


@pytest.mark.parametrize(
    ("largest", "dtype"),
    [(1e200, torch.float64), (1e25, torch.float32), (torch.inf, torch.float64)],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_too_large_to_compare_are_an_error_and_never_advantages_of_zero(
    largest: float, dtype: torch.dtype, scale: Any
) -> None:
    rewards = torch.tensor([largest, 0.0, largest, 1.0], dtype=dtype)
    with pytest.raises(DataError):
        group_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale=scale)


def test_large_rewards_within_the_range_of_squares_are_compared() -> None:
    found = group_advantages(doubles(1e100, 0.0), torch.tensor([0, 0]))
    assert found.advantages_N.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
