"""Seeds depend only on names."""

from __future__ import annotations

import torch

from nip_astra.utils.seeding import derive_seed, uniform_rows


def test_seed_zero_is_a_seed() -> None:
    assert derive_seed(0, "a") != derive_seed(1, "a")
    assert derive_seed(0, "a") != derive_seed("a")


def test_a_number_and_its_text_are_different_names() -> None:
    assert derive_seed(1) != derive_seed("1")
    assert derive_seed("a", "b") != derive_seed("ab")


def test_seeds_are_those_of_any_other_process() -> None:
    assert derive_seed(3, "agent", "x") == 1758111940112688543


def test_a_row_of_numbers_depends_on_its_key_alone() -> None:
    keys = [(0, "train", i) for i in range(5)]
    whole = uniform_rows(keys, 7)
    assert torch.equal(uniform_rows(keys[3:4], 7)[0], whole[3])
    assert not torch.equal(whole[0], whole[1])
    assert whole.min() >= 0.0
    assert whole.max() < 1.0
