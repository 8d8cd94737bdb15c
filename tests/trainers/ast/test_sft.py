"""Which probes are kept as the best so far."""

from __future__ import annotations

import math
from typing import cast

import torch
from tensordict import TensorDict

from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.trainers.ast.sft import best_of, probes_that_worked


def sample(context: int, probe: int, credit: float) -> Sample:
    return {
        "context": torch.tensor([context]),
        "probe": torch.tensor([probe]),
        "credit": torch.tensor(credit),
    }


def kept(samples: list[Sample], number: int) -> list[tuple[int, int]]:
    return [(int(s["context"]), int(s["probe"])) for s in best_of(samples, number)]


def test_those_of_most_credit_are_kept() -> None:
    samples = [sample(1, 1, 0.2), sample(2, 2, 0.9), sample(3, 3, 0.5)]
    assert kept(samples, 2) == [(2, 2), (3, 3)]
    assert kept(samples, 9) == [(2, 2), (3, 3), (1, 1)]
    assert kept([], 3) == []


def test_contexts_take_turns_among_equals() -> None:
    samples = [sample(1, 1, 0.5), sample(1, 2, 0.5), sample(1, 3, 0.5), sample(2, 1, 0.5)]
    assert kept(samples, 2) == [(1, 1), (2, 1)]
    assert kept(samples, 3) == [(1, 1), (2, 1), (1, 2)]


def test_a_probe_is_kept_once_in_its_context_as_it_was_met_last() -> None:
    samples = [sample(1, 1, 0.9), sample(2, 1, 0.5), sample(1, 1, 0.1)]
    assert kept(samples, 3) == [(2, 1), (1, 1)]
    assert float(best_of(samples, 3)[1]["credit"]) == torch.tensor(0.1)


class OneLevel:
    """A tree of four nodes under one opening."""

    nodes = TensorDict(
        {
            "probe": torch.tensor([[5, 6], [7, 0], [8, 9], [4, 4]]),
            "probe_mask": torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1]]).bool(),
            "credit": torch.tensor([0.5, 0.25, math.nan, 1.0]),
        },
        batch_size=[4],
    )

    def context_of(self, node: int) -> list[int]:
        return [1, 2]


def test_what_worked_has_its_tokens_and_a_credit() -> None:
    found = probes_that_worked(
        cast(RolloutTree, OneLevel()), torch.tensor([True, True, True, False])
    )
    assert [sample["probe"].tolist() for sample in found] == [[5, 6], [7]]
    assert [sample["context"].tolist() for sample in found] == [[1, 2], [1, 2]]
    assert [float(sample["credit"]) for sample in found] == [0.5, 0.25]
