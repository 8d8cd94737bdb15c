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


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, with its tensors put into `tensors`; `path` is its dotted name."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone().contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        items = [
            (_encode(key, path, tensors), _encode(item, f"{path}.{key}", tensors))
            for key, item in value.items()
        ]
        # JSON has no other keys than texts, and ours begin with a dollar.
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if is_plain else {_DICT: items}
    if isinstance(value, list | tuple):
        encoded = [_encode(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {_TUPLE: encoded} if isinstance(value, tuple) else encoded
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{path} is a {type(value).__name__}, which a checkpoint cannot hold. Convert it to dense "
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
        folder = self.folder / f"iteration_{iteration + 1:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder / f"{self._count:03d}-{stage}", dict(values))
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


def compare_dumps(first: Path, second: Path, *, tolerance: float = 0.0) -> Comparison:
    """Compare the stages of two dump folders or run directories, in order.

    `tolerance` of numbers is absolute and relative.
    """
    first_folder, second_folder = _dumps_folder(first), _dumps_folder(second)
    first_stages, second_stages = set(_stages(first_folder)), set(_stages(second_folder))
    differences: list[Difference] = []
    for stage in sorted(first_stages | second_stages):
        if stage not in first_stages or stage not in second_stages:
            run = first if stage in first_stages else second
            differences.append(Difference(stage, "", f"only in {run}"))
            continue
        first_values = load_state(first_folder / stage)
        second_values = load_state(second_folder / stage)
        for field, description in _differences(first_values, second_values, "", tolerance):
            differences.append(Difference(stage, field, description))
    return Comparison(len(first_stages & second_stages), differences)


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


def _differences(first: Any, second: Any, path: str, tolerance: float) -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the description of each difference of two nested values."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        description = _tensor_difference(first, second, tolerance)
        if description:
            yield path, description
    elif isinstance(first, dict) and isinstance(second, dict):
        for name in dict.fromkeys([*first, *second]):
            inner_path = f"{path}.{name}" if path else str(name)
            if name not in first or name not in second:
                yield inner_path, f"only in the {'first' if name in first else 'second'}"
            else:
                yield from _differences(first[name], second[name], inner_path, tolerance)
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) != len(second):
            yield path, f"has {len(first)} entries and {len(second)}"
        for index, (first_item, second_item) in enumerate(zip(first, second, strict=False)):
            yield from _differences(first_item, second_item, f"{path}.{index}", tolerance)
    elif not _is_equal(first, second, tolerance):
        yield path, f"is {first!r} and {second!r}"


def _is_equal(first: Any, second: Any, tolerance: float) -> bool:
    if isinstance(first, float) and isinstance(second, int | float):
        numbers = torch.tensor([first, second], dtype=torch.float64)
        is_close = torch.isclose(
            numbers[0], numbers[1], rtol=tolerance, atol=tolerance, equal_nan=True
        )
        return bool(is_close)
    return type(first) is type(second) and first == second


def _tensor_difference(first: Tensor, second: Tensor, tolerance: float) -> str | None:
    if first.shape != second.shape or first.dtype != second.dtype:
        kinds = [
            f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            for tensor in (first, second)
        ]
        return f"is {kinds[0]} and {kinds[1]}"
    first_double, second_double = first.double(), second.double()
    is_different = ~torch.isclose(
        first_double, second_double, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    if not is_different.any():
        return None
    # A NaN on one side is an infinite difference.
    gaps = (first_double - second_double)[is_different].abs().nan_to_num(nan=torch.inf)
    index = is_different.nonzero()[0].tolist()
    first_value, second_value = first[tuple(index)].item(), second[tuple(index)].item()
    count = int(is_different.sum())
    return (
        f"differs at {count} of {first.numel()} elements by up to {gaps.max().item():.3g}, first "
        f"at {index}: {first_value!r} and {second_value!r}"
    )
