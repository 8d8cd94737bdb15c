"""Training samples of single nodes: a context, the probe that was sampled, and what it was worth.

Shape suffixes: `N` node, `T` token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree


def node_samples(tree: RolloutTree, nodes: Sequence[int], **columns: Tensor) -> list[Sample]:
    """Give one sample a node: `context`, `probe`, `old_logprobs`, `reference_logprobs`, `episode`.

    Parameters
    ----------
    nodes : Sequence[int]
        Which nodes are learnt from.
    columns : Tensor
        More of each node, by name: numbers `[N]`, or one a token `[N, T]`, which are cut to the
        probe's length.
    """
    mask_NT = tree.nodes["probe_mask"]
    columns = {
        "old_logprobs": tree.nodes["probe_logprobs"],
        "reference_logprobs": tree.nodes["reference_logprobs"],
        **columns,
    }
    return [
        {
            "context": torch.tensor(tree.context_of(node)),
            "probe": tree.nodes["probe"][node][mask_NT[node]],
            "episode": tree.nodes["episode"][node],
            **{
                name: values[node][mask_NT[node]] if values.ndim == 2 else values[node]
                for name, values in columns.items()
            },
        }
        for node in nodes
    ]
