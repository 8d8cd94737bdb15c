"""Pairs of graphs in files and as tensors.

Shapes: N pairs, n nodes (padded).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor

from nip_astra.errors import DataError
from nip_astra.scenarios.graphs.generation import SPLITS, GraphPairs
from nip_astra.scenarios.graphs.wl import BEYOND_WL, ISOMORPHIC

_PARTS = ("adjacency", "num_nodes", "wl_score")


def save_pairs(path: Path | str, *, train: GraphPairs, test: GraphPairs) -> None:
    """Write both splits to a safetensors file.

    Raises
    ------
    DataError
        If the file cannot be written.
    """
    tensors = {
        f"{split}.{part}": torch.from_numpy(np.ascontiguousarray(getattr(pairs, part)))
        for split, pairs in zip(SPLITS, (train, test), strict=True)
        for part in _PARTS
    }
    try:
        save_file(tensors, Path(path))
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"cannot write {path}: {error}. Give a path in a writable folder."
        ) from error


def load_pairs(path: Path | str) -> tuple[GraphPairs, GraphPairs]:
    """Training and test pairs from `save_pairs`.

    Raises
    ------
    DataError
        If the file is missing or invalid.
    """
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
    if not bool((((wl_score >= 1) & (wl_score <= BEYOND_WL)) | (wl_score == ISOMORPHIC)).all()):
        raise _broken(path, f"{names[2]} has scores other than -1 and 1 to {BEYOND_WL}")
    return GraphPairs(adjacency.numpy(), num_nodes.numpy(), wl_score.numpy())


def _broken(path: Path | str, problem: str) -> DataError:
    return DataError(f"invalid pairs in {path}: {problem}. Write the file again with save_pairs.")


def as_dataset(pairs: GraphPairs) -> TensorDict:
    """The pairs as the datapoints of a scenario.

    Returns
    -------
    TensorDict
        Batch size [N]: `adjacency` [N, 2, n, n] float32, `node_mask` [N, 2, n] bool, `wl_score`
        [N] long, and `y` [N, 1] long, 1 for isomorphic graphs.
    """
    n = pairs.adjacency.shape[-1]
    wl_score = torch.from_numpy(pairs.wl_score)
    is_real = torch.arange(n) < torch.from_numpy(pairs.num_nodes)[:, None]
    return TensorDict(
        {
            "adjacency": torch.from_numpy(pairs.adjacency).float(),
            "node_mask": is_real[:, None].repeat(1, 2, 1),
            "wl_score": wl_score,
            "y": (wl_score == ISOMORPHIC).long()[:, None],
        },
        batch_size=[pairs.num_pairs],
    )
