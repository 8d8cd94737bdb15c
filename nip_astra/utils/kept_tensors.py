"""Tensors that took long to compute, kept in a file for later runs."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDictBase
from torch import Tensor

logger = logging.getLogger(__name__)

_DIGEST = "sha256"


def digest_of_tensors(tensors: Mapping[str, Tensor] | TensorDictBase) -> str:
    """The sha256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def keep_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with their digest, to a file that is whole or not there, whoever else does."""
    # A copy: safetensors refuses tensors that share memory.
    own = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    partial = path.with_suffix(f".{uuid4().hex}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(own, partial, {_DIGEST: digest_of_tensors(own)})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def take_tensors(path: Path) -> dict[str, Tensor] | None:
    """Read what `keep_tensors` wrote.

    None where nothing is kept, and, with a warning, where the file holds anything else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
            digest = (file.metadata() or {}).get(_DIGEST)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged (%s), so what it holds is computed anew", path, error)
        return None
    if digest != digest_of_tensors(tensors):
        logger.warning("%s is not what was written, so what it holds is computed anew", path)
        return None
    return tensors
