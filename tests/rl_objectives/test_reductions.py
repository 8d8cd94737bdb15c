"""Reductions by hand; `test_policy_loss_invariances` has their invariances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import masked_mean, masked_sum, reduce_loss

VALUES = torch.tensor([[1.0, 2.0, 6.0], [10.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"reduction": "token"}, (9 + 10) / 4),
        ({"reduction": "token", "normaliser": 38.0}, (9 + 10) / 38),
        ({"reduction": "sequence"}, (9 / 3 + 10) / 2),
        ({"reduction": "sequence_sum"}, (9 + 10) / 2),
        ({"reduction": "sum_over_length", "max_length": 8}, (9 + 10) / 2 / 8),
    ],
)
def test_each_reduction_by_hand(options: dict[str, Any], expected: float) -> None:
    assert reduce_loss(VALUES, MASK, **options).item() == pytest.approx(expected, abs=1e-12)


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
