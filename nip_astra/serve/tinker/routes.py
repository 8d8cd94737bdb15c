"""The routes of Tinker's protocol."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nip_astra.serve.requests import (
    ApiError,
    Limit,
    bad_request,
    make_refusal,
    parse_json,
    read_body,
)
from nip_astra.serve.tinker.bodies import (
    CreateModelBody,
    FutureBody,
    HeartbeatBody,
    JoinBody,
    LoadBody,
    ModelIdBody,
    NumberedBody,
    OptimStepBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SaveForSamplerBody,
    SessionBody,
    TtlBody,
    WeightsInfoBody,
)
from nip_astra.serve.tinker.host import TinkerHost, name_model
from nip_astra.serve.tinker.messages import PROTOBUF, read_forward_backward, read_head
from nip_astra.serve.tinker.store import Checkpoint, RunRecord, iso_time
from nip_astra.serve.training import Operation

SECONDS_TO_WAIT = 25.0
"""Seconds after which a waiting client must poll again; the SDK waits 45."""
SECONDS_KEPT = 3600.0
"""Seconds for which a result waits for its client."""
SECONDS_DELIVERED = 120.0
"""Seconds for which a delivered result is kept, since its response may have been lost."""
MAX_KEPT = 50_000
Offset = Annotated[int, Query(ge=0, lt=1 << 31)]
Reply = dict[str, Any]
Numbered = TypeVar("Numbered", bound=NumberedBody)
NOT_OFFERED = {
    "/save_weights_external": "use save_weights_for_sampler of nip_astra's training services, or "
    "the adapter in the service's state folder",
    "/copy_weights": "this service has no projects",
    "/create_custom_loss": "the client computes custom losses, by forward_backward_custom",
    "/audit": "this service has no audit log",
    "/billing/usage/events": "this service has no billing",
    "/billing/usage/checkpoints/current": "this service has no billing",
    "/auth/token": "this service takes an API key",
    "/sessions/search": "use list_sessions",
    "/cancel_future": "queued requests are always answered",
    "/retrieve_futures": "request results one by one",
    "/sessions/{name}/project": "this service has no projects",
    "/sessions/{name}/trace_export": "this service has no traces",
}
"""Routes of the SDK that are refused, with the reason or the alternative."""
NOT_OFFERED_OF_CHECKPOINTS = {
    "publish": "this service has no accounts: every client may load every checkpoint",
    "external_weights_urls": "adapters are in the state folder of this service only",
}


def tinker_routes(host: TinkerHost) -> APIRouter:
    """Return the routes of the models, sessions and checkpoints of a host."""
    routes, rest = _TinkerRoutes(host), _RestRoutes(host)
    run, checkpoint = "/training_runs/{run_id}", "/checkpoints/{kind}/{name}"
    router = APIRouter(prefix="/api/v1")
    posts: dict[str, Callable[..., Any]] = {
        "/client/config": routes.client_config,
        "/client/dynamic_config": routes.client_config,
        "/create_session": routes.create_session,
        "/session_heartbeat": routes.heartbeat,
        "/sessions/{name}/finish": routes.finish,
        "/telemetry": routes.telemetry,
        "/create_model": routes.create_model,
        "/get_info": routes.get_info,
        "/forward_backward": routes.forward_backward,
        "/optim_step": routes.optim_step,
        "/save_weights": routes.save_weights,
        "/load_weights": routes.load_weights,
        "/save_weights_for_sampler": routes.save_weights_for_sampler,
        "/create_sampling_session": routes.create_sampling_session,
        "/join_sampling_session": routes.join_sampling_session,
        "/asample": routes.asample,
        "/retrieve_future": routes.retrieve_future,
        "/weights_info": rest.weights_info,
    }
    for path, handler in posts.items():
        router.add_api_route(path, handler, methods=["POST"])
    all_methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path, reason in NOT_OFFERED.items():
        refusal = make_refusal(partial(_not_offered, path, reason))
        router.add_api_route(path, refusal, methods=all_methods)
    for name, reason in NOT_OFFERED_OF_CHECKPOINTS.items():
        refusal = make_refusal(partial(_not_offered, name, reason))
        router.add_api_route(f"{run}{checkpoint}/{name}", refusal, methods=all_methods)
    # After the refused ones, which have fixed names in place of {name}.
    reads: dict[str, Callable[..., Any]] = {
        "/healthz": rest.health,
        "/get_server_capabilities": rest.capabilities,
        "/training_runs": rest.runs,
        run: rest.run,
        f"{run}/checkpoints": rest.run_checkpoints,
        "/checkpoints": rest.checkpoints,
        "/sessions": rest.sessions,
        "/sessions/{name}": rest.session,
        "/samplers/{name}": rest.sampler,
    }
    for path, read in reads.items():
        router.add_api_route(path, read, methods=["GET"])
    router.add_api_route(f"{run}{checkpoint}", rest.delete, methods=["DELETE"])
    router.add_api_route(f"{run}{checkpoint}/ttl", rest.set_ttl, methods=["PUT", "POST", "PATCH"])
    return router


class _TinkerRoutes:
    def __init__(self, host: TinkerHost) -> None:
        self.host = host
        self.promises = Promises()

    # ---- sessions

    async def client_config(self) -> Response:
        # This service uses the SDK's own defaults.
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
        # Accepted and dropped: the SDK would send it again.
        return JSONResponse({"status": "accepted"})

    # ---- models

    async def create_model(self, request: Request) -> Response:
        body = await read_body(request, CreateModelBody)
        model_id = name_model(body.session_id, body.model_seq_id)
        build = self.host.create(body)
        answer = {"type": "create_model", "model_id": model_id}
        return self._promise(f"create:{model_id}", Operation(build), lambda _: answer)

    async def load_weights(self, request: Request) -> Response:
        with self._number_used(await request.body()):
            body = await read_body(request, LoadBody)
            checkpoint = self.host.store.find(body.path)
        answer = {"path": body.path, "type": "load_weights"}
        if body.model_id is not None and body.seq_id is not None:
            model, with_optimizer = self.host.model(body.model_id), body.optimizer
            return await self._ordered(
                request,
                (body.model_id, body.seq_id),
                lambda: model.load(checkpoint, with_optimizer=with_optimizer),
                lambda _: {**answer, "model_id": body.model_id},
            )
        if body.session_id is None or body.model_seq_id is None:
            raise bad_request("give model_id and seq_id, or session_id and model_seq_id.")
        model_id = name_model(body.session_id, body.model_seq_id)
        build = self.host.create_from(body, body.session_id, body.model_seq_id)
        answer["model_id"] = model_id
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
                    "tokenizer_id": base.source,
                },
                "is_lora": True,
                "lora_rank": model.record.lora.rank,
                "model_name": base.name,
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        raw = await request.body()
        if request.headers.get("content-encoding"):
            raise bad_request("this service reads no compressed requests. Send it uncompressed.")
        number = read_head(raw)
        model = self.host.model(number[0])
        return await self._ordered(
            request, number, lambda: model.forward_backward(read_forward_backward(raw))
        )

    async def optim_step(self, request: Request) -> Response:
        body = await self._read_numbered(request, OptimStepBody)
        model = self.host.model(body.model_id)
        return await self._ordered(
            request,
            (body.model_id, body.seq_id),
            lambda: model.optim_step(body.adam_params),
            lambda metrics: {"metrics": metrics},
        )

    async def save_weights(self, request: Request) -> Response:
        body = await self._read_numbered(request, SaveBody)
        self.host.model(body.model_id)
        return await self._ordered(
            request,
            (body.model_id, body.seq_id),
            lambda: self.host.save(body),
            lambda saved: {"path": saved.path, "type": "save_weights"},
        )

    async def save_weights_for_sampler(self, request: Request) -> Response:
        body = await self._read_numbered(request, SaveForSamplerBody)
        self.host.model(body.model_id)

        def reply(saved: tuple[Checkpoint, str | None]) -> Reply:
            checkpoint, sampler = saved
            return {
                "path": checkpoint.path if sampler is None else None,
                "sampling_session_id": sampler,
                "type": "save_weights_for_sampler",
            }

        number = (body.model_id, body.seq_id)
        return await self._ordered(request, number, lambda: self.host.save_for_sampler(body), reply)

    # ---- sampling

    async def create_sampling_session(self, request: Request) -> Response:
        body = await read_body(request, SamplingSessionBody)
        session = self.host.session(body.session_id)
        name = self.host.add_sampler(session, self.host.source(body))
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
            argument=planned,
            run_together=self.host.samplers.answer,
        )
        session, number = body.sampling_session_id, body.seq_id
        name = f"sample:{session}:{number}" if session else f"sample:{uuid.uuid4().hex}"
        ids = [f"{name}:{index}" for index in range(body.num_samples)]
        return self._promise(name, operation, sample_sequence_ids=ids)

    async def retrieve_future(self, request: Request) -> Response:
        return await self.promises.answer((await read_body(request, FutureBody)).request_id)

    # ---- promises

    def _promise(
        self,
        name: str,
        operation: Operation,
        reply: Callable[[Any], Reply] | None = None,
        **fields: Any,
    ) -> Response:
        if not self.promises.knows(name):
            self.host.work.submit(operation)
            self.promises.add(name, operation, reply)
        return JSONResponse({"request_id": name, **fields})

    @contextmanager
    def _number_used(self, raw: bytes) -> Iterator[None]:
        """Use up the number of a refused request: the SDK counts it, and later ones would wait."""
        try:
            yield
        except ApiError:
            with suppress(ApiError):
                content = parse_json(raw)
                if isinstance(content, dict):
                    name, number = content.get("model_id"), content.get("seq_id")
                    if isinstance(name, str) and isinstance(number, int) and number > 0:
                        no_work = Operation(lambda: None, _digest(raw))
                        self.host.work.submit_ordered(name, number, no_work, may_be_early=True)
            raise

    async def _read_numbered(self, request: Request, kind: type[Numbered]) -> Numbered:
        with self._number_used(await request.body()):
            return await read_body(request, kind)

    async def _ordered(
        self,
        request: Request,
        number: tuple[str, int],
        run: Callable[[], Any],
        reply: Callable[[Any], Reply] | None = None,
    ) -> Response:
        """Queue an operation by model and number; a request of equal bytes is a repeated one."""
        model_id, seq_id = number
        operation = Operation(run, _digest(await request.body()))
        try:
            # For a repeated request, the operation of the first.
            operation = self.host.work.submit_ordered(
                model_id, seq_id, operation, may_be_early=True
            )
        except ApiError as error:
            # The SDK would repeat a conflict for minutes.
            if error.status == 409:
                raise bad_request(str(error), code=error.code) from error
            raise
        name = f"{model_id}:{seq_id}"
        self.promises.add(name, operation, reply)
        return JSONResponse({"request_id": name, "model_id": model_id})


# ---- results that clients poll for


@dataclass
class Promise:
    """A future result; `reply` converts it to JSON, None for a message of the SDK."""

    operation: Operation
    reply: Callable[[Any], Reply] | None
    made_at: float = field(default_factory=time.monotonic)


class Promises:
    """All future results, and recent ones."""

    def __init__(self) -> None:
        self._promises: OrderedDict[str, Promise] = OrderedDict()
        self._delivered: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def add(self, name: str, operation: Operation, reply: Callable[[Any], Reply] | None) -> None:
        """Promise the result of an operation, once per name."""
        with self._lock:
            self._promises.setdefault(name, Promise(operation, reply))
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop results that were delivered, or whose client does not come for them."""
        now = time.monotonic()
        while self._delivered:
            delivered_at, name = self._delivered[0]
            if delivered_at >= now - SECONDS_DELIVERED:
                break
            self._delivered.popleft()
            self._promises.pop(name, None)
        # Oldest first.
        while self._promises:
            name, promise = next(iter(self._promises.items()))
            is_old = promise.made_at < now - SECONDS_KEPT or len(self._promises) > MAX_KEPT
            if not (is_old and promise.operation.future.done()):
                break
            self._promises.pop(name)

    def knows(self, name: str) -> bool:
        with self._lock:
            return name in self._promises

    async def answer(self, name: str) -> Response:
        """Return the result, an error in the SDK's format, or a request to poll again."""
        with self._lock:
            promise = self._promises.get(name)
        if promise is None:
            return _failure(
                f"unknown request {name[:100]!r}: the service was restarted, or the result is too "
                "old. Continue from a saved state by "
                "create_training_client_from_state_with_optimizer.",
                "server",
            )
        try:
            result = await promise.operation.result(SECONDS_TO_WAIT)
            with self._lock:
                self._delivered.append((time.monotonic(), name))
        except TimeoutError:
            # The SDK polls again after 408.
            body = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(body, 408)
        except ApiError as error:
            return _failure(str(error), "user" if error.status < 500 else "server")
        if promise.reply is None:
            return Response(result, media_type=PROTOBUF)
        return JSONResponse(promise.reply(result))


