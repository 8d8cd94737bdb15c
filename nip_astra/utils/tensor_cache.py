"""File cache of tensors, and digests of the code that computed them."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tensordict import TensorDictBase
from torch import Tensor

from nip_astra.errors import DataError

logger = logging.getLogger(__name__)

_DIGEST = "sha256"


def digest_of_tensors(tensors: Mapping[str, Tensor] | TensorDictBase) -> str:
    """Return the sha256 of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def keep_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors with their digest, atomically; raise `DataError` if that fails."""
    # A copy: safetensors refuses tensors that share memory.
    copies = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    partial = path.with_suffix(f".{uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(copies, partial, {_DIGEST: digest_of_tensors(copies)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(
            f"cannot write to the cache {path.parent}: {error}. Free space, or give a writable "
            "folder."
        ) from error


def take_tensors(path: Path) -> dict[str, Tensor] | None:
    """Read the tensors; None without a file, and, with a warning, if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no dict
            digest = (file.metadata() or {}).get(_DIGEST)
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        logger.warning("%s is damaged (%s); its tensors are computed again", path, error)
        return None
    if digest != digest_of_tensors(tensors):
        logger.warning("%s has changed; its tensors are computed again", path)
        return None
    return tensors


_SUFFIXES = {".py", ".c", ".h"}


def digest_of_code(names: Iterable[str]) -> str:
    """Return the sha256 of the source of modules, including all modules of packages."""
    # Without the names of files: a plug-in's differs with its folder.
    digests = sorted({_digest_of(name) for name in names})
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


@lru_cache
def _digest_of(name: str) -> str:
    file = _file_of(name)
    if file is None:
        return name
    is_package = file.name == "__init__.py"
    files = sorted(file.parent.rglob("*")) if is_package else [file]
    digest = hashlib.sha256()
    for path in files:
        if path.suffix in _SUFFIXES:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _file_of(name: str) -> Path | None:
    module = sys.modules.get(name)
    if module is None:
        spec = find_spec(name)
        file = None if spec is None else spec.origin
    else:
        file = getattr(module, "__file__", None)
    return Path(file) if file and Path(file).is_file() else None
