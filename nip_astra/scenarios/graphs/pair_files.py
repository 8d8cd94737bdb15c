"""Pairs of graphs in files and as tensors.

Own files are safetensors. neural-interactive-proofs publishes a dict of tensors in `data.pt`: for
the two graphs of each pair, `a` and `b`, `edge_index` [2, E] holds the ends of all edges, in both
directions, with nodes counted from 0 in each graph; `slices` [N + 1] the start of each graph's
edges; `sizes` [N] its number of nodes. `wl_scores` [N] is -1 for isomorphic graphs, else the round
of refinement that distinguishes them.

Shapes: N pairs, E edges of all graphs, n nodes (padded).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import DataError, counted, reason_of
from nip_astra.scenarios.graphs.generation import SPLITS, GraphPairs, IntArray
from nip_astra.scenarios.graphs.wl import BEYOND_WL, ISOMORPHIC, BoolArray, wl_scores

_PARTS = ("adjacency", "num_nodes", "wl_score")


def save_pairs(path: Path | str, *, train: GraphPairs, test: GraphPairs) -> None:
    """Write both splits to a safetensors file."""
    tensors = {}
    for split, pairs in zip(SPLITS, (train, test), strict=True):
        for part in _PARTS:
            # safetensors writes the memory as it lies.
            array = np.ascontiguousarray(getattr(pairs, part))
            tensors[f"{split}.{part}"] = torch.from_numpy(array)
    try:
        save_file(tensors, Path(path))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write {path}: {error}. Give a path in a writable folder."
        ) from error


def load_pairs(path: Path | str) -> tuple[GraphPairs, GraphPairs]:
    """Load training and test pairs written by `save_pairs`."""
    try:
        tensors = load_file(Path(path))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} is missing or not a safetensors file: {error}. Write it with save_pairs, or "
            "omit `file` to generate pairs."
        ) from error
    train, test = (_read(tensors, split, path) for split in SPLITS)
    if train.adjacency.shape[1:] != test.adjacency.shape[1:]:
        raise _broken(path, "training and test pairs are padded to different sizes")
    return train, test


def _read(tensors: dict[str, Tensor], split: str, path: Path | str) -> GraphPairs:
    names = [f"{split}.{part}" for part in _PARTS]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise _broken(path, f"{missing[0]} is missing")
    adjacency, num_nodes, wl_score = (tensors[name] for name in names)
    num_pairs, n = len(num_nodes), adjacency.shape[-1]
    if adjacency.dtype != torch.bool or adjacency.shape != (num_pairs, 2, n, n):
        raise _broken(path, f"{names[0]} must be bool [pairs, 2, nodes, nodes]")
    for name, numbers in zip(names[1:], (num_nodes, wl_score), strict=True):
        if numbers.dtype != torch.int64 or numbers.shape != (num_pairs,):
            raise _broken(path, f"{name} must be int64 [pairs]")
    is_real = torch.arange(n) < num_nodes[:, None, None]
    is_inside = is_real[..., None] & is_real[..., None, :]
    has_loops = bool(adjacency.diagonal(dim1=-2, dim2=-1).any())
    if has_loops or bool((adjacency & ~is_inside).any()):
        raise _broken(path, f"{names[0]} has loops or edges in the padding")
    if not torch.equal(adjacency, adjacency.transpose(-1, -2)):
        raise _broken(path, f"{names[0]} is not symmetric")
    is_round = (wl_score >= 1) & (wl_score <= BEYOND_WL)
    is_score = is_round | (wl_score == ISOMORPHIC)
    if not bool(is_score.all()):
        raise _broken(path, f"{names[2]} has scores other than -1 and 1 to {BEYOND_WL}")
    return GraphPairs(adjacency.numpy(), num_nodes.numpy(), wl_score.numpy())


def _broken(path: Path | str, problem: str) -> DataError:
    return DataError(f"invalid pairs in {path}: {problem}. Write the file again with save_pairs.")


def as_dataset(pairs: GraphPairs) -> TensorDict:
    """Convert the pairs to datapoints: `adjacency` [N, 2, n, n] float32, `node_mask` [N, 2, n]
    bool, `wl_score` [N] long, and `y` [N, 1] long, 1 for isomorphic graphs.
    """
    n = pairs.adjacency.shape[-1]
    wl_score = torch.from_numpy(pairs.wl_score)
    is_real = torch.arange(n) < torch.from_numpy(pairs.num_nodes)[:, None]
    is_isomorphic = wl_score == ISOMORPHIC
    columns = {
        "adjacency": torch.from_numpy(pairs.adjacency).float(),
        "node_mask": is_real[:, None].repeat(1, 2, 1),
        "wl_score": wl_score,
        "y": is_isomorphic.long()[:, None],
    }
    return TensorDict(columns, batch_size=[pairs.num_pairs])


MOST_NODES = 64
"""Maximum number of nodes, as for generated pairs."""


class PublishedPairs(NamedTuple):
    """Content of a `data.pt`."""

    pairs: GraphPairs
    """The pairs, with recomputed scores."""
    num_rescored: int
    """Number of pairs with another score in the file, but the same label."""


def read_published_pairs(path: Path | str) -> PublishedPairs:
    """Read a `data.pt`; only tensors are loaded and no code is executed."""
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
    """Pad the pairs to n nodes."""
    num_added = n - pairs.adjacency.shape[-1]
    padding = ((0, 0), (0, 0), (0, num_added), (0, num_added))
    return pairs._replace(adjacency=np.pad(pairs.adjacency, padding))


def _read_tensors(path: Path | str) -> dict[str, Tensor]:
    try:
        # weights_only: loads tensors and plain values, and executes no code.
        loaded = torch.load(Path(path), map_location="cpu", weights_only=True)
    except Exception as error:
        problem = f"missing, corrupt, or not only tensors: {reason_of(error)}"
        raise _refused(path, problem) from error
    if not isinstance(loaded, dict) or not all(type(name) is str for name in loaded):
        raise _refused(path, f"got a {type(loaded).__name__} instead of a dict with string keys")
    for name, tensor in loaded.items():
        # A subclass may compute something else than its numbers.
        is_dense = type(tensor) is Tensor and tensor.layout == torch.strided
        if not is_dense or tensor.is_quantized:
            raise _refused(path, f"{name!r} must be a dense tensor, got {type(tensor).__name__}")
    return loaded


def _integers(tensors: dict[str, Tensor], name: str, path: Path | str, *, dims: int = 1) -> Tensor:
    if name not in tensors:
        raise _refused(path, f"{name!r} is missing")
    tensor = tensors[name]
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() != dims:
        raise _refused(path, f"{name!r} must have integers and {counted(dims, 'dimension')}")
    return tensor.long()


def _read_graphs(
    tensors: dict[str, Tensor], which: str, num_pairs: int, path: Path | str
) -> tuple[BoolArray, IntArray]:
    """Read one graph of each pair, [N, n, n], and its nodes, [N]."""
    edges_2E = _integers(tensors, f"edge_index_{which}", path, dims=2)
    slices = _integers(tensors, f"slices_{which}", path)
    sizes_N = _integers(tensors, f"sizes_{which}", path)
    if num_pairs == 0 or len(sizes_N) != num_pairs:
        raise _refused(path, f"{num_pairs} scores but {len(sizes_N)} sizes")
    if not bool(((sizes_N >= 1) & (sizes_N <= MOST_NODES)).all()):
        raise _refused(path, f"sizes must be from 1 to {MOST_NODES} nodes")
    # Trailing graphs without edges have no slice.
    num_edges = edges_2E.shape[1]
    not_a_partition = _refused(path, f"slices_{which} do not partition the {num_edges} edges")
    num_missing = num_pairs + 1 - len(slices)
    starts_at_zero = len(slices) >= 1 and int(slices[0]) == 0
    if not starts_at_zero or num_missing < 0 or len(edges_2E) != 2:
        raise not_a_partition
    slices = torch.cat([slices, slices[-1:].expand(num_missing)])
    counts_N = slices.diff()
    if bool((counts_N < 0).any()) or slices[-1] != num_edges:
        raise not_a_partition
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
    return DataError(
        f"invalid pairs in {path}: {problem}. Give a data.pt of neural-interactive-proofs: a dict "
        "of the tensors edge_index_a, slices_a, sizes_a, the same with _b, and wl_scores."
    )
