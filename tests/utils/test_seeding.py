"""Seeds depend only on names."""

from __future__ import annotations

import torch

from nip_astra.utils.seeding import derive_seed, uniform_rows


def test_seeds_differ_by_name_and_type_and_are_those_of_any_other_process() -> None:
    names = ((0, "a"), (1, "a"), ("a",), (1,), ("1",), ("a", "b"), ("ab",))
    assert len({derive_seed(*name) for name in names}) == len(names)
    assert derive_seed(3, "agent", "x") == 1758111940112688543


def test_a_row_of_numbers_depends_on_its_key_alone() -> None:
    keys = [(0, "train", i) for i in range(5)]
    whole = uniform_rows(keys, 7)
    assert torch.equal(uniform_rows(keys[3:4], 7)[0], whole[3])
    assert not torch.equal(whole[0], whole[1])
    assert whole.min() >= 0.0
    assert whole.max() < 1.0
