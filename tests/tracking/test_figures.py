"""Figures become plain numbers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from nip_astra.errors import TrackingError
from nip_astra.tracking.figures import plain_numbers


def test_scalars_of_numpy_and_torch_can_be_written() -> None:
    given = {
        "share": np.float32(0.5),
        "mean": np.float64(0.25),
        "count": np.int64(3),
        "is_last": np.bool_(True),
        "loss": torch.tensor(1.5, requires_grad=True),
        "rows": np.array([7]),
        "unknown": None,
        "whole": 2,
    }
    found = plain_numbers(given)
    assert json.loads(json.dumps(found)) == {
        "share": 0.5, "mean": 0.25, "count": 3, "is_last": True, "loss": 1.5, "rows": 7,
        "unknown": None, "whole": 2,
    }  # fmt: skip


@pytest.mark.parametrize("value", [np.zeros(2), torch.zeros(0), [1.0], {"a": 1}, object(), "good"])
def test_what_is_no_number_is_told_by_its_name(value: object) -> None:
    with pytest.raises(TrackingError, match=r"the figure 'mine/share' .* Give one number"):
        plain_numbers({"mine/share": value})


@pytest.mark.parametrize("figures", [None, [1.0], {1: 1.0}])
def test_figures_without_names_are_refused(figures: Any) -> None:
    with pytest.raises(TrackingError):
        plain_numbers(figures)
