"""Pairs of graphs published by neural-interactive-proofs: a dict of tensors in `data.pt`.

For the two graphs of each pair, `a` and `b`: `edge_index` [2, E] holds the ends of all edges, in
both directions, with nodes counted from 0 in each graph; `slices` [N + 1] the start of each graph's
edges; `sizes` [N] its number of nodes. `wl_scores` [N] is -1 for isomorphic graphs, else the round
of refinement that distinguishes them.

Shapes: N pairs, E edges of all graphs, n nodes (padded).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.scenarios.graphs.generation import GraphPairs, IntArray
from nip_astra.scenarios.graphs.wl import ISOMORPHIC, BoolArray, wl_scores

MOST_NODES = 64
"""Maximum number of nodes, as for generated pairs."""
_NAMES = ("edge_index", "slices", "sizes")


class PublishedPairs(NamedTuple):
    """Content of a file.

    Attributes
    ----------
    pairs : GraphPairs
        With recomputed scores.
    num_rescored : int
        Number of pairs with another score in the file, with equal labels.
    """

    pairs: GraphPairs
    num_rescored: int


def read_published_pairs(path: Path | str) -> PublishedPairs:
    """Read a `data.pt`; only tensors are loaded and no code is executed.

    Raises
    ------
    DataError
        If the file is missing or invalid, or a label is wrong.
    """
    tensors = _read_tensors(path)
    scores_N = _integers(tensors, "wl_scores", path).numpy()
    first, num_nodes = _read_graphs(tensors, "a", len(scores_N), path)
    second, num_nodes_b = _read_graphs(tensors, "b", len(scores_N), path)
    if not np.array_equal(num_nodes, num_nodes_b):
        raise _refused(path, "the two graphs of a pair have different numbers of nodes")
    adjacency = np.stack([first, second], axis=1)
    recomputed = wl_scores(adjacency, np.stack([num_nodes, num_nodes], axis=1))
    wrong = np.flatnonzero((recomputed == ISOMORPHIC) != (scores_N == ISOMORPHIC))
    if len(wrong):
        raise _refused(path, f"{len(wrong)} pairs have wrong labels, for instance {wrong[0]}")
    pairs = GraphPairs(adjacency, num_nodes, recomputed)
    return PublishedPairs(pairs, int((recomputed != scores_N).sum()))


def padded_to(pairs: GraphPairs, n: int) -> GraphPairs:
    """The pairs, padded to n nodes."""
    more = n - pairs.adjacency.shape[-1]
    return pairs._replace(adjacency=np.pad(pairs.adjacency, ((0, 0), (0, 0), (0, more), (0, more))))


def _read_tensors(path: Path | str) -> dict[str, Tensor]:
    try:
        # weights_only: loads tensors and plain values, and executes no code.
        loaded = torch.load(Path(path), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refused(path, f"missing, corrupt, or not only tensors: {reason}") from (error)
    if not isinstance(loaded, dict) or not all(type(name) is str for name in loaded):
        raise _refused(path, f"got a {type(loaded).__name__} instead of a dict with string keys")
    for name, value in loaded.items():
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            raise _refused(path, f"{name!r} must be a dense tensor, got {type(value).__name__}")
    return loaded


def _integers(tensors: dict[str, Tensor], name: str, path: Path | str, *, dims: int = 1) -> Tensor:
    if name not in tensors:
        raise _refused(path, f"{name!r} is missing")
    value = tensors[name]
    if value.dtype not in (torch.int32, torch.int64) or value.dim() != dims:
        raise _refused(path, f"{name!r} must have integers and {dims} dimension{'s'[: dims != 1]}")
    return value.long()


def _read_graphs(
    tensors: dict[str, Tensor], which: str, num_pairs: int, path: Path | str
) -> tuple[BoolArray, IntArray]:
    """One graph of each pair, [N, n, n], and its nodes, [N]."""
    edges_2E = _integers(tensors, f"edge_index_{which}", path, dims=2)
    slices = _integers(tensors, f"slices_{which}", path)
    sizes_N = _integers(tensors, f"sizes_{which}", path)
    if num_pairs == 0 or len(sizes_N) != num_pairs:
        raise _refused(path, f"{num_pairs} scores but {len(sizes_N)} sizes")
    if not bool(((sizes_N >= 1) & (sizes_N <= MOST_NODES)).all()):
        raise _refused(path, f"sizes must be from 1 to {MOST_NODES} nodes")
    # Trailing graphs without edges have no slice.
    missing = num_pairs + 1 - len(slices)
    is_whole = len(slices) >= 1 and missing >= 0 and int(slices[0]) == 0
    if is_whole:
        slices = torch.cat([slices, slices[-1:].expand(missing)])
    counts_N = slices.diff()
    num_edges = edges_2E.shape[1]
    if not is_whole or len(edges_2E) != 2 or bool((counts_N < 0).any()) or slices[-1] != num_edges:
        raise _refused(path, f"slices_{which} do not partition the {num_edges} edges")
    graph_E = torch.arange(num_pairs).repeat_interleave(counts_N)
    if not bool(((edges_2E >= 0) & (edges_2E < sizes_N[graph_E])).all()):
        raise _refused(path, f"edge_index_{which} has nodes out of range")
    n = int(sizes_N.max())
    adjacency = torch.zeros(num_pairs, n, n, dtype=torch.bool)
    adjacency[graph_E, edges_2E[0], edges_2E[1]] = True
    if bool(adjacency.diagonal(dim1=1, dim2=2).any()):
        raise _refused(path, f"edge_index_{which} has loops")
    if not torch.equal(adjacency, adjacency.transpose(1, 2)):
        raise _refused(path, f"edge_index_{which} is not symmetric")
    return adjacency.numpy(), sizes_N.numpy()


def _refused(path: Path | str, problem: str) -> DataError:
    names = ", ".join(f"{name}_a, {name}_b" for name in _NAMES)
    return DataError(
        f"invalid pairs in {path}: {problem}. Give a data.pt of neural-interactive-proofs, a dict "
        f"of the tensors {names} and wl_scores."
    )
