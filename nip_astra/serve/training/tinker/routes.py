"""The routes of Tinker's protocol."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nip_astra.serve.api_errors import ApiError, wrong
from nip_astra.serve.bodies import MAX_LISTED, parse_json, read_body
from nip_astra.serve.training.tinker.bodies import (
    CreateModelBody,
    FutureBody,
    HeartbeatBody,
    JoinBody,
    LoadBody,
    ModelIdBody,
    OptimStepBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SaveForSamplerBody,
    SessionBody,
    TtlBody,
    WeightsInfoBody,
)
from nip_astra.serve.training.tinker.host import TinkerHost
from nip_astra.serve.training.tinker.messages import PROTOBUF, read_forward_backward, read_head
from nip_astra.serve.training.tinker.store import RunRecord, told_time
from nip_astra.serve.training.work import Operation

SECONDS_TO_WAIT = 25.0
"""Seconds after which a waiting client must poll again; the SDK waits 45."""
SECONDS_KEPT = 3600.0
"""For which a result is kept after it was there."""
MAX_KEPT = 50_000
Limit = Annotated[int, Query(ge=1, le=MAX_LISTED)]
Offset = Annotated[int, Query(ge=0, lt=1 << 31)]
NOT_OFFERED = {
    "/save_weights_external": "weights in the form of others are written by the run's own "
    "save_weights_for_sampler of nip_astra, or from the adapter in the service's state folder",
    "/copy_weights": "this service has no projects to copy between",
    "/create_custom_loss": "custom losses are computed at the client, by forward_backward_custom",
    "/audit": "this service keeps no audit log",
    "/billing/usage/events": "this service costs nothing",
    "/billing/usage/checkpoints/current": "this service costs nothing",
    "/auth/token": "this service takes an API key",
    "/sessions/search": "sessions are listed by list_sessions",
    "/cancel_future": "requests that wait are answered",
    "/retrieve_futures": "results are asked for one by one",
}
"""What the SDK may ask for that is refused, and what there is instead."""
NOT_OFFERED_OF_CHECKPOINTS = {
    "publish": "this service has no accounts, so that every client may load every checkpoint",
    "external_weights_urls": "this service keeps adapters in its state folder alone",
}


def tinker_routes(host: TinkerHost) -> APIRouter:
    """The routes over the models, sessions and checkpoints of a host."""
    routes = _TinkerRoutes(host)
    router = APIRouter(prefix="/api/v1")
    for path, handler in (
        ("/client/config", routes.client_config),
        ("/client/dynamic_config", routes.client_config),
        ("/create_session", routes.create_session),
        ("/session_heartbeat", routes.heartbeat),
        ("/sessions/{name}/finish", routes.finish),
        ("/telemetry", routes.telemetry),
        ("/create_model", routes.create_model),
        ("/get_info", routes.get_info),
        ("/forward_backward", routes.forward_backward),
        ("/optim_step", routes.optim_step),
        ("/save_weights", routes.save_weights),
        ("/load_weights", routes.load_weights),
        ("/save_weights_for_sampler", routes.save_weights_for_sampler),
        ("/create_sampling_session", routes.create_sampling_session),
        ("/join_sampling_session", routes.join_sampling_session),
        ("/asample", routes.asample),
        ("/retrieve_future", routes.retrieve_future),
    ):
        router.add_api_route(path, handler, methods=["POST"])
    router.add_api_route("/healthz", routes.health, methods=["GET"])
    rest = _RestRoutes(host)
    checkpoint = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    router.add_api_route("/get_server_capabilities", rest.capabilities, methods=["GET"])
    router.add_api_route("/weights_info", rest.weights_info, methods=["POST"])
    router.add_api_route("/training_runs", rest.runs, methods=["GET"])
    router.add_api_route("/training_runs/{run_id}", rest.run, methods=["GET"])
    router.add_api_route("/training_runs/{run_id}/checkpoints", rest.of_run, methods=["GET"])
    router.add_api_route(checkpoint, rest.delete, methods=["DELETE"])
    router.add_api_route(f"{checkpoint}/ttl", rest.set_ttl, methods=["PUT", "POST", "PATCH"])
    router.add_api_route("/checkpoints", rest.checkpoints, methods=["GET"])
    router.add_api_route("/sessions", rest.sessions, methods=["GET"])
    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path, reason in NOT_OFFERED.items():
        router.add_api_route(path, _refusal(path, reason), methods=every)
    for name, reason in NOT_OFFERED_OF_CHECKPOINTS.items():
        router.add_api_route(f"{checkpoint}/{name}", _refusal(name, reason), methods=every)
    for name in ("project", "trace_export"):
        reason = "this service has neither projects nor traces of sessions"
        router.add_api_route(f"/sessions/{{name}}/{name}", _refusal(name, reason), methods=every)
    # After those that are refused by name.
    router.add_api_route("/sessions/{name}", rest.session, methods=["GET"])
    router.add_api_route("/samplers/{name}", rest.sampler, methods=["GET"])
    return router


class _TinkerRoutes:
    def __init__(self, host: TinkerHost) -> None:
        self.host = host
        self.promises = Promises()

    # ---- sessions

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def client_config(self) -> Response:
        # The SDK's own defaults are those of this service.
        return JSONResponse({})

    async def create_session(self, request: Request) -> Response:
        body = await read_body(request, SessionBody)
        about = {"user_metadata": body.user_metadata, "display_name": body.display_name}
        session = self.host.open_session(about)
        return JSONResponse({"type": "create_session", "session_id": session.name})

    async def heartbeat(self, request: Request) -> Response:
        self.host.session((await read_body(request, HeartbeatBody)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, name: str) -> Response:
        self.host.close_session(name)
        return Response(status_code=204)

    async def telemetry(self) -> Response:
        # What the SDK tells its maker about itself is not kept.
        return JSONResponse({"status": "accepted"})

    # ---- models

    async def create_model(self, request: Request) -> Response:
        body = await read_body(request, CreateModelBody)
        model_id = self.host.model_id(body.session_id, body.model_seq_id)
        build = self.host.create(body)
        answer = {"type": "create_model", "model_id": model_id}
        return self._promise(f"create:{model_id}", Operation(build), lambda _: answer)

    async def load_weights(self, request: Request) -> Response:
        raw = await request.body()
        with self._turn_taken(raw):
            body = await read_body(request, LoadBody)
            body.check()
            checkpoint = self.host.store.find(body.path)
        if body.model_id is not None and body.seq_id is not None:
            model = self.host.model(body.model_id)
            with_optimizer = body.optimizer
            operation = Operation(
                lambda: model.load(checkpoint, with_optimizer=with_optimizer), digest_of(raw)
            )
            answer = {"path": body.path, "model_id": body.model_id, "type": "load_weights"}
            return self._ordered(body.model_id, body.seq_id, operation, lambda _: answer)
        if body.session_id is None or body.model_seq_id is None:
            raise wrong(
                "a checkpoint was to be loaded for no model. Give model_id and seq_id, or "
                "session_id and model_seq_id."
            )
        model_id = self.host.model_id(body.session_id, body.model_seq_id)
        answer = {"path": body.path, "model_id": model_id, "type": "load_weights"}
        build = self.host.create_from(body)
        return self._promise(f"create:{model_id}", Operation(build), lambda _: answer)

    async def get_info(self, request: Request) -> Response:
        model = self.host.model((await read_body(request, ModelIdBody)).model_id)
        base = model.base
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": model.record.run_id,
                "model_data": {
                    "arch": type(base.module).__name__,
                    "model_name": base.name,
                    "tokenizer_id": base.tokenizer_source,
                },
                "is_lora": True,
                "lora_rank": model.record.lora.rank,
                "model_name": base.name,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-encoding"):
            raise wrong(
                "a request for gradients was sent compressed, but this service has not said that "
                "it reads that. Send it as it is."
            )
        model_id, seq_id = read_head(body)
        model = self.host.model(model_id)
        operation = Operation(
            lambda: model.forward_backward(read_forward_backward(body)), digest_of(body)
        )
        return self._in_order(model_id, seq_id, operation, tell_protobuf)

    async def optim_step(self, request: Request) -> Response:
        raw = await request.body()
        with self._turn_taken(raw):
            body = await read_body(request, OptimStepBody)
            adam = body.adam
        model = self.host.model(body.model_id)
        operation = Operation(lambda: model.optim_step(adam), digest_of(raw))
        return self._ordered(
            body.model_id, body.seq_id, operation, lambda metrics: {"metrics": metrics}
        )

    async def save_weights(self, request: Request) -> Response:
        raw = await request.body()
        with self._turn_taken(raw):
            body = await read_body(request, SaveBody)
        self.host.model(body.model_id)
        operation = Operation(lambda: self.host.save(body), digest_of(raw))
        return self._ordered(
            body.model_id,
            body.seq_id,
            operation,
            lambda saved: {"path": saved.path, "type": "save_weights"},
        )

    async def save_weights_for_sampler(self, request: Request) -> Response:
        raw = await request.body()
        with self._turn_taken(raw):
            body = await read_body(request, SaveForSamplerBody)
            if body.kind != "snapshot":
                raise wrong(
                    f"weights to sample from were to be saved as {body.kind[:50]!r}, but this "
                    "service gives each sampling client the weights of its moment. Leave kind out.",
                    "kind",
                )
        self.host.model(body.model_id)
        operation = Operation(lambda: self.host.save_for_sampler(body), digest_of(raw))

        def told(saved: Any) -> dict[str, Any]:
            checkpoint, sampler = saved
            return {
                "path": checkpoint.path if sampler is None else None,
                "sampling_session_id": sampler,
                "type": "save_weights_for_sampler",
            }

        return self._ordered(body.model_id, body.seq_id, operation, told)

    # ---- sampling

    async def create_sampling_session(self, request: Request) -> Response:
        body = await read_body(request, SamplingSessionBody)
        session = self.host.session(body.session_id)
        source = self.host.source(body.base_model, body.model_path)
        name = self.host.add_sampler(session, source)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def join_sampling_session(self, request: Request) -> Response:
        name = (await read_body(request, JoinBody)).sampling_session_id
        return JSONResponse({"client_counter": self.host.join_sampler(name)})

    async def asample(self, request: Request) -> Response:
        body = await read_body(request, SampleBody)
        planned = self.host.plan_sample(body)
        operation = Operation(
            lambda: None,
            group=planned.source.key,
            item=planned,
            together=self.host.samplers.answer,
        )
        session, number = body.sampling_session_id, body.seq_id
        name = f"sample:{session}:{number}" if session else f"sample:{uuid.uuid4().hex}"
        if not self.promises.knows(name):
            self.host.work.submit(operation)
            self.promises.add(name, operation, tell_protobuf)
        ids = [f"{name}:{index}" for index in range(body.num_samples)]
        return JSONResponse({"request_id": name, "sample_sequence_ids": ids})

    async def retrieve_future(self, request: Request) -> Response:
        return await self.promises.answer((await read_body(request, FutureBody)).request_id)

    # ---- promises

    def _promise(
        self, name: str, operation: Operation, tell: Callable[[Any], dict[str, Any]]
    ) -> Response:
        if not self.promises.knows(name):
            self.host.work.submit(operation)
            self.promises.add(name, operation, lambda result: JSONResponse(tell(result)))
        return JSONResponse({"request_id": name})

    def _ordered(
        self,
        model_id: str,
        seq_id: int,
        operation: Operation,
        tell: Callable[[Any], dict[str, Any]],
    ) -> Response:
        return self._in_order(
            model_id, seq_id, operation, lambda result: JSONResponse(tell(result))
        )

    @contextmanager
    def _turn_taken(self, raw: bytes) -> Iterator[None]:
        """Give a request that is refused its turn, for the SDK counts it; later ones would wait."""
        try:
            yield
        except ApiError:
            with suppress(ApiError):
                given = parse_json(raw)
                given = given if isinstance(given, dict) else {}
                name, number = given.get("model_id"), given.get("seq_id")
                if isinstance(name, str) and isinstance(number, int) and number > 0:
                    turn = Operation(lambda: None, digest_of(raw))
                    self.host.work.submit_ordered(name, number, turn, may_be_early=True)
            raise

    def _in_order(
        self, model_id: str, seq_id: int, operation: Operation, tell: Callable[[Any], Response]
    ) -> Response:
        try:
            known = self.host.work.submit_ordered(model_id, seq_id, operation, may_be_early=True)
        except ApiError as error:
            # The SDK would repeat a conflict for minutes.
            if error.status == 409:
                raise wrong(str(error), code=error.code) from error
            raise
        name = f"{model_id}:{seq_id}"
        self.promises.add(name, known, tell)
        return JSONResponse({"request_id": name, "model_id": model_id})


# ---- results that clients poll for


@dataclass
class Promise:
    """A result to come.

    Attributes
    ----------
    tell : Callable
        Turns the result into an answer.
    made_at : float
        Time of the request, `time.monotonic`.
    """

    operation: Operation
    tell: Callable[[Any], Response]
    made_at: float = field(default_factory=time.monotonic)


class Promises:
    """All results to come and those of the last hour."""

    def __init__(self) -> None:
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, name: str, operation: Operation, tell: Callable[[Any], Response]) -> None:
        """Promise the result of an operation; a second time, of a repeated request, is fine."""
        with self._lock:
            self._promises.setdefault(name, Promise(operation, tell))
            oldest = time.monotonic() - SECONDS_KEPT
            while self._promises:
                first, promise = next(iter(self._promises.items()))
                is_old = promise.made_at < oldest or len(self._promises) > MAX_KEPT
                if not (is_old and promise.operation.future.done()):
                    break
                self._promises.pop(first)

    def knows(self, name: str) -> bool:
        """Whether a result was promised under a name."""
        with self._lock:
            return name in self._promises

    async def answer(self, name: str) -> Response:
        """The result, an error in the form that the SDK raises, or that it takes longer."""
        with self._lock:
            promise = self._promises.get(name)
        if promise is None:
            return failure(
                f"the result of the request {name[:100]!r} was asked for, but this service does "
                "not know it: it was started anew since, or the result is older than an hour. "
                "Make a client from a saved state, create_training_client_from_state_with_"
                "optimizer, and go on from there.",
                "server",
            )
        waited = asyncio.shield(asyncio.wrap_future(promise.operation.future))
        try:
            result = await asyncio.wait_for(waited, SECONDS_TO_WAIT)
        except TimeoutError:
            body = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(body, 408)
        except ApiError as error:
            return failure(str(error), "user" if error.status < 500 else "server")
        return promise.tell(result)


def failure(message: str, category: str) -> Response:
    """A failed request, as the SDK turns it into its RequestFailedError."""
    return JSONResponse({"error": message, "category": category})


def tell_protobuf(result: bytes) -> Response:
    """A message of the SDK's."""
    return Response(result, media_type=PROTOBUF)