def _failure(message: str, category: str) -> Response:
    """Return a failed request, which the SDK raises as RequestFailedError."""
    return JSONResponse({"error": message, "category": category})


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


# ---- runs, checkpoints and sessions


def _not_offered(path: str, reason: str) -> ApiError:
    message = f"this service does not offer {path}: {reason}. See the guide training-on-services."
    return bad_request(message, code="not_offered")


class _RestRoutes:
    def __init__(self, host: TinkerHost) -> None:
        self.host, self.store = host, host.store

    async def health(self) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self) -> Response:
        bases = self.host.bases
        models = [
            {
                "model_name": name,
                "max_context_length": bases.get(name).context_window,
                "trainable": True,
                "sampleable": True,
            }
            for name in bases.names
        ]
        return JSONResponse({"supported_models": models})

    async def weights_info(self, request: Request) -> Response:
        path = (await read_body(request, WeightsInfoBody)).tinker_path
        record = self.store.run(self.store.find(path).run_id)
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
        records = self.store.runs()
        page = [self._card(record) for record in records[offset : offset + limit]]
        cursor = _cursor(offset, limit, len(records))
        return JSONResponse({"training_runs": page, "cursor": cursor})

    async def run(self, run_id: str) -> Response:
        return JSONResponse(self._card(self.store.run(run_id)))

    def _card(self, record: RunRecord) -> Reply:
        checkpoints = self.store.checkpoints(record.run_id)
        # Oldest first, so the last one of each kind stays.
        last_by_kind = {checkpoint.kind: checkpoint for checkpoint in checkpoints}
        last_training = last_by_kind.get("training")
        last_sampler = last_by_kind.get("sampler")
        last_time = max([record.created, *(checkpoint.created for checkpoint in checkpoints)])
        return {
            "training_run_id": record.run_id,
            "base_model": record.base_model,
            "model_owner": "local",
            "is_lora": True,
            "corrupted": False,
            "lora_rank": record.lora.rank,
            "last_request_time": iso_time(last_time),
            "last_checkpoint": None if last_training is None else last_training.card(),
            "last_sampler_checkpoint": None if last_sampler is None else last_sampler.card(),
            "user_metadata": record.user_metadata,
        }

    async def run_checkpoints(self, run_id: str) -> Response:
        cards = [checkpoint.card() for checkpoint in self.store.checkpoints(run_id)]
        return JSONResponse({"checkpoints": cards, "cursor": None})

    async def checkpoints(self, limit: Limit = 100, offset: Offset = 0) -> Response:
        checkpoints: list[Checkpoint] = []
        for record in self.store.runs():
            checkpoints += self.store.checkpoints(record.run_id)
        # The newest first.
        checkpoints.sort(key=lambda checkpoint: -checkpoint.created)
        page = [checkpoint.card() for checkpoint in checkpoints[offset : offset + limit]]
        cursor = _cursor(offset, limit, len(checkpoints))
        return JSONResponse({"checkpoints": page, "cursor": cursor})

    async def delete(self, run_id: str, kind: str, name: str) -> Response:
        self.store.delete(self.store.get(run_id, f"{kind}/{name}"))
        return Response(status_code=204)

    async def set_ttl(self, request: Request, run_id: str, kind: str, name: str) -> Response:
        seconds = (await read_body(request, TtlBody)).ttl_seconds
        self.store.set_ttl(self.store.get(run_id, f"{kind}/{name}"), seconds)
        return Response(status_code=204)

    async def sessions(self, limit: Limit = 20, offset: Offset = 0) -> Response:
        names: Sequence[str] = list(self.host.sessions)[::-1]
        return JSONResponse({"sessions": names[offset : offset + limit]})

    async def session(self, name: str) -> Response:
        session = self.host.session(name)
        ids = {"training_run_ids": session.model_ids, "sampler_ids": session.sampler_ids}
        return JSONResponse({**ids, **session.about})

    async def sampler(self, name: str) -> Response:
        source = self.host.sampler(name)
        path = None if source.checkpoint is None else source.checkpoint.path
        # The SDK loads the tokenizer by this name.
        base_model = source.base.source
        return JSONResponse({"sampler_id": name, "base_model": base_model, "model_path": path})


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}
