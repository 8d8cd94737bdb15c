"""Pairs of graphs as neural-interactive-proofs publishes them: a dict of tensors in `data.pt`.

Of the first and the second graph of each pair, `a` and `b`: `edge_index` [2, E] has the ends of all
edges, in both directions, counted from 0 in each graph; `slices` [N + 1] where each graph's edges
begin; `sizes` [N] its nodes. `wl_scores` [N] is -1 for isomorphic graphs, or else the round of
refinement that tells them apart.

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
"""Of a graph, as where pairs are made."""
_NAMES = ("edge_index", "slices", "sizes")


class PublishedPairs(NamedTuple):
    """What a file holds.

    Attributes
    ----------
    pairs : GraphPairs
        With the scores of `wl_scores`.
    num_rescored : int
        Pairs of which the file has another score; their labels are the same.
    """

    pairs: GraphPairs
    num_rescored: int


def read_published_pairs(path: Path | str) -> PublishedPairs:
    """Read a `data.pt`, of which nothing but tensors is taken and nothing is run.

    Raises
    ------
    DataError
        When the file is missing, holds anything else, or graphs that cannot be, or a label is
        wrong.
    """
    tensors = _read_tensors(path)
    scores_N = _integers(tensors, "wl_scores", path).numpy()
    first, num_nodes = _read_graphs(tensors, "a", len(scores_N), path)
    second, num_nodes_b = _read_graphs(tensors, "b", len(scores_N), path)
    if not np.array_equal(num_nodes, num_nodes_b):
        raise _refused(path, "the two graphs of a pair have different numbers of nodes")
    adjacency = np.stack([first, second], axis=1)
    found = wl_scores(adjacency, np.stack([num_nodes, num_nodes], axis=1))
    wrong = np.flatnonzero((found == ISOMORPHIC) != (scores_N == ISOMORPHIC))
    if len(wrong):
        raise _refused(path, f"pair {wrong[0]} is not labelled as it is ({len(wrong)} are not)")
    pairs = GraphPairs(adjacency, num_nodes, found)
    return PublishedPairs(pairs, int((found != scores_N).sum()))


def padded_to(pairs: GraphPairs, n: int) -> GraphPairs:
    """The pairs with padding up to n nodes."""
    more = n - pairs.adjacency.shape[-1]
    return pairs._replace(adjacency=np.pad(pairs.adjacency, ((0, 0), (0, 0), (0, more), (0, more))))


def _read_tensors(path: Path | str) -> dict[str, Tensor]:
    try:
        # Restricted: it makes tensors and plain values, and refuses to call anything.
        loaded = torch.load(Path(path), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise _refused(path, f"it is missing, damaged, or holds more than tensors: {reason}") from (
            error
        )
    if not isinstance(loaded, dict) or not all(type(name) is str for name in loaded):
        raise _refused(path, f"it holds a {type(loaded).__name__} and no dict with names")
    for name, value in loaded.items():
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            raise _refused(path, f"{name!r} is no plain tensor but a {type(value).__name__}")
    return loaded


def _integers(tensors: dict[str, Tensor], name: str, path: Path | str, *, dims: int = 1) -> Tensor:
    if name not in tensors:
        raise _refused(path, f"there is no {name!r} in it")
    value = tensors[name]
    if value.dtype not in (torch.int32, torch.int64) or value.dim() != dims:
        raise _refused(
            path, f"{name!r} has not {dims} dimension{'s'[: dims != 1]} of whole numbers"
        )
    return value.long()


def _read_graphs(
    tensors: dict[str, Tensor], which: str, num_pairs: int, path: Path | str
) -> tuple[BoolArray, IntArray]:
    """One graph of each pair, [N, n, n], and its nodes, [N]."""
    edges_2E = _integers(tensors, f"edge_index_{which}", path, dims=2)
    slices = _integers(tensors, f"slices_{which}", path)
    sizes_N = _integers(tensors, f"sizes_{which}", path)
    if num_pairs == 0 or len(sizes_N) != num_pairs:
        raise _refused(path, f"{num_pairs} pairs have scores and {len(sizes_N)} have sizes")
    if not bool(((sizes_N >= 1) & (sizes_N <= MOST_NODES)).all()):
        raise _refused(path, f"there are graphs of other sizes than 1 to {MOST_NODES} nodes")
    # Graphs without edges at the very end have no slice.
    missing = num_pairs + 1 - len(slices)
    is_whole = len(slices) >= 1 and missing >= 0 and int(slices[0]) == 0
    if is_whole:
        slices = torch.cat([slices, slices[-1:].expand(missing)])
    counts_N = slices.diff()
    num_edges = edges_2E.shape[1]
    if not is_whole or len(edges_2E) != 2 or bool((counts_N < 0).any()) or slices[-1] != num_edges:
        raise _refused(path, f"slices_{which} do not divide the {num_edges} edges among the pairs")
    graph_E = torch.arange(num_pairs).repeat_interleave(counts_N)
    if not bool(((edges_2E >= 0) & (edges_2E < sizes_N[graph_E])).all()):
        raise _refused(path, f"edge_index_{which} has nodes that a graph has not")
    n = int(sizes_N.max())
    adjacency = torch.zeros(num_pairs, n, n, dtype=torch.bool)
    adjacency[graph_E, edges_2E[0], edges_2E[1]] = True
    if bool(adjacency.diagonal(dim1=1, dim2=2).any()):
        raise _refused(path, f"edge_index_{which} has edges from a node to itself")
    if not torch.equal(adjacency, adjacency.transpose(1, 2)):
        raise _refused(path, f"edge_index_{which} has edges in one direction only")
    return adjacency.numpy(), sizes_N.numpy()


def _refused(path: Path | str, problem: str) -> DataError:
    names = ", ".join(f"{name}_a, {name}_b" for name in _NAMES)
    return DataError(
        f"pairs of graphs were to be read from {path}, but {problem}. Give a data.pt as "
        f"neural-interactive-proofs writes it, a dict of the tensors {names} and wl_scores."
    )
