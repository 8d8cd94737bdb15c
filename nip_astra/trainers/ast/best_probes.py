"""The best probes that a run has met so far, each in its context."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree


def probes_that_worked(tree: RolloutTree, is_good_N: Tensor) -> list[Sample]:
    """`context`, `probe` and `credit` of some nodes; without credit none is given."""
    nodes = tree.nodes
    is_kept_N = is_good_N & ~nodes["credit"].isnan()
    return [
        {
            "context": torch.tensor(tree.context_of(node)),
            "probe": nodes["probe"][node][nodes["probe_mask"][node]],
            "credit": nodes["credit"][node],
        }
        for node in is_kept_N.nonzero().flatten().tolist()
    ]


def best_of(samples: Iterable[Sample], number: int) -> list[Sample]:
    """Those of most credit, each probe once in its context: as it was met last.

    Of equal credit, the first of each context comes before the second of any: probes that work
    after one opening do not push out those that work after another.
    """
    by_context: dict[tuple[int, ...], dict[tuple[int, ...], Sample]] = {}
    for sample in samples:
        probes = by_context.setdefault(tuple(sample["context"].tolist()), {})
        probes[tuple(sample["probe"].tolist())] = sample
    ranked = [
        (-float(sample["credit"]), place, sample)
        for probes in by_context.values()
        for place, sample in enumerate(sorted(probes.values(), key=lambda s: -float(s["credit"])))
    ]
    ranked.sort(key=lambda entry: entry[:2])
    return [sample for _, _, sample in ranked[:number]]
