"""The table of variants is what the papers say, and complete."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.group_variants import GROUP_VARIANTS, GroupVariantName
from nip_astra.rl_objectives.masked import REDUCTIONS


def test_every_name_has_a_variant() -> None:
    assert tuple(GROUP_VARIANTS) == get_args(GroupVariantName)


@pytest.mark.parametrize("name", GROUP_VARIANTS)
def test_every_variant_names_its_source_and_a_known_reduction(name: str) -> None:
    variant = GROUP_VARIANTS[name]
    assert "arXiv:" in variant.source
    assert variant.reduction in REDUCTIONS


def test_what_sets_each_variant_apart() -> None:
    facts = {
        name: (v.ratio, v.surrogate, v.baseline, v.std_epsilon, v.zero_variance, v.reduction)
        for name, v in GROUP_VARIANTS.items()
    }
    assert facts == {
        "grpo": ("token", "clipped", "mean", 1e-4, "keep", "sequence"),
        "dr_grpo": ("token", "clipped", "mean", None, "keep", "sum_over_length"),
        "dapo": ("token", "clipped", "mean", 1e-4, "drop", "token"),
        "cispo": ("token", "weighted", "mean", 1e-4, "drop", "token"),
        "gspo": ("sequence_mean", "clipped", "mean", 1e-4, "keep", "sequence"),
        "rloo": ("sequence_product", "clipped", "leave_one_out", None, "keep", "sequence_sum"),
    }
    clips = {name: (v.clip_low, v.clip_high) for name, v in GROUP_VARIANTS.items()}
    assert clips == {
        "grpo": (0.2, 0.2),
        "dr_grpo": (0.2, 0.2),
        "dapo": (0.2, 0.28),
        "cispo": (None, 4.0),
        "gspo": (3e-4, 4e-4),
        "rloo": (0.2, 0.2),
    }


def test_a_variant_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GROUP_VARIANTS["grpo"].clip_high = 0.5
    with pytest.raises(TypeError):
        GROUP_VARIANTS["own"] = GROUP_VARIANTS["grpo"]


def test_a_weighted_surrogate_of_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Use the ratio 'token', or the surrogate"):
        dataclasses.replace(GROUP_VARIANTS["cispo"], ratio="sequence_mean")
