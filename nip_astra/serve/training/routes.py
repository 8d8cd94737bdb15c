"""The routes by which a client in another process trains a model."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nip_astra.checkpoints.tensors import pack_state, unpack_state
from nip_astra.errors import CheckpointError
from nip_astra.language_models.adapters import LoraParameters
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.language_models.services.training_wire import (
    DONE_HEADER,
    KEY_HEADER,
    MESSAGE,
    ROUTE,
    vocabulary_digest,
    weights_digest,
)
from nip_astra.parameters.parameters_base import RegisteredName
from nip_astra.parameters.training import OPTIMIZERS, TrainingConfiguration
from nip_astra.serve.api_errors import ApiError, held, wrong
from nip_astra.serve.bodies import Body, read_body
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.training.bases import Bases
from nip_astra.serve.training.hosted import MAX_WEIGHT_DECAY, HostedModel
from nip_astra.serve.training.work import Operation, WorkQueue
from nip_astra.trainers.optimization import build_optimizer

SECONDS_TO_WAIT = 20.0
"""After which a client that waits is told to ask again."""


Number = Annotated[int, Path(ge=1, lt=1 << 53)]
"""Which of a model's operations, in the order in which they take effect."""


class LoraBody(Body):
    """A low-rank adapter; the fields of `LoraParameters`."""

    rank: int = Field(ge=1, le=4096)
    alpha: float = Field(gt=0, le=1e6)
    target_modules: str | Annotated[list[str], Field(min_length=1)] = "all-linear"


