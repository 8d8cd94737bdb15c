"""Files of pairs as neural-interactive-proofs writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.scenarios.graphs.generation import GraphPairs


def as_published(pairs: GraphPairs) -> dict[str, Tensor]:
    """Pairs as the tensors of a `data.pt` file."""
    tensors = {"wl_scores": torch.from_numpy(pairs.wl_score).int()}
    for number, which in enumerate("ab"):
        graph, first, second = torch.from_numpy(pairs.adjacency[:, number]).nonzero().unbind(1)
        counts = torch.bincount(graph + 1, minlength=pairs.num_pairs + 1)
        tensors[f"edge_index_{which}"] = torch.stack([first, second])
        tensors[f"slices_{which}"] = counts.cumsum(0)
        tensors[f"sizes_{which}"] = torch.from_numpy(pairs.num_nodes).int()
    return tensors


def write_published(path: Path, pairs: GraphPairs, **other: Any) -> Path:
    """Write a `data.pt`, with some tensors replaced, or omitted if None is given."""
    tensors = as_published(pairs) | other
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: value for name, value in tensors.items() if value is not None}, path)
    return path
