"""The protocol buffers of Tinker's SDK.

Shape suffixes: `T` token, `K` candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nip_astra.lazy import import_extra
from nip_astra.serve.requests import bad_request

if TYPE_CHECKING:
    from types import ModuleType

PROTOBUF = "application/x-protobuf"
MAX_VALUES = 1 << 26
"""Maximum values of a sparse tensor."""
NO_LOGPROB = -99999.0
"""Log-probability at positions that were not scored."""


def schema() -> ModuleType:
    """Return the message classes of Tinker's SDK; raise `MissingDependencyError` without it."""
    module: ModuleType = import_extra(
        "tinker.proto.tinker_public_pb2", "Tinker's protocol", "tinker"
    )
    return module


@dataclass(frozen=True)
class Datum:
    """Tokens that the model reads, and inputs of the loss.

    Attributes
    ----------
    inputs : Mapping[str, Tensor]
        `target_tokens` `[T]` or `[T, K]` int64, and further inputs of the same shape.
    """

    ids: tuple[int, ...]
    inputs: Mapping[str, Tensor]

    @property
    def targets(self) -> Tensor:
        """The tokens whose log-probabilities the loss reads."""
        return self.inputs["target_tokens"]


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a loss and, unless it is forward only, its gradients."""

    data: list[Datum]
    loss: str
    config: dict[str, float | str]
    is_forward_only: bool


def read_head(body: bytes) -> tuple[str, int]:
    """Return model and number of a request."""
    message = _parsed(body)
    return str(message.model_id), int(message.seq_id)


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the whole request; raise `ApiError` 400 if it is invalid."""
    message = _parsed(body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else float(value.number)
    return ForwardBackward(
        [_datum(number, one) for number, one in enumerate(message.data)],
        str(message.loss_fn),
        config,
        bool(message.forward_only),
    )


def _parsed(body: bytes) -> Any:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # has no stubs

    message = schema().ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise bad_request(
            f"the request is not a message of Tinker's SDK: {error}. Use tinker 0.25 or later.",
            code="invalid_message",
        ) from error
    return message


def _datum(number: int, message: Any) -> Datum:
    ids: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise bad_request(
                f"datum {number} holds a part of the kind {kind!r}; this service reads tokens only."
            )
        ids += _numbers(chunk.encoded_text.tokens, np.int32, f"tokens of datum {number}").tolist()
    inputs = {
        name: read_tensor(value, f"{name} of datum {number}")
        for name, value in message.loss_fn_inputs.items()
    }
    targets = inputs.get("target_tokens")
    if targets is None or targets.dtype != torch.int64:
        raise bad_request(
            f"datum {number} lacks integer target_tokens. Give the next token of each token."
        )
    if targets.ndim not in (1, 2) or len(targets) != len(ids) or not ids:
        raise bad_request(
            f"target_tokens of datum {number} has the shape {list(targets.shape)} for {len(ids)} "
            "tokens. Give one or several targets per token."
        )
    for name, value in inputs.items():
        if value.shape != targets.shape:
            raise bad_request(
                f"{name} of datum {number} has the shape {list(value.shape)}, target_tokens "
                f"{list(targets.shape)}. Give both the same shape."
            )
    return Datum(tuple(ids), inputs)


def read_tensor(message: Any, name: str) -> Tensor:
    """Return a tensor of a request; sparse rows become dense."""
    pb = schema()
    kinds: dict[int, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
    if message.dtype not in kinds:
        raise bad_request(f"{name} is neither float32 nor int64. Send one of these.")
    shape, kind = list(message.shape), kinds[message.dtype]
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            return _dense(message.sparse_csr, shape, kind, name)
        found = torch.from_numpy(_numbers(message.dense, kind, name))
        return found.reshape(shape) if shape else found
    except (ValueError, RuntimeError, IndexError) as error:
        fault = f"{name} cannot be read: {error}. Send as many values as its shape has."
        raise bad_request(fault) from error


def _dense(csr: Any, shape: list[int], kind: type[np.generic], name: str) -> Tensor:
    values = _numbers(csr.values, kind, name)
    rows, columns = (_numbers(one, np.int64, name) for one in (csr.crow_indices, csr.col_indices))
    if len(shape) != 2 or len(rows) != shape[0] + 1 or math.prod(shape) > MAX_VALUES:
        raise bad_request(
            f"{name} has the shape {shape} and {len(rows)} row bounds. Send two dimensions, at "
            f"most {MAX_VALUES} values, and one bound more than rows."
        )
    if columns.size and columns.min() < 0:
        raise bad_request(f"{name} has the column {columns.min()}. Send columns from 0.")
    dense = np.zeros(shape, dtype=kind)
    dense[np.repeat(np.arange(len(rows) - 1), np.diff(rows)), columns] = values
    return torch.from_numpy(dense)


def _numbers(sent: bytes, kind: type[np.generic], name: str) -> Any:
    try:
        return np.frombuffer(sent, dtype=kind).copy()
    except ValueError as error:
        raise bad_request(f"{name} has {len(sent)} bytes: {error}. Send whole values.") from error


def loss_outputs(outputs: Mapping[str, Sequence[Tensor]], metrics: Mapping[str, float]) -> bytes:
    """Return the response to a gradient request: outputs per datum, metrics by `name:reduction`."""
    pb = schema()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    shapes = [list(one.shape[1:]) for one in next(iter(outputs.values()))]
    start = 0
    # One record per run of data with equally many candidates.
    for trailing, run in itertools.groupby(shapes):
        stop = start + len(list(run))
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        for name, tensors in outputs.items():
            parts = [one.detach().cpu().float().numpy() for one in tensors[start:stop]]
            sizes = np.cumsum([0, *(part.nbytes for part in parts)], dtype=np.int64)
            record.fields[name].CopyFrom(
                pb.BatchedTensor(
                    data=b"".join(part.tobytes() for part in parts),
                    offsets=sizes.tobytes(),
                    dtype=pb.DTYPE_FLOAT32,
                    trailing_shape=trailing,
                )
            )
        start = stop
    encoded: bytes = message.SerializeToString()
    return encoded


class Likeliest(NamedTuple):
    """The most likely tokens at each position, in descending order."""

    ids_TK: Tensor
    logprobs_TK: Tensor

    def after(self, num_places: int) -> Likeliest:
        """Return the same after `num_places` unscored positions."""
        width = self.ids_TK.shape[1]
        return Likeliest(
            torch.cat([torch.zeros(num_places, width, dtype=torch.long), self.ids_TK]),
            torch.cat([torch.full((num_places, width), NO_LOGPROB), self.logprobs_TK]),
        )

    def encoded(self) -> Any:
        length, width = self.ids_TK.shape
        return schema().TopkLogprobs(
            token_ids=packed(self.ids_TK),
            logprobs=packed(self.logprobs_TK),
            k=width,
            length=length,
        )


def tensor_message(given: Tensor) -> Any:
    """Return a tensor as a message of the SDK."""
    pb = schema()
    kind = pb.DTYPE_FLOAT32 if given.is_floating_point() else pb.DTYPE_INT32
    return pb.Tensor(dense=packed(given), dtype=kind, shape=list(given.shape))


def packed(given: Tensor) -> bytes:
    """Return numbers as float32, and whole numbers as int32."""
    kind = torch.float32 if given.is_floating_point() else torch.int32
    return given.to(kind).numpy().tobytes()
