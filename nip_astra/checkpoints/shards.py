"""Sharded tensors in a folder, one file per process.

Written by torch.distributed.checkpoint as safetensors (nothing is pickled); can be read by any
number of processes.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from nip_astra.errors import CheckpointError, LostProcessError

SHARDS = "shards"
"""Folder name of sharded tensors."""


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name; a collective call of all processes with shards."""
    with _as_checkpoint_error(
        folder,
        "write",
        "Free space, change the permissions, or make sure that all processes share the disk.",
    ):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def sizes_in(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of each tensor in a folder; raise CheckpointError if shards are missing."""
    with _as_checkpoint_error(folder, "read", _RESTORE):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    sizes: dict[str, torch.Size] = {}
    for name, tensor in metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        sizes[name] = tensor.size
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointError(f"shards of {name} are missing in {folder}. {_RESTORE}")
    return sizes


def load_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors by name; each process reads its own shards."""
    sizes = sizes_in(folder)
    for name, tensor in into.items():
        if sizes.get(name) != tensor.shape:
            raise CheckpointError(
                f"{name} needs shape {tuple(tensor.shape)}, but {folder} has "
                f"{tuple(sizes[name]) if name in sizes else 'no such tensor'}. Resume with the "
                "parameters that wrote it."
            )
    with _as_checkpoint_error(folder, "read", _RESTORE):
        # Each process reads on its own; the files describe themselves.
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def load_whole(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, unsharded, on the CPU, in their stored precision."""
    sizes = sizes_in(folder)
    with _as_checkpoint_error(folder, "read", _RESTORE):
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    types = {name: t.properties.dtype for name, t in metadata.items()}  # type: ignore[union-attr]
    whole = {name: torch.zeros(size, dtype=types[name]) for name, size in sizes.items()}
    load_shards(folder, whole)
    return whole


_RESTORE = "Restore the folder, or resume from another checkpoint."


@contextmanager
def _as_checkpoint_error(folder: Path, action: str, advice: str) -> Iterator[None]:
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Reading without the other processes is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointError:
        raise
    except (CheckpointException, OSError, ValueError, KeyError, SafetensorError) as error:
        lost = isinstance(error, CheckpointException) and any(
            "onnection" in str(failure) for failure in error.failures.values()
        )
        kind = LostProcessError if lost else CheckpointError
        raise kind(f"cannot {action} {folder}: {error}. {advice}") from error
    finally:
        logger.setLevel(level)
