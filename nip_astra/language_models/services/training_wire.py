"""What a training service and its client in another process say to each other.

Each request about a model is one operation with a number of its own, in a message of
`checkpoints.tensors.pack_state`; so is each answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nip_astra.errors import CheckpointError

ROUTE = "/training/v1/models"
KEY_HEADER = "Idempotency-Key"
"""A repeated request has the key of the first one, and gets the same answer."""
DONE_HEADER = "X-Operation"
"""In the answer to an operation that had its turn, also where it failed."""
MESSAGE = "application/octet-stream"


def pack_folder(folder: Path) -> dict[str, Tensor]:
    """The files of a folder as bytes, by their paths in it."""
    return {
        path.relative_to(folder).as_posix(): torch.frombuffer(
            bytearray(path.read_bytes()), dtype=torch.uint8
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.stat().st_size
    }


def unpack_folder(files: Mapping[str, Tensor], folder: Path) -> None:
    """Write what `pack_folder` gave, and nothing outside the folder.

    Raises
    ------
    CheckpointError
        When it is something else, or the files cannot be written.
    """
    root = folder.resolve()
    for name, content in files.items():
        path = (root / name).resolve()
        is_bytes = isinstance(content, Tensor) and content.dtype == torch.uint8
        if not path.is_relative_to(root) or not is_bytes:
            raise CheckpointError(
                f"the file {name!r} was to be written into {folder}, but it is no file of such a "
                "folder. Send the files of a saved state."
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.numpy().tobytes())
        except OSError as error:
            raise CheckpointError(
                f"{path} was to be written, but: {error}. Free space or change the permissions."
            ) from error


def weights_digest(module: Any) -> str:
    """Tells two sets of weights apart; those of adapters are left out."""
    digests = sorted(
        hashlib.sha256(_bytes_of(tensor)).hexdigest() for tensor in _base_weights(module)
    )
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _base_weights(module: Any) -> Iterator[Tensor]:
    for name, tensor in module.named_parameters():
        if "lora_" not in name:
            yield tensor.detach()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.to("cpu", torch.float32).contiguous().numpy().tobytes()


def vocabulary_digest(tokenizer: Any) -> str:
    """Tells two vocabularies apart."""
    items = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(items).encode()).hexdigest()
