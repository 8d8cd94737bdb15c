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
from typing import Annotated, Any

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
from nip_astra.serve.requests import ApiError, Body, overloaded, read_body, wrong
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
Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""`(context_BC, context_mask_BC, ids_BT, mask_BT)`, as `LanguageModel.logprobs` takes them."""
Number = Annotated[int, PathPart(ge=1, lt=1 << 53)]
"""Number of a model's operation, in the order of execution."""
Key = Annotated[str, Header(alias=KEY_HEADER, min_length=1, max_length=200)]
"""Identifies a repeated request."""
_LOST = (
    "this service holds no model {name}: it was closed or idle for too long, or the service was "
    "restarted. Create one from a saved state, of a run by: nip-astra resume RUN."
)


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

    def do(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Run an operation, and count its tokens; raise `ApiError` if it is refused."""
        operations: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "logprobs": self._logprobs,
            "backward": self._backward,
            "optim_step": self._optim_step,
            "sample": self._sample,
            "save_state": lambda _: _files_of(self.service.save_state),
            "load_state": self._load_state,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": lambda _: _files_of(self.service.save_weights_for_sampler),
        }
        kind = str(message.get("kind"))
        if kind not in operations:
            raise wrong(
                f"unknown operation {kind[:100]!r}; known: {', '.join(operations)}. Use a client "
                "of this version."
            )
        with self.policy.counting() as spent:
            try:
                result = operations[kind](message)
            except NipAstraError:
                raise
            except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
                raise wrong(
                    f"wrong arguments of the operation {kind}: {type(error).__name__}: "
                    f"{str(error)[:300]}. Use a client of this version."
                ) from error
        return {**result, "tokens": {name: value for name, value in asdict(spent).items() if value}}

    def _logprobs(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"logprobs": self.service.compute_logprobs(*self._rows(message["rows"]))}

    def _backward(self, message: Mapping[str, Any]) -> dict[str, Any]:
        pieces = [(self._rows(piece["rows"]), piece["gradient"]) for piece in message["pieces"]]
        for rows, gradient_BT in pieces:
            if gradient_BT.shape != rows[2].shape:
                raise wrong(
                    f"gradients have the shape {list(gradient_BT.shape)}, tokens "
                    f"{list(rows[2].shape)}. Send one for each token."
                )
        with self.gradients_or_none():
            for rows, gradient_BT in pieces:
                logprobs_BT = self.service.logprobs(*rows)
                (logprobs_BT * gradient_BT.to(logprobs_BT)).sum().backward()  # type: ignore[no-untyped-call]
        return {}

    def _optim_step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        bound = message["max_grad_norm"]
        figures = self.service.optim_step(
            lr=float(message["lr"]), max_grad_norm=None if bound is None else float(bound)
        )
        return asdict(figures)

    def _sample(self, message: Mapping[str, Any]) -> dict[str, Any]:
        given = message["options"]
        if not isinstance(given, dict) or any(isinstance(one, Tensor) for one in given.values()):
            raise wrong("sampling options must be a dictionary of numbers.")
        end_ids = tuple(operator.index(token) for token in given.get("end_ids", ()))
        options = SamplingOptions(**{**given, "end_ids": end_ids})
        contexts = [[operator.index(token) for token in one] for one in message["contexts"]]
        uniforms_BT = message["uniforms"]
        count = int(message["rows_per_context"])
        is_uniform = (
            uniforms_BT.is_floating_point() and ((uniforms_BT >= 0) & (uniforms_BT <= 1)).all()
        )
        if not contexts or count < 1 or not is_uniform:
            raise wrong(
                f"cannot sample {count} answers to {len(contexts)} contexts. Send at least one "
                "context, rows_per_context from 1, and random numbers from 0 to 1."
            )
        if list(uniforms_BT.shape) != [len(contexts) * count, options.max_new_tokens]:
            raise wrong(
                f"random numbers have the shape {list(uniforms_BT.shape)}, the answers "
                f"{[len(contexts) * count, options.max_new_tokens]}. Send one for each token."
            )
        for context in contexts:
            self.check_ids(torch.tensor(context), len(context) + options.max_new_tokens)
        found = self.service.sample(contexts, count, uniforms_BT, options)
        return {"ids": found.ids_BT, "mask": found.mask_BT, "logprobs": found.logprobs_BT}

    def _load_state(self, message: Mapping[str, Any]) -> dict[str, Any]:
        _load_files(message["files"], self.service.load_state)
        self.service.optimizer.zero_grad(set_to_none=True)
        return {}

    def _load_weights(self, message: Mapping[str, Any]) -> dict[str, Any]:
        _load_files(message["files"], self.policy.restore)
        return {}

    def _rows(self, rows: Any) -> Rows:
        context_BC, context_mask_BC, ids_BT, mask_BT = rows
        masks = context_mask_BC, mask_BT
        is_valid = all(mask.dtype == torch.bool and mask.ndim == 2 for mask in masks) and (
            context_BC.shape == context_mask_BC.shape
            and ids_BT.shape == mask_BT.shape
            and len(context_BC) == len(ids_BT)
        )
        if not is_valid:
            raise wrong(
                "the rows have tensors of different shapes. Send contexts and continuations of as "
                "many rows, each with a boolean mask of its shape."
            )
        length = context_mask_BC.sum(dim=1) + mask_BT.sum(dim=1)
        for ids in (context_BC, ids_BT):
            self.check_ids(ids, int(length.max()))
        return context_BC, context_mask_BC, ids_BT, mask_BT


def _files_of(write: Callable[[Path], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nip-astra-state-") as folder:
        write(Path(folder))
        return {"files": pack_folder(Path(folder))}


def _load_files(files: Mapping[str, Tensor], load: Callable[[Path], Any]) -> None:
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

    def _with_key(self, key: str) -> HttpModel | None:
        return next((one for one in self.models.values() if one.key == key), None)

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
        known = self._with_key(key)
        if known is None:
            operation = self.work.submit(Operation(lambda: self._build(body, key), key))
            try:
                known = await operation.result(SECONDS_TO_WAIT)
            except TimeoutError:
                return JSONResponse({"status": "working"}, 202)
        return JSONResponse(_card(known))

    async def report(self, name: str) -> Response:
        model = self._model(name)
        self.work.report(name)
        return JSONResponse(_card(model))

    def _build(self, body: ModelBody, key: str) -> HttpModel:
        known = self._with_key(key)
        if known is not None:
            return known
        base = self.bases.get(body.base_model)
        _check_same(base.name, "vocabulary", body.vocabulary, vocabulary_digest(base.tokenizer))
        if body.weights is not None:
            _check_same(base.name, "weights", body.weights, weights_digest(base.module))
        lora = None if body.lora is None else LoraParameters(**body.lora.model_dump())
        self._make_room()
        policy = self.bases.policy(base, lora, seed=body.seed)
        config = TrainingConfiguration(optimizer=body.optimizer, weight_decay=body.weight_decay)
        optimizer = build_optimizer(config, policy.parameters())
        service = LocalTrainingService(policy, optimizer, role=body.role)
        model = HttpModel(uuid.uuid4().hex, base, service, key)
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
                raise wrong(str(error), code="invalid_message") from error
            if not isinstance(message, dict):
                raise wrong("an operation must be a message of named values.")
            return pack_state(model.do(message))

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
    done = {DONE_HEADER: "done"}
    try:
        result = await operation.result(SECONDS_TO_WAIT)
    except TimeoutError:
        return JSONResponse({"status": "working"}, 202)
    except ApiError as error:
        return error.response(**done)
    return Response(result, media_type=MESSAGE, headers=done)


def _check_same(name: str, what: str, given: str | None, own: str) -> None:
    if given is not None and given != own:
        raise wrong(
            f"the {what} of the model {name!r} differ between service and client. Start the "
            "service with the model that the parameters name as language_model.model.",
            what,
            "other_model",
        )