def digest_of(body: bytes) -> str:
    """Tells a repeated request from another one."""
    return hashlib.sha256(body).hexdigest()


# ---- runs, checkpoints and sessions


def _refusal(path: str, reason: str) -> Any:
    async def refuse() -> Response:
        raise wrong(
            f"{path} was asked for, which this service does not offer: {reason}. The guide "
            "training-on-services lists what it offers.",
            code="not_offered",
        )

    return refuse


class _RestRoutes:
    def __init__(self, host: TinkerHost) -> None:
        self.host = host

    async def capabilities(self) -> Response:
        models = [
            {
                "model_name": name,
                "max_context_length": self.host.bases.get(name).context_window,
                "trainable": True,
                "sampleable": True,
            }
            for name in self.host.bases.names
        ]
        return JSONResponse({"supported_models": models})

    async def weights_info(self, request: Request) -> Response:
        path = (await read_body(request, WeightsInfoBody)).tinker_path
        record = self.host.store.run(self.host.store.find(path).run_id)
        return JSONResponse(
            {
                "base_model": record.base_model,
                "is_lora": True,
                "lora_rank": record.lora.rank,
                "train_unembed": record.lora.train_unembed,
                "train_mlp": record.lora.train_mlp,
                "train_attn": record.lora.train_attn,
            }
        )

    async def runs(self, limit: Limit = 20, offset: Offset = 0) -> Response:
        records = self.host.store.runs()
        shown = [self._told_run(record) for record in records[offset : offset + limit]]
        return JSONResponse(
            {"training_runs": shown, "cursor": _cursor(offset, limit, len(records))}
        )

    async def run(self, run_id: str) -> Response:
        return JSONResponse(self._told_run(self.host.store.run(run_id)))

    def _told_run(self, record: RunRecord) -> dict[str, Any]:
        saved = self.host.store.checkpoints(record.run_id)
        training, sampler = (
            [one.card() for one in saved if one.kind == kind] for kind in ("training", "sampler")
        )
        times = [record.created, *(one.created for one in saved)]
        return {
            "training_run_id": record.run_id,
            "base_model": record.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": record.lora.rank,
            "last_request_time": told_time(max(times)),
            "last_checkpoint": training[-1] if training else None,
            "last_sampler_checkpoint": sampler[-1] if sampler else None,
            "user_metadata": record.user_metadata,
        }

    async def of_run(self, run_id: str) -> Response:
        found = [one.card() for one in self.host.store.checkpoints(run_id)]
        return JSONResponse({"checkpoints": found, "cursor": None})

    async def checkpoints(self, limit: Limit = 100, offset: Offset = 0) -> Response:
        store = self.host.store
        found = [one for record in store.runs() for one in store.checkpoints(record.run_id)]
        found.sort(key=lambda one: -one.created)
        shown = [one.card() for one in found[offset : offset + limit]]
        return JSONResponse({"checkpoints": shown, "cursor": _cursor(offset, limit, len(found))})

    async def delete(self, run_id: str, kind: str, name: str) -> Response:
        self.host.store.delete(self.host.store.get(run_id, f"{kind}/{name}"))
        return Response(status_code=204)

    async def set_ttl(self, request: Request, run_id: str, kind: str, name: str) -> Response:
        seconds = (await read_body(request, TtlBody)).ttl_seconds
        self.host.store.set_ttl(self.host.store.get(run_id, f"{kind}/{name}"), seconds)
        return Response(status_code=204)

    async def sessions(self, limit: Limit = 20, offset: Offset = 0) -> Response:
        names: Sequence[str] = list(self.host.sessions)[::-1]
        return JSONResponse({"sessions": names[offset : offset + limit]})

    async def session(self, name: str) -> Response:
        session = self.host.session(name)
        return JSONResponse(
            {
                "training_run_ids": session.model_ids,
                "sampler_ids": session.sampler_ids,
                **session.about,
            }
        )

    async def sampler(self, name: str) -> Response:
        source = self.host.sampler(name)
        path = None if source.checkpoint is None else source.checkpoint.path
        # The SDK loads the tokenizer by this name.
        base_model = source.base.tokenizer_source
        return JSONResponse({"sampler_id": name, "base_model": base_model, "model_path": path})


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}
