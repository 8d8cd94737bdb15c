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
    message = _parse(body)
    return str(message.model_id), int(message.seq_id)


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the whole request; raise `ApiError` 400 if it is invalid."""
    message = _parse(body)
    # The first field has numbers only, the second one numbers and texts.
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, option in message.loss_fn_config_v2.items():
        is_text = option.WhichOneof("value") == "text"
        config[name] = option.text if is_text else float(option.number)
    data = [_read_datum(number, datum) for number, datum in enumerate(message.data)]
    return ForwardBackward(data, str(message.loss_fn), config, bool(message.forward_only))


def _parse(body: bytes) -> Any:
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


def _read_datum(number: int, message: Any) -> Datum:
    ids: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise bad_request(
                f"datum {number} holds a part of the kind {kind!r}; this service reads tokens only."
            )
        tokens = _decode(chunk.encoded_text.tokens, np.int32, f"tokens of datum {number}")
        ids += tokens.tolist()
    inputs = {
        name: read_tensor(tensor, f"{name} of datum {number}")
        for name, tensor in message.loss_fn_inputs.items()
    }
    targets = inputs.get("target_tokens")
    if targets is None or targets.dtype != torch.int64:
        raise bad_request(
            f"datum {number} lacks integer target_tokens. Give the next token of each token."
        )
    is_per_token = targets.ndim in (1, 2) and len(targets) == len(ids)
    if not is_per_token or not ids:
        raise bad_request(
            f"target_tokens of datum {number} has the shape {list(targets.shape)} for {len(ids)} "
            "tokens. Give one or several targets per token."
        )
    for name, tensor in inputs.items():
        if tensor.shape != targets.shape:
            raise bad_request(
                f"{name} of datum {number} has the shape {list(tensor.shape)}, target_tokens "
                f"{list(targets.shape)}. Give both the same shape."
            )
    return Datum(tuple(ids), inputs)


def read_tensor(message: Any, name: str) -> Tensor:
    """Return a tensor of a request; sparse rows become dense."""
    pb = schema()
    kinds: dict[int, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
    if message.dtype not in kinds:
        raise bad_request(f"{name} is neither float32 nor int64. Send one of these.")
    shape = list(message.shape)
    kind = kinds[message.dtype]
    try:
        if message.WhichOneof("encoding") == "sparse_csr":
            return _read_sparse(message.sparse_csr, shape, kind, name)
        tensor = torch.from_numpy(_decode(message.dense, kind, name))
        # A tensor without a shape is a vector.
        return tensor.reshape(shape) if shape else tensor
    except (ValueError, RuntimeError, IndexError) as error:
        fault = f"{name} cannot be read: {error}. Send as many values as its shape has."
        raise bad_request(fault) from error


def _read_sparse(csr: Any, shape: list[int], kind: type[np.generic], name: str) -> Tensor:
    """Return a tensor of compressed rows: row i has the values from bound i to bound i + 1."""
    values = _decode(csr.values, kind, name)
    row_bounds = _decode(csr.crow_indices, np.int64, name)
    columns = _decode(csr.col_indices, np.int64, name)
    # A few bytes may claim a huge shape.
    is_small_matrix = len(shape) == 2 and math.prod(shape) <= MAX_VALUES
    if not is_small_matrix or len(row_bounds) != shape[0] + 1:
        raise bad_request(
            f"{name} has the shape {shape} and {len(row_bounds)} row bounds. Send two dimensions, "
            f"at most {MAX_VALUES} values, and one bound more than rows."
        )
    # numpy would read a negative column from the end.
    if columns.size and columns.min() < 0:
        raise bad_request(f"{name} has the column {columns.min()}. Send columns from 0.")
    rows = np.repeat(np.arange(shape[0]), np.diff(row_bounds))
    dense = np.zeros(shape, dtype=kind)
    dense[rows, columns] = values
    return torch.from_numpy(dense)


def _decode(content: bytes, kind: type[np.generic], name: str) -> Any:
    try:
        # A copy: torch warns of tensors on memory that cannot be written to.
        return np.frombuffer(content, dtype=kind).copy()
    except ValueError as error:
        message = f"{name} has {len(content)} bytes: {error}. Send whole values."
        raise bad_request(message) from error


def loss_outputs(outputs: Mapping[str, Sequence[Tensor]], metrics: Mapping[str, float]) -> bytes:
    """Return the response to a gradient request: outputs per datum, metrics by `name:reduction`."""
    pb = schema()
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(metrics))
    first_output = next(iter(outputs.values()))
    trailing_shapes = [list(tensor.shape[1:]) for tensor in first_output]
    start = 0
    # One record per run of data with equally many candidates.
    for trailing_shape, run in itertools.groupby(trailing_shapes):
        stop = start + len(list(run))
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        for name, tensors in outputs.items():
            arrays = [tensor.detach().cpu().float().numpy() for tensor in tensors[start:stop]]
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64)
            batched = pb.BatchedTensor(
                data=b"".join(array.tobytes() for array in arrays),
                offsets=offsets.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=trailing_shape,
            )
            record.fields[name].CopyFrom(batched)
        start = stop
    encoded: bytes = message.SerializeToString()
    return encoded


class TopTokens(NamedTuple):
    """The most likely tokens at each position, in descending order."""

    ids_TK: Tensor
    logprobs_TK: Tensor

    def pad_front(self, num_positions: int) -> TopTokens:
        """Return the same after `num_positions` unscored positions."""
        width = self.ids_TK.shape[1]
        no_ids = torch.zeros(num_positions, width, dtype=torch.long)
        no_logprobs = torch.full((num_positions, width), NO_LOGPROB)
        return TopTokens(
            torch.cat([no_ids, self.ids_TK]), torch.cat([no_logprobs, self.logprobs_TK])
        )

    def encode(self) -> Any:
        """Return them as a message of the SDK."""
        length, width = self.ids_TK.shape
        return schema().TopkLogprobs(
            token_ids=pack(self.ids_TK),
            logprobs=pack(self.logprobs_TK),
            k=width,
            length=length,
        )


def tensor_message(tensor: Tensor) -> Any:
    """Return a tensor as a message of the SDK."""
    pb = schema()
    kind = pb.DTYPE_FLOAT32 if tensor.is_floating_point() else pb.DTYPE_INT32
    return pb.Tensor(dense=pack(tensor), dtype=kind, shape=list(tensor.shape))


def pack(tensor: Tensor) -> bytes:
    """Return the bytes of numbers as float32, and of whole numbers as int32."""
    kind = torch.float32 if tensor.is_floating_point() else torch.int32
    return tensor.to(kind).numpy().tobytes()
