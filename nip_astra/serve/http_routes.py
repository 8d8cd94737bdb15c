"""The routes through which a client in another process trains a model: `http`, the exact protocol.

Shape suffixes: `B` row, `C` context position, `T` continuation position.
"""

from __future__ import annotations

import operator
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from fastapi import APIRouter, Header
from fastapi import Path as PathPart
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import CheckpointError, NipAstraError
from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.base import SamplingOptions
from nip_astra.language_models.services.http_training import (
    DONE_HEADER,
    KEY_HEADER,
    MESSAGE,
    ROUTE,
    pack_folder,
    unpack_folder,
    vocabulary_digest,
    weights_digest,
)
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.parameters.parameters_base import RegisteredName
from nip_astra.parameters.training import OPTIMIZERS, TrainingConfiguration
from nip_astra.serve.requests import ApiError, Body, bad_request, overloaded, read_body
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.training import (
    MAX_WEIGHT_DECAY,
    Bases,
    HostedModel,
    Operation,
    WorkQueue,
    lookup,
)
from nip_astra.trainers.optimization import build_optimizer

SECONDS_TO_WAIT = 20.0
"""Maximum seconds that a request waits for a result before the client must poll."""
Number = Annotated[int, PathPart(ge=1, lt=1 << 53)]
"""Number of a model's operation, in the order of execution."""
Key = Annotated[str, Header(alias=KEY_HEADER, min_length=1, max_length=200)]
"""Identifies a repeated request."""
_LOST = (
    "this service holds no model {name}: it was closed or idle for too long, or the service was "
    "restarted. Create one from a saved state, of a run by: nip-astra resume RUN."
)


class Rows(NamedTuple):
    """Contexts and continuations with their masks, in the order of `LanguageModel.logprobs`."""

    context_BC: Tensor
    context_mask_BC: Tensor
    ids_BT: Tensor
    mask_BT: Tensor


Message = Mapping[str, Any]
"""An operation or its result, as tensors, numbers and texts by name."""
OPERATIONS = (
    "logprobs",
    "backward",
    "optim_step",
    "sample",
    "save_state",
    "load_state",
    "load_weights",
    "save_weights_for_sampler",
)
"""Kinds of operations on a model."""


class LoraBody(Body):
    """A low-rank adapter; the fields of `LoraParameters`."""

    rank: int = Field(ge=1, le=4096)
    alpha: float = Field(gt=0, le=1e6)
    target_modules: str | Annotated[list[str], Field(min_length=1)] = "all-linear"