class ModelBody(Body):
    """A model to train.

    Attributes
    ----------
    seed : int
        Of an adapter's first weights.
    vocabulary, weights : str or None
        Digests of what the client takes the model for.
    """

    base_model: str
    lora: LoraBody | None = None
    seed: int = Field(ge=0, lt=1 << 63)
    optimizer: Annotated[str, RegisteredName(OPTIMIZERS)]
    weight_decay: float = Field(ge=0, le=MAX_WEIGHT_DECAY)
    role: str = Field(default="policy", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    vocabulary: str | None = None
    weights: str | None = None


class TrainingHost:
    """The models that clients train.

    Parameters
    ----------
    work : WorkQueue
        Carries out what they ask for.
    """

    def __init__(self, bases: Bases, work: WorkQueue, settings: ServiceSettings) -> None:
        self.bases, self.work, self.settings = bases, work, settings
        self.models: dict[str, HostedModel] = {}

    def make_room(self) -> None:
        """Give up models that nobody has asked for in a long time, where there is no room.

        Raises
        ------
        ApiError
            429 where all are in use.
        """
        most, seconds = self.settings.max_training_models, self.settings.training_idle_seconds
        if len(self.models) < most:
            return
        for name in list(self.models):
            if self.work.is_given_up(name, seconds):
                self.forget(name)
        if len(self.models) >= most:
            raise ApiError(
                429,
                f"a model was to be trained, but {most} are in training, which is the most that "
                "this service holds. Close one, come later, or start the service with a higher "
                "max_training_models.",
                kind="rate_limit_error",
                code="models_full",
                retry_after=1,
            )

    def add(self, model: HostedModel) -> None:
        """Take in a model."""
        self.work.open_lane(model.name)
        self.models[model.name] = model

    def get(self, name: str) -> HostedModel:
        """A model by its name.

        Raises
        ------
        ApiError
            404 where there is none.
        """
        reason = (
            "the model {name} was to be trained further, but this service does not hold it: it was "
            "closed, was idle for too long, or the service was started anew. Make a model from a "
            "saved state: nip-astra resume RUN goes on from a run's."
        )
        return held(self.models, name, reason=reason, code="model_lost")

    def forget(self, name: str) -> None:
        """Give up a model."""
        self.models.pop(name, None)
        self.work.close_lane(name)


def training_routes(host: TrainingHost) -> APIRouter:
    """The routes over the models of a host."""
    routes = _TrainingRoutes(host)
    router = APIRouter(prefix=ROUTE)
    router.add_api_route("", routes.bases, methods=["GET"])
    router.add_api_route("", routes.create, methods=["POST"])
    router.add_api_route("/{name}", routes.report, methods=["GET"])
    router.add_api_route("/{name}", routes.close, methods=["DELETE"])
    router.add_api_route("/{name}/operations/{number}", routes.operate, methods=["POST"])
    router.add_api_route("/{name}/operations/{number}", routes.wait, methods=["GET"])
    return router


class _TrainingRoutes:
    def __init__(self, host: TrainingHost) -> None:
        self.host = host

    async def bases(self) -> Response:
        return JSONResponse({"models": self.host.bases.names})

    async def create(self, request: Request) -> Response:
        body = await read_body(request, ModelBody)
        key = _key(request)
        known = next((one for one in self.host.models.values() if one.key and one.key == key), None)
        if known is None:
            operation = Operation(lambda: self._build(body, key), key)
            known = await _result(self.host.work.submit(operation))
        if known is None:
            return JSONResponse({"status": "working"}, 202)
        return JSONResponse(_card(known))

    async def report(self, name: str) -> Response:
        """A client reports that it is there."""
        model = self.host.get(name)
        self.host.work.report(name)
        return JSONResponse(_card(model))

    def _build(self, body: ModelBody, key: str) -> HostedModel:
        found = next((one for one in self.host.models.values() if one.key == key), None)
        if found is not None:
            return found
        base = self.host.bases.get(body.base_model)
        _check_same(base.name, "vocabulary", body.vocabulary, vocabulary_digest(base.tokenizer))
        if body.weights is not None:
            _check_same(base.name, "weights", body.weights, weights_digest(base.module))
        lora = None if body.lora is None else LoraParameters(**body.lora.model_dump())
        self.host.make_room()
        policy = self.host.bases.policy(base, lora, seed=body.seed)
        config = TrainingConfiguration(optimizer=body.optimizer, weight_decay=body.weight_decay)
        optimizer = build_optimizer(config, policy.parameters())
        service = LocalTrainingService(policy, optimizer, role=body.role)
        model = HostedModel(uuid.uuid4().hex, base, service, key)
        self.host.add(model)
        return model

    async def operate(self, request: Request, name: str, number: Number) -> Response:
        model = self.host.get(name)
        body = await request.body()

        def run() -> bytes:
            try:
                message = unpack_state(body)
            except CheckpointError as error:
                raise wrong(str(error), code="invalid_message") from error
            if not isinstance(message, dict):
                raise wrong("an operation was sent that is no message. Use a client of ours.")
            return pack_state(model.do(message))

        operation = self.host.work.submit_ordered(name, number, Operation(run, _key(request)))
        return await _answer(operation)

    async def wait(self, request: Request, name: str, number: Number) -> Response:
        self.host.get(name)
        operation = self.host.work.find(name, number)
        if operation is None or operation.key != _key(request):
            raise ApiError(
                404,
                f"the result of operation {number} was asked for, but the operation is not known. "
                "Send it again.",
                code="operation_unknown",
            )
        return await _answer(operation)

    async def close(self, name: str) -> Response:
        self.host.get(name)
        self.host.forget(name)
        return JSONResponse({"closed": name})


def _card(model: HostedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "num_parameters": model.policy.num_parameters(),
        "context_window": model.policy.context_window,
    }


async def _result(operation: Operation) -> Any:
    """What an operation gave; None where it takes longer than a client waits."""
    waited = asyncio.shield(asyncio.wrap_future(operation.future))
    try:
        return await asyncio.wait_for(waited, SECONDS_TO_WAIT)
    except TimeoutError:
        return None


async def _answer(operation: Operation) -> Response:
    done = {DONE_HEADER: "done"}
    try:
        result = await _result(operation)
    except ApiError as error:
        return JSONResponse(error.body, error.status, headers={**error.headers, **done})
    if result is None:
        return JSONResponse({"status": "working"}, 202)
    return Response(result, media_type=MESSAGE, headers=done)


def _key(request: Request) -> str:
    key = request.headers.get(KEY_HEADER, "")
    if not key or len(key) > 200:
        raise wrong(
            f"a request came without the header {KEY_HEADER}, by which it is known when it comes "
            "again. Use a client of ours.",
            KEY_HEADER,
        )
    return key


def _check_same(name: str, what: str, given: str | None, own: str) -> None:
    if given is not None and given != own:
        raise ApiError(
            400,
            f"the model {name!r} was to be trained, but its {what} here and at the client are not "
            "the same. Start the service with the model that the parameters name as "
            "language_model.model.",
            param=what,
            code="other_model",
        )
