"""Advantages of ragged groups of runs: worked out by hand, against GRPO of TRL, and traps."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import group_advantages
from nip_astra.rl_objectives.run_advantages import Scale, codes_of, run_advantages

DOUBLE = torch.float64


def rewards(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def test_a_run_of_several_samples_weighs_as_much_as_one_of_one() -> None:
    # Run 0 has rewards 0 and 1, mean 0.5; run 1 has reward 2. mu = 1.25, std = 1.5 / sqrt(2).
    found = run_advantages(
        rewards(0, 1, 2), torch.tensor([7, 7, 7]), torch.tensor([0, 0, 1]), std_epsilon=0.0
    )
    std = 1.5 / math.sqrt(2)
    expected = [(r - 1.25) / std for r in (0, 1, 2)]
    assert found.advantages_N.tolist() == pytest.approx(expected, abs=1e-12)
    assert found.std_P.tolist() == pytest.approx([std])


def test_one_run_number_in_two_groups_is_two_runs() -> None:
    found = run_advantages(
        rewards(0, 1, 5, 6),
        torch.tensor([0, 0, 1, 1]),
        torch.tensor([0, 1, 0, 1]),
        scale="none",
    )
    assert found.advantages_N.tolist() == [-0.5, 0.5, -0.5, 0.5]


def test_ragged_groups_equal_each_group_alone() -> None:
    values, group = rewards(1, 0, 3, 5, 2, 2.5), torch.tensor([3, 1, 3, 3, 1, 0])
    found = run_advantages(values, group, std_epsilon=1e-4)
    for one in (0, 1, 3):
        own = group_advantages(values[group == one][None], baseline="mean", std_epsilon=1e-4)
        assert torch.allclose(found.advantages_N[group == one], own.advantages_PG[0], atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_singleton_learns_nothing_where_nexrl_gives_it_its_reward(scale: Scale) -> None:
    found = run_advantages(rewards(3, 1, 0), torch.tensor([0, 1, 1]), scale=scale)
    assert found.advantages_N[0] == 0
    assert found.is_zero_variance_P.tolist() == [True, False]


def test_one_run_of_two_samples_gives_zero_where_nexrl_gives_nan() -> None:
    found = run_advantages(rewards(0, 4), torch.tensor([0, 0]), torch.tensor([5, 5]))
    assert found.advantages_N.tolist() == [0, 0]


def test_equal_rewards_that_are_no_round_number_give_exactly_zero() -> None:
    found = run_advantages(rewards(0.1, 0.1, 0.1), torch.zeros(3).long(), std_epsilon=0.0)
    assert found.advantages_N.tolist() == [0, 0, 0]
    dropped = run_advantages(
        rewards(0.1, 0.1, 0, 1), torch.tensor([0, 0, 1, 1]), zero_variance="drop"
    )
    assert dropped.is_used_N.tolist() == [False, False, True, True]


def test_the_standard_deviation_is_unbiased_as_in_trl_and_not_that_of_the_population() -> None:
    found = run_advantages(rewards(0, 0, 3), torch.zeros(3).long(), std_epsilon=0.0)
    assert found.std_P.tolist() == pytest.approx([math.sqrt(3)])
    assert found.advantages_N[2].item() == pytest.approx(2 / math.sqrt(3))


def test_leave_one_out_compares_with_the_mean_of_the_other_runs() -> None:
    found = run_advantages(
        rewards(1, 0, 0.5), torch.zeros(3).long(), baseline="leave_one_out", scale="none"
    )
    assert found.advantages_N.tolist() == pytest.approx([0.75, -0.75, 0.0])


def test_the_spread_of_the_batch_is_about_the_mean_of_all_runs() -> None:
    # Run 0 of the second group has two samples, which count as one.
    found = run_advantages(
        rewards(0, 2, 9, 11, 14),
        torch.tensor([0, 0, 1, 1, 1]),
        torch.tensor([0, 1, 0, 0, 1]),
        scale="batch",
        std_epsilon=0.0,
    )
    std = math.sqrt(((0 - 6.5) ** 2 + (2 - 6.5) ** 2 + (10 - 6.5) ** 2 + (14 - 6.5) ** 2) / 3)
    expected = [-1 / std, 1 / std, -3 / std, -1 / std, 2 / std]
    assert found.advantages_N.tolist() == pytest.approx(expected)


def test_the_spread_of_the_batch_is_that_of_trl_on_ragged_groups() -> None:
    pytest.importorskip("trl", minversion="1.16")
    from trl.trainer.utils import nanstd

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, generator=generator, dtype=DOUBLE) + torch.arange(6)[:, None]
    values[torch.rand(6, 4, generator=generator) < 0.3] = torch.nan
    found = run_advantages(
        values.flatten(), torch.arange(6).repeat_interleave(4), scale="batch", std_epsilon=1e-4
    )
    expected = (values - values.nanmean(dim=1, keepdim=True)) / (nanstd(values.flatten()) + 1e-4)
    # TRL's correction count / (count - 1) is a division of integers, which gives float32.
    assert torch.allclose(found.advantages_N, expected.flatten().nan_to_num(0.0), atol=1e-6)


def test_samples_without_a_verdict_are_left_out() -> None:
    found = run_advantages(
        rewards(0, 1, math.nan, math.nan),
        torch.tensor([0, 0, 0, 1]),
        torch.tensor([0, 1, 1, 0]),
        scale="none",
    )
    assert found.advantages_N.tolist() == [-0.5, 0.5, 0, 0]
    assert found.is_used_N.tolist() == [True, True, False, False]
    assert found.is_zero_variance_P.tolist() == [False, False]


def test_advantages_do_not_depend_on_order_or_on_a_constant() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, generator=generator, dtype=DOUBLE)
    group, run = torch.randint(0, 6, (2, 30), generator=generator)
    order = torch.randperm(30, generator=generator)
    plain = run_advantages(values, group, run).advantages_N
    other = run_advantages(values[order] + 5, group[order], run[order]).advantages_N
    assert torch.allclose(plain[order], other, atol=1e-9)
    assert plain.abs().max() > 0.5


def test_advantages_of_no_samples_are_none() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    assert len(run_advantages(rewards(), empty).advantages_N) == 0


def test_ids_become_numbers_in_order_of_appearance() -> None:
    assert codes_of(["b", "a", "b", 3]).tolist() == [0, 1, 0, 2]


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Known scales: group, batch, none"):
        run_advantages(rewards(1), torch.zeros(1).long(), scale="global")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="vast advantage"):
        run_advantages(rewards(1), torch.zeros(1).long(), baseline="none")


# ---- returns
