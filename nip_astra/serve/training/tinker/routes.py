"""The routes of Tinker's protocol that train and sample."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nip_astra.serve.api_errors import ApiError, wrong
from nip_astra.serve.bodies import parse_json, read_body
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
)
from nip_astra.serve.training.tinker.futures import Promises, digest_of, tell_protobuf
from nip_astra.serve.training.tinker.host import TinkerHost
from nip_astra.serve.training.tinker.messages import read_forward_backward, read_head
from nip_astra.serve.training.work import Operation


def tinker_routes(host: TinkerHost) -> APIRouter:
    """The routes over what a host holds."""
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
        base = model.hosted.base
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
