"""Tensors of which each process holds a part, in a folder: what each has is a file of its own.

Written by torch.distributed.checkpoint as safetensors, so that nothing is pickled, and read in any
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
"""Name of a folder of parts."""


def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name; all processes that hold parts of them do so together.

    Raises
    ------
    CheckpointError
        When one of them cannot write.
    """
    with _told(
        folder,
        "written",
        "Free space, change the permissions, or see that all processes reach the same disk.",
    ):
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())


def sizes_in(folder: Path) -> dict[str, torch.Size]:
    """The shape of each tensor in a folder.

    Raises
    ------
    CheckpointError
        When a file is broken, or parts of a tensor are missing.
    """
    with _told(folder, "read", _RESTORE):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    sizes: dict[str, torch.Size] = {}
    for name, tensor in found.items():
        assert isinstance(tensor, TensorStorageMetadata)
        sizes[name] = tensor.size
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CheckpointError(
                f"{folder} was to be read, but parts of {name} are missing. {_RESTORE}"
            )
    return sizes


def load_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors with those of the same names; each process what it holds of them.

    Raises
    ------
    CheckpointError
        When one is missing or broken, or of another shape.
    """
    sizes = sizes_in(folder)
    for name, tensor in into.items():
        if sizes.get(name) != tensor.shape:
            raise CheckpointError(
                f"{name} of shape {tuple(tensor.shape)} was to be read from {folder}, but there "
                f"{f'it has {tuple(sizes[name])}' if name in sizes else 'is none'}. Resume with "
                "the parameters that wrote it."
            )
    with _told(folder, "read", _RESTORE):
        # Each process reads for itself: what is needed of a file is known from the files.
        load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def load_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, whole and on the CPU, in the precision they were saved in.

    Raises
    ------
    CheckpointError
        When a part is missing or broken.
    """
    sizes = sizes_in(folder)
    with _told(folder, "read", _RESTORE):
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    types = {name: one.properties.dtype for name, one in found.items()}  # type: ignore[union-attr]
    whole = {name: torch.zeros(size, dtype=types[name]) for name, size in sizes.items()}
    load_shards(folder, whole)
    return whole


_RESTORE = "Restore the folder, or resume from another checkpoint."


@contextmanager
def _told(folder: Path, done: str, advice: str) -> Iterator[None]:
    logger = logging.getLogger("torch.distributed.checkpoint")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # That it reads without the other processes is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is")
            yield
    except CheckpointError:
        raise
    except (CheckpointException, OSError, ValueError, KeyError, SafetensorError) as error:
        lost = isinstance(error, CheckpointException) and any(
            "onnection" in str(one) for one in error.failures.values()
        )
        kind = LostProcessError if lost else CheckpointError
        raise kind(f"{folder} was to be {done}, but: {error}. {advice}") from error
    finally:
        logger.setLevel(level)
