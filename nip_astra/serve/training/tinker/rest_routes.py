"""The routes of Tinker's protocol that look at and look after what was trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nip_astra.serve.api_errors import wrong
from nip_astra.serve.bodies import MAX_LISTED, read_body
from nip_astra.serve.training.tinker.bodies import TtlBody, WeightsInfoBody
from nip_astra.serve.training.tinker.host import TinkerHost
from nip_astra.serve.training.tinker.store import RunRecord, told_time

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


def tinker_rest_routes(host: TinkerHost) -> APIRouter:
    """The routes over what a host holds."""
    routes = _RestRoutes(host)
    router = APIRouter(prefix="/api/v1")
    checkpoint = "/training_runs/{run_id}/checkpoints/{kind}/{name}"
    router.add_api_route("/get_server_capabilities", routes.capabilities, methods=["GET"])
    router.add_api_route("/weights_info", routes.weights_info, methods=["POST"])
    router.add_api_route("/training_runs", routes.runs, methods=["GET"])
    router.add_api_route("/training_runs/{run_id}", routes.run, methods=["GET"])
    router.add_api_route("/training_runs/{run_id}/checkpoints", routes.of_run, methods=["GET"])
    router.add_api_route(checkpoint, routes.delete, methods=["DELETE"])
    router.add_api_route(f"{checkpoint}/ttl", routes.set_ttl, methods=["PUT", "POST", "PATCH"])
    router.add_api_route("/checkpoints", routes.checkpoints, methods=["GET"])
    router.add_api_route("/sessions", routes.sessions, methods=["GET"])
    every = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    for path, reason in NOT_OFFERED.items():
        router.add_api_route(path, _refusal(path, reason), methods=every)
    for name, reason in NOT_OFFERED_OF_CHECKPOINTS.items():
        router.add_api_route(f"{checkpoint}/{name}", _refusal(name, reason), methods=every)
    for name in ("project", "trace_export"):
        reason = "this service has neither projects nor traces of sessions"
        router.add_api_route(f"/sessions/{{name}}/{name}", _refusal(name, reason), methods=every)
    # After those that are refused by name.
    router.add_api_route("/sessions/{name}", routes.session, methods=["GET"])
    router.add_api_route("/samplers/{name}", routes.sampler, methods=["GET"])
    return router


def _refusal(path: str, reason: str) -> Any:
    async def refuse() -> Response:
        raise wrong(
            f"{path} was asked for, which this service does not offer: {reason}. The guide "
            "coming-from-tinker lists what it does.",
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
