"""Reductions by hand; padding, order and a split into parts change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import (
    REDUCTIONS,
    Reduction,
    masked_mean,
    masked_sum,
    reduce_loss,
)

VALUES = torch.tensor([[1.0, 2.0, 6.0], [10.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)
LENGTH = {"sum_over_length": 8}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token", (9 + 10) / 4),
        ("sequence", (9 / 3 + 10) / 2),
        ("sequence_sum", (9 + 10) / 2),
        ("sum_over_length", (9 + 10) / 2 / 8),
    ],
)
def test_each_reduction_by_hand(reduction: Reduction, expected: float) -> None:
    loss = reduce_loss(VALUES, MASK, reduction, max_length=LENGTH.get(reduction))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_a_normaliser_divides_the_sum_over_tokens() -> None:
    assert reduce_loss(VALUES, MASK, "token", normaliser=38.0).item() == pytest.approx(0.5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_parts_weighted_by_their_rows_add_up_to_the_whole(reduction: Reduction) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    mask = torch.arange(5) < torch.tensor([5, 1, 3, 2, 0, 4, 5])[:, None]
    length = LENGTH.get(reduction)
    whole = reduce_loss(values, mask, reduction, max_length=length)
    total = torch.zeros((), dtype=torch.float64)
    for part in ([4, 0, 6], [1, 2, 3, 5]):
        share = len(part) / 7
        normaliser = int(mask.sum()) * share if reduction == "token" else None
        total += share * reduce_loss(
            values[part], mask[part], reduction, normaliser=normaliser, max_length=length
        )
    assert total.item() == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_padding_changes_neither_loss_nor_gradient(reduction: Reduction, garbage: float) -> None:
    length = LENGTH.get(reduction)
    values = VALUES.clone().requires_grad_()
    wide = torch.nn.functional.pad(VALUES.masked_fill(~MASK, garbage), (0, 2), value=garbage)
    wide.requires_grad_()
    loss = reduce_loss(values, MASK, reduction, max_length=length)
    wide_mask = torch.nn.functional.pad(MASK, (0, 2))
    wide_loss = reduce_loss(wide, wide_mask, reduction, max_length=length)
    assert wide_loss == loss
    (loss + wide_loss).backward()
    assert torch.equal(wide.grad[:, :3], values.grad)
    assert wide.grad[~wide_mask].eq(0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(0, 3), (2, 3), (2, 0)])
def test_nothing_to_reduce_gives_a_loss_of_zero_that_can_go_backward(
    reduction: Reduction, shape: tuple[int, int]
) -> None:
    values = torch.randn(shape, requires_grad=True)
    nothing = torch.zeros(shape, dtype=torch.bool)
    loss = reduce_loss(values, nothing, reduction, max_length=LENGTH.get(reduction))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(values.grad, torch.zeros(shape))


def test_sums_and_means_by_row_and_overall() -> None:
    assert masked_sum(VALUES, MASK).item() == 19.0
    assert masked_sum(VALUES, MASK, dim=1).tolist() == [9.0, 10.0]
    assert masked_mean(VALUES, MASK).item() == 19.0 / 4
    assert masked_mean(VALUES, MASK, dim=0).tolist() == [5.5, 2.0, 6.0]
    assert masked_mean(VALUES, ~MASK, dim=1).tolist() == [0.0, 99.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction": "mean"}, "'mean'.*token, sequence"),
        ({"reduction": "sequence", "normaliser": 3.0}, "'sequence'.*normaliser"),
        ({"reduction": "sum_over_length"}, "max_length None"),
        ({"reduction": "token", "max_length": 4}, "max_length 4"),
    ],
)
def test_options_that_a_reduction_cannot_use_are_refused(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        reduce_loss(VALUES, MASK, **options)
