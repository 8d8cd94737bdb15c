"""Nested state in two files: tensors as safetensors, the rest as JSON; nothing is pickled."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from nip_astra.errors import CheckpointError

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"
"""Tags of values that JSON cannot represent: each is the only key of an object."""
_PLAIN = "state"
"""Key of the JSON part in a message's header."""


def save_state(path: Path, state: Any) -> None:
    """Write nested state as `<path>.safetensors` and `<path>.json`.

    `load_state` restores equal values and types, and bit-identical tensors on the CPU.

    Parameters
    ----------
    state : Any
        Dicts (keys: text, numbers, None), lists and tuples of dense tensors of any shape and type,
        text, numbers, booleans and None.

    Raises
    ------
    CheckpointError
        If a value is of another type, or the files cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "state", tensors)
    try:
        save_file(tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(plain, allow_nan=False), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the state {path}: {error}. Free space or change the permissions."
        ) from error


def load_state(path: Path) -> Any:
    """Inverse of `save_state`.

    Raises
    ------
    CheckpointError
        If a file is missing or corrupt.
    """
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        plain = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return _decode(plain, tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the state {path} is missing or corrupt: {error}. Resume from another checkpoint."
        ) from error


def pack_state(state: Any) -> bytes:
    """The state as bytes, for a message: safetensors with the JSON part in its header."""
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "message", tensors)
    packed: bytes = save(tensors, metadata={_PLAIN: json.dumps(plain, allow_nan=False)})
    return packed


def unpack_state(packed: bytes) -> Any:
    """Inverse of `pack_state`; safe for untrusted input.

    Raises
    ------
    CheckpointError
        If the bytes are invalid or truncated.
    """
    try:
        length = int.from_bytes(packed[:8], "little")
        plain = json.loads(packed[8 : 8 + length])["__metadata__"][_PLAIN]
        return _decode(json.loads(plain), load(packed))
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"invalid message of {len(packed)} bytes: {error}. Send the result of pack_state."
        ) from error


def _encode(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        items = [
            (_encode(key, place, tensors), _encode(item, f"{place}.{key}", tensors))
            for key, item in value.items()
        ]
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if is_plain else {_DICT: items}
    if isinstance(value, list | tuple):
        encoded = [_encode(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        return {_TUPLE: encoded} if isinstance(value, tuple) else encoded
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold. Convert it to dense "
        "tensors, text, numbers, or lists, tuples and dicts of these."
    )


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_decode(item, tensors) for item in value[_TUPLE])
    if _DICT in value:
        return {_decode(key, tensors): _decode(item, tensors) for key, item in value[_DICT]}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: _decode(item, tensors) for key, item in value.items()}