class ModelBody(Body):
    """A model to train; `vocabulary` and `weights` are digests of the client's model."""

    base_model: str
    lora: LoraBody | None = None
    seed: int = Field(ge=0, lt=1 << 63)
    optimizer: Annotated[str, RegisteredName(OPTIMIZERS)]
    weight_decay: float = Field(ge=0, le=MAX_WEIGHT_DECAY)
    role: str = Field(default="policy", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    vocabulary: str | None = None
    weights: str | None = None


@dataclass
class HttpModel(HostedModel):
    """A model trained through this file's routes; `key` is that of the request that created it."""

    key: str = ""

    def execute(self, message: Message) -> dict[str, Any]:
        """Run an operation, and count its tokens; raise `ApiError` if it is refused."""
        kind = str(message.get("kind"))
        if kind not in OPERATIONS:
            raise bad_request(
                f"unknown operation {kind[:100]!r}; known: {', '.join(OPERATIONS)}. Use a client "
                "of this version."
            )
        with self.policy.counting() as spent_tokens:
            try:
                result = self._run(kind, message)
            except NipAstraError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
                # A message is unpacked without a schema: its faults appear where it is read.
                raise bad_request(
                    f"wrong arguments of the operation {kind}: {type(error).__name__}: "
                    f"{str(error)[:300]}. Use a client of this version."
                ) from error
        tokens = {name: count for name, count in asdict(spent_tokens).items() if count}
        return {**result, "tokens": tokens}

    def _run(self, kind: str, message: Message) -> dict[str, Any]:
        match kind:
            case "logprobs":
                rows = self._check_rows(message["rows"])
                return {"logprobs": self.service.compute_logprobs(*rows)}
            case "backward":
                return self._backward(message)
            case "optim_step":
                max_grad_norm = message["max_grad_norm"]
                figures = self.service.optim_step(
                    lr=float(message["lr"]),
                    max_grad_norm=None if max_grad_norm is None else float(max_grad_norm),
                )
                return asdict(figures)
            case "sample":
                return self._sample(message)
            case "save_state":
                return _pack_saved(self.service.save_state)
            case "save_weights_for_sampler":
                return _pack_saved(self.service.save_weights_for_sampler)
            case "load_state":
                _load_unpacked(message["files"], self.service.load_state)
                # A state is saved between steps: gradients added since then are not part of it.
                self.service.optimizer.zero_grad(set_to_none=True)
            case "load_weights":
                _load_unpacked(message["files"], self.policy.restore)
        return {}

    def _backward(self, message: Message) -> dict[str, Any]:
        pieces = [
            (self._check_rows(piece["rows"]), piece["gradient"]) for piece in message["pieces"]
        ]
        for rows, gradient_BT in pieces:
            if gradient_BT.shape != rows.ids_BT.shape:
                raise bad_request(
                    f"gradients have the shape {list(gradient_BT.shape)}, tokens "
                    f"{list(rows.ids_BT.shape)}. Send one for each token."
                )
        with self.gradients_or_none():
            for rows, gradient_BT in pieces:
                # The client computed the loss, and sends its gradient by each log-probability:
                # the product's gradient by the weights is that of the loss, by the chain rule.
                logprobs_BT = self.service.logprobs(*rows)
                surrogate = (logprobs_BT * gradient_BT.to(logprobs_BT)).sum()
                surrogate.backward()  # type: ignore[no-untyped-call]
        return {}

    def _sample(self, message: Message) -> dict[str, Any]:
        sent_options = message["options"]
        if not isinstance(sent_options, dict) or any(
            isinstance(option, Tensor) for option in sent_options.values()
        ):
            raise bad_request("sampling options must be a dictionary of numbers.")
        # `operator.index` takes integers only: 1.5 and "1" are refused, not rounded or parsed.
        end_ids = tuple(operator.index(token) for token in sent_options.get("end_ids", ()))
        options = SamplingOptions(**{**sent_options, "end_ids": end_ids})
        contexts = [[operator.index(token) for token in context] for context in message["contexts"]]
        num_samples = int(message["rows_per_context"])
        # The client draws the random numbers, so that its run does not depend on the service.
        uniforms_BT = message["uniforms"]
        self._check_uniforms(uniforms_BT, len(contexts), num_samples, options.max_new_tokens)
        for context in contexts:
            self.check_ids(torch.tensor(context), len(context) + options.max_new_tokens)
        rollout = self.service.sample(contexts, num_samples, uniforms_BT, options)
        return {"ids": rollout.ids_BT, "mask": rollout.mask_BT, "logprobs": rollout.logprobs_BT}

    @staticmethod
    def _check_uniforms(
        uniforms_BT: Tensor, num_contexts: int, num_samples: int, max_new_tokens: int
    ) -> None:
        """Raise `ApiError` unless there is a number from 0 to 1 for each token of each sample."""
        is_uniform = uniforms_BT.is_floating_point() and bool(
            ((uniforms_BT >= 0) & (uniforms_BT <= 1)).all()
        )
        if num_contexts == 0 or num_samples < 1 or not is_uniform:
            raise bad_request(
                f"cannot sample {num_samples} answers to {num_contexts} contexts. Send at least "
                "one context, rows_per_context from 1, and random numbers from 0 to 1."
            )
        expected_shape = [num_contexts * num_samples, max_new_tokens]
        if list(uniforms_BT.shape) != expected_shape:
            raise bad_request(
                f"random numbers have the shape {list(uniforms_BT.shape)}, the answers "
                f"{expected_shape}. Send one for each token."
            )

    def _check_rows(self, sent_rows: Any) -> Rows:
        rows = Rows(*sent_rows)
        masks = (rows.context_mask_BC, rows.mask_BT)
        has_masks = all(mask.dtype == torch.bool and mask.ndim == 2 for mask in masks)
        is_aligned = (
            rows.context_BC.shape == rows.context_mask_BC.shape
            and rows.ids_BT.shape == rows.mask_BT.shape
            and len(rows.context_BC) == len(rows.ids_BT)
        )
        if not (has_masks and is_aligned):
            raise bad_request(
                "the rows have tensors of different shapes. Send contexts and continuations of as "
                "many rows, each with a boolean mask of its shape."
            )
        length_B = rows.context_mask_BC.sum(dim=1) + rows.mask_BT.sum(dim=1)
        max_length = int(length_B.max())
        self.check_ids(rows.context_BC, max_length)
        self.check_ids(rows.ids_BT, max_length)
        return rows


def _pack_saved(save: Callable[[Path], None]) -> dict[str, Any]:
    """Return the files that `save` writes to a folder, as a message."""
    with tempfile.TemporaryDirectory(prefix="nip-astra-state-") as folder:
        save(Path(folder))
        return {"files": pack_folder(Path(folder))}


def _load_unpacked(files: Mapping[str, Tensor], load: Callable[[Path], Any]) -> None:
    """Write the files of a message to a folder that `load` reads."""
    with tempfile.TemporaryDirectory(prefix="nip-astra-state-") as folder:
        unpack_folder(files, Path(folder))
        load(Path(folder))


def training_routes(bases: Bases, work: WorkQueue, settings: ServiceSettings) -> APIRouter:
    """Return the routes of one service; `work` runs the operations on its models."""
    routes = _TrainingRoutes(bases, work, settings)
    router = APIRouter(prefix=ROUTE)
    router.add_api_route("", routes.list_bases, methods=["GET"])
    router.add_api_route("", routes.create, methods=["POST"])
    router.add_api_route("/{name}", routes.report, methods=["GET"])
    router.add_api_route("/{name}", routes.close, methods=["DELETE"])
    router.add_api_route("/{name}/operations/{number}", routes.operate, methods=["POST"])
    router.add_api_route("/{name}/operations/{number}", routes.wait, methods=["GET"])
    return router


class _TrainingRoutes:
    def __init__(self, bases: Bases, work: WorkQueue, settings: ServiceSettings) -> None:
        self.bases, self.work, self.settings = bases, work, settings
        self.models: dict[str, HttpModel] = {}

    def _model(self, name: str) -> HttpModel:
        return lookup(self.models, name, reason=_LOST, code="model_lost")

    def _find_created(self, key: str) -> HttpModel | None:
        """Return the model that an earlier request with the same key created, if any."""
        return next((model for model in self.models.values() if model.key == key), None)

    def _close(self, name: str) -> None:
        self.models.pop(name, None)
        self.work.close_lane(name)

    def _make_room(self) -> None:
        """Close models that have been idle for long if the service is full."""
        limit, seconds = self.settings.max_training_models, self.settings.training_idle_seconds
        if len(self.models) < limit:
            return
        for name in list(self.models):
            if self.work.is_given_up(name, seconds):
                self._close(name)
        if len(self.models) >= limit:
            raise overloaded(
                f"{limit} models are in training, the limit of this service. Close one, retry "
                "later, or start it with a higher max_training_models.",
                "models_full",
            )

    async def list_bases(self) -> Response:
        return JSONResponse({"models": self.bases.names})

    async def create(self, request: Request, key: Key) -> Response:
        body = await read_body(request, ModelBody)
        model = self._find_created(key)
        if model is None:
            operation = self.work.submit(Operation(lambda: self._build(body, key), key))
            try:
                model = await operation.result(SECONDS_TO_WAIT)
            except TimeoutError:
                # The client repeats the request; it then gets this model by the key.
                return _still_working()
        return JSONResponse(_card(model))

    async def report(self, name: str) -> Response:
        model = self._model(name)
        self.work.report(name)
        return JSONResponse(_card(model))

    def _build(self, body: ModelBody, key: str) -> HttpModel:
        # Looked up again: repeated requests may have been queued before the first was executed.
        model = self._find_created(key)
        if model is not None:
            return model
        base = self.bases.get(body.base_model)
        _check_digest(base.name, "vocabulary", body.vocabulary, vocabulary_digest(base.tokenizer))
        if body.weights is not None:
            _check_digest(base.name, "weights", body.weights, weights_digest(base.module))
        lora = None if body.lora is None else LoraParameters(**body.lora.model_dump())
        self._make_room()
        policy = self.bases.policy(base, lora, seed=body.seed)
        config = TrainingConfiguration(optimizer=body.optimizer, weight_decay=body.weight_decay)
        optimizer = build_optimizer(config, policy.parameters())
        service = LocalTrainingService(policy, optimizer, role=body.role)
        model = HttpModel(uuid.uuid4().hex, base, service, key)
        # First its lane: a model in `models` can be requested at once.
        self.work.open_lane(model.name)
        self.models[model.name] = model
        return model

    async def operate(self, request: Request, name: str, number: Number, key: Key) -> Response:
        model = self._model(name)
        body = await request.body()

        def run() -> bytes:
            try:
                message = unpack_state(body)
            except CheckpointError as error:
                raise bad_request(str(error), code="invalid_message") from error
            if not isinstance(message, dict):
                raise bad_request("an operation must be a message of named values.")
            return pack_state(model.execute(message))

        operation = self.work.submit_ordered(name, number, Operation(run, key))
        return await _answer(operation)

    async def wait(self, name: str, number: Number, key: Key) -> Response:
        self._model(name)
        operation = self.work.find(name, number)
        if operation is None or operation.key != key:
            raise ApiError(
                404, f"operation {number} is unknown. Send it again.", code="operation_unknown"
            )
        return await _answer(operation)

    async def close(self, name: str) -> Response:
        self._model(name)
        self._close(name)
        return JSONResponse({"closed": name})


def _card(model: HttpModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "num_parameters": model.policy.num_parameters(),
        "context_window": model.policy.context_window,
    }


async def _answer(operation: Operation) -> Response:
    # It distinguishes an operation that failed from a request that never became one: the client
    # repeats the latter only.
    headers = {DONE_HEADER: "done"}
    try:
        result = await operation.result(SECONDS_TO_WAIT)
    except TimeoutError:
        return _still_working()
    except ApiError as error:
        return error.response(**headers)
    return Response(result, media_type=MESSAGE, headers=headers)


def _still_working() -> Response:
    """Return the response by which a client polls again; proxies end long silent requests."""
    return JSONResponse({"status": "working"}, 202)


def _check_digest(name: str, part: str, sent_digest: str | None, digest: str) -> None:
    """Raise `ApiError` if `part` of a model differs between client and service."""
    if sent_digest is not None and sent_digest != digest:
        raise bad_request(
            f"the {part} of the model {name!r} differ between service and client. Start the "
            "service with the model that the parameters name as language_model.model.",
            part,
            "other_model",
        )
