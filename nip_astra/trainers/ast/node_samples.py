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
    """One sample a node: `context`, `probe`, `old_logprobs`, `reference_logprobs`, `episode`.

    The log-probabilities are those by which the tree is learnt from (`learning_logprobs`); where it
    has them, importance weights and the rest of `trainers.behaviour` are added.

    Parameters
    ----------
    nodes : Sequence[int]
        Which nodes are learnt from.
    columns : Tensor
        More of each node, by name: numbers `[N]`, or one a token `[N, T]`, which are cut to the
        probe's length.
    """
    mask_NT = tree.nodes["probe_mask"]
    old_NT, reference_NT = learning_logprobs(tree)
    columns = {"old_logprobs": old_NT, "reference_logprobs": reference_NT, **columns}
    if "importance_weight" in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        columns["importance_weight"] = tree.nodes["importance_weight"]
    return [
        {
            "context": torch.tensor(tree.context_of(node)),
            "probe": tree.nodes["probe"][node][mask_NT[node]],
            "episode": tree.nodes["episode"][node],
            **{
                name: values[node][mask_NT[node]] if values.ndim == 2 else values[node]
                for name, values in columns.items()
            },
            **(tree.more_of_samples[node] if tree.more_of_samples else {}),
        }
        for node in nodes
    ]


def learning_logprobs(tree: RolloutTree) -> tuple[Tensor, Tensor]:
    """Log-probabilities of probes under attacker and reference, `[N, T]`, to learn from.

    Those of the distribution that was drawn from where the trainer has asked for them, else those
    of the models themselves.
    """
    names = "drawn_logprobs", "drawn_reference_logprobs"
    if names[0] not in tree.nodes.keys():  # noqa: SIM118 - iteration gives rows
        names = "probe_logprobs", "reference_logprobs"
    return tree.nodes[names[0]], tree.nodes[names[1]]
