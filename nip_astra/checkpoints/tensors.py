"""Nested state as safetensors and JSON files, and stage dumps of such state.

Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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

    The state consists of dicts (keys: text, numbers, None), lists and tuples of dense tensors,
    text, numbers, booleans and None. `load_state` restores equal values and types, and
    bit-identical tensors on the CPU.
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
    """Inverse of `save_state`."""
    try:
        tensors = load_file(path.with_suffix(".safetensors"))
        plain = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return _decode(plain, tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"the state {path} is missing or corrupt: {error}. Resume from another checkpoint."
        ) from error


def pack_state(state: Any) -> bytes:
    """Serialise the state for a message: safetensors with the JSON part in the header."""
    tensors: dict[str, Tensor] = {}
    plain = _encode(state, "message", tensors)
    packed: bytes = save(tensors, metadata={_PLAIN: json.dumps(plain, allow_nan=False)})
    return packed


def unpack_state(packed: bytes) -> Any:
    """Inverse of `pack_state`; safe for untrusted input."""
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


# ---- dumps of a trainer's stages, and their comparison between two runs

DUMPS = "dumps"
"""Folder of a run that holds its dumps."""
_STAGE = re.compile(r"(\d+)-.+\.json")


class StageDumps:
    """Dumps the numbered stages of every `period`-th iteration; inactive without a folder."""

    def __init__(self, folder: Path | None, *, period: int) -> None:
        self.folder, self.period = folder, period
        self._iteration = -1
        self._count = 0

    def is_due(self, iteration: int) -> bool:
        """Return whether the stages of an iteration are dumped."""
        return self.folder is not None and self.period > 0 and iteration % self.period == 0

    def write(self, iteration: int, stage: str, values: Mapping[str, Any]) -> None:
        """Write a stage: nested tensors, numbers, text, lists and dicts."""
        if not self.is_due(iteration):
            return
        assert self.folder is not None
        if iteration != self._iteration:
            self._iteration, self._count = iteration, 0
        place = self.folder / f"iteration_{iteration + 1:06d}"
        place.mkdir(parents=True, exist_ok=True)
        save_state(place / f"{self._count:03d}-{stage}", dict(values))
        self._count += 1


class Difference(NamedTuple):
    """A value that differs between two dumps: stage, dotted path, and the difference."""

    stage: str
    field: str
    description: str


@dataclass(frozen=True)
class Comparison:
    """The number of stages in both dumps, and the differences in order."""

    num_stages: int
    differences: list[Difference]


def compare_dumps(one: Path, other: Path, *, tolerance: float = 0.0) -> Comparison:
    """Compare the stages of two dump folders or run directories, in order.

    `tolerance` of numbers is absolute and relative.
    """
    folders = [_dumps_folder(one), _dumps_folder(other)]
    stages = [_stages(folder) for folder in folders]
    differences: list[Difference] = []
    shared = [name for name in stages[0] if name in set(stages[1])]
    for name in sorted({*stages[0], *stages[1]}):
        if name not in shared:
            where = one if name in stages[0] else other
            differences.append(Difference(name, "", f"only in {where}"))
            continue
        values = [load_state(folder / name) for folder in folders]
        differences += [
            Difference(name, field, description)
            for field, description in _differences(values[0], values[1], "", tolerance)
        ]
    return Comparison(len(shared), differences)


def _dumps_folder(path: Path) -> Path:
    folder = path / DUMPS if (path / DUMPS).is_dir() else path
    if not _stages(folder):
        raise CheckpointError(
            f"{path} has no dumps. Run with --settings dump_period=1, and give the run directory."
        )
    return folder


def _stages(folder: Path) -> list[str]:
    return sorted(
        str(file.relative_to(folder).with_suffix(""))
        for file in folder.glob("iteration_*/*.json")
        if _STAGE.fullmatch(file.name)
    )


def _differences(one: Any, other: Any, place: str, tolerance: float) -> Iterator[tuple[str, str]]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        description = _tensor_difference(one, other, tolerance)
        if description:
            yield place, description
    elif isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys([*one, *other]):
            path = f"{place}.{name}" if place else str(name)
            if name not in one or name not in other:
                yield path, f"only in the {'first' if name in one else 'second'}"
            else:
                yield from _differences(one[name], other[name], path, tolerance)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            yield place, f"has {len(one)} entries and {len(other)}"
        for number, pair in enumerate(zip(one, other, strict=False)):
            yield from _differences(*pair, f"{place}.{number}", tolerance)
    elif not _is_equal(one, other, tolerance):
        yield place, f"is {one!r} and {other!r}"


def _is_equal(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        a, b = torch.tensor([one, other], dtype=torch.float64)
        return bool(torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True))
    return type(one) is type(other) and one == other


def _tensor_difference(one: Tensor, other: Tensor, tolerance: float) -> str | None:
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}" for x in (one, other)]
        return f"is {kinds[0]} and {kinds[1]}"
    a, b = one.double(), other.double()
    is_different = ~torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not is_different.any():
        return None
    first = is_different.nonzero()[0].tolist()
    pair = [x[tuple(first)].item() for x in (one, other)]
    gap = (a - b)[is_different].abs().nan_to_num(nan=torch.inf).max().item()
    count = int(is_different.sum())
    return (
        f"differs at {count} of {one.numel()} elements by up to {gap:.3g}, first at {first}: "
        f"{pair[0]!r} and {pair[1]!r}"
    )
