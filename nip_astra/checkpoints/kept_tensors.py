"""Tensors that are computed once and kept for later runs, in files that say what they must hold."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDictBase
from torch import Tensor

from nip_astra.errors import CheckpointError

_DIGEST = "nip_astra.sha256"
"""Entry of a file's own metadata."""


def digest_of_tensors(tensors: Mapping[str, Tensor] | TensorDictBase) -> str:
    """Digest (sha256) of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def keep_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file that is complete or not there, whoever else writes it at the same time.

    Raises
    ------
    CheckpointError
        When it cannot be written.
    """
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    partial = path.with_suffix(f".{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(plain, partial, metadata={_DIGEST: digest_of_tensors(plain)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise CheckpointError(
            f"{path} was to be written, but: {getattr(error, 'strerror', None) or error}. Free "
            "space or change the permissions."
        ) from error


def read_kept(path: Path) -> dict[str, Tensor]:
    """Read what `keep_tensors` wrote.

    Raises
    ------
    CheckpointError
        When the file is missing or broken, or holds other values than were written.
    """
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(_DIGEST)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} was to be read, but it is broken: {error}.") from error
    if expected != digest_of_tensors(tensors):
        what = "it does not say what it must hold" if expected is None else "it has been changed"
        raise CheckpointError(f"{path} was to be read, but it is broken: {what}.")
    return tensors
