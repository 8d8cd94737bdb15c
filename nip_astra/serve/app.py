"""The applications: routes behind a guard, errors in JSON, and the HTTP server."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.http_routes import training_routes
from nip_astra.serve.job_routes import job_routes
from nip_astra.serve.job_runner import JobRunner
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.requests import (
    ApiError,
    Guard,
    bad_request,
    internal_error,
    invalid_value,
)
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.text_routes import text_routes
from nip_astra.serve.tinker.host import TinkerHost
from nip_astra.serve.tinker.messages import schema as require_messages
from nip_astra.serve.tinker.routes import tinker_routes
from nip_astra.serve.tinker.store import CheckpointFolder
from nip_astra.serve.training import Bases, WorkQueue
from nip_astra.tracking.run_lock import run_lock
from nip_astra.utils.devices import resolve_device

logger = logging.getLogger(__name__)

TRAINING_PATHS = ("/training/", "/api/v1/")
"""Beginnings of the routes that take saved states, and so the largest bodies."""
TEXT_ROUTES = (
    "those of OpenAI for models, completions, files and fine-tuning jobs, and vLLM's "
    "/inference/v1/generate"
)
TRAINING_ROUTES = {
    "http": "those under /training/v1/models",
    "tinker": "those of Tinker under /api/v1",
}
CONVERSIONS = "converted"
"""Folder of the state with models of GGUF files as transformers saves them."""
SECONDS_TO_FINISH = 5
"""Maximum seconds for open requests after the signal that ends the service."""
SECONDS_IDLE = 75
"""Seconds after which an idle connection is closed. Clients keep theirs for a few seconds; a
connection closed while being reused costs an attempt."""


@contextmanager
def open_app(
    models: Mapping[str, str], settings: ServiceSettings, protocols: Collection[TrainingProtocol]
) -> Iterator[Starlette]:
    """Open the application of some models, with its threads running within the block."""
    if protocols:
        with open_training(models, settings, protocols) as app:
            yield app
        return
    max_cache_bytes = int(settings.max_cache_gib * (1 << 30))
    served_models = ServedModels(
        device=resolve_device(settings.device),
        dtype=settings.dtype,
        limits=EngineLimits(max_rows=settings.max_rows, max_cache_bytes=max_cache_bytes),
        conversions=settings.state_folder() / CONVERSIONS,
    )
    try:
        served_models.add_all(models)
        with open_service(served_models, settings) as service:
            yield service.app
    finally:
        served_models.close()


@dataclass
class Service:
    """An application with its jobs and its log of requests."""

    app: Starlette
    store: JobStore
    runner: JobRunner
    completions: CompletionStore


@contextmanager
def open_service(models: ServedModels, settings: ServiceSettings) -> Iterator[Service]:
    """Hold the state folder exclusively, and run its jobs within the block."""
    folder = settings.state_folder()
    with _lock_folder(folder, "files and jobs"):
        store = JobStore(folder)
        store.clear_unfinished()
        runner = JobRunner(store, models)
        completions = CompletionStore(folder)
        job_router = job_routes(store, runner, models, settings)
        text_router, direct = text_routes(models, settings, completions)
        app = guarded_app([text_router, job_router], settings, about=TEXT_ROUTES, direct=direct)
        runner.start()
        try:
            yield Service(app, store, runner, completions)
        finally:
            # The runner serves finished jobs among the models, and every answer is logged: close
            # the users first.
            runner.close()
            models.close()
            completions.close()


@contextmanager
def _lock_folder(folder: Path, use: str) -> Iterator[None]:
    """Hold a folder exclusively within the block; raise `ConfigurationError` if it is in use."""
    # Only the entry is within the try: an error of the block must not read as a busy folder.
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            stack.enter_context(run_lock(folder))
        except (OSError, RunDirectoryError) as error:
            raise ConfigurationError(
                f"cannot use {folder} for {use}: {error} Give another one: --state-dir DIR."
            ) from error
        yield


@contextmanager
def open_training(
    models: Mapping[str, str],
    settings: ServiceSettings,
    protocols: Collection[TrainingProtocol],
) -> Iterator[Starlette]:
    """Load models, and train them for clients within the block."""
    with ExitStack() as stack:
        if "tinker" in protocols:
            require_messages()
            token = settings.token()
            if token is not None and not token.startswith("tml-"):
                raise ConfigurationError(
                    f"the token in {settings.token_variable} does not begin with 'tml-', as "
                    "Tinker's SDK requires of every key. Give one that does."
                )
            # A text service may use the folder above.
            folder = settings.state_folder() / "tinker"
            stack.enter_context(_lock_folder(folder, "Tinker's checkpoints"))
            store = CheckpointFolder(folder)
            store.clear_unfinished()
        device = resolve_device(settings.device)
        bases = Bases(models, device, settings.state_folder() / CONVERSIONS)
        work = WorkQueue(settings.max_waiting)
        stack.callback(work.close)
        routers: list[APIRouter] = []
        if "http" in protocols:
            routers.append(training_routes(bases, work, settings))
        if "tinker" in protocols:
            routers.append(tinker_routes(TinkerHost(bases, work, settings, store)))
        about = " and ".join(TRAINING_ROUTES[name] for name in protocols)
        yield guarded_app(routers, settings, about=about)


def guarded_app(
    routers: Sequence[APIRouter],
    settings: ServiceSettings,
    *,
    about: str,
    direct: Sequence[Route] = (),
) -> Starlette:
    """Return an application of routes behind the guard, with errors in OpenAI's format.

    Parameters
    ----------
    about : str
        Description of the routes, for the answer to an unknown path.
    direct : Sequence[Route]
        The most frequent routes, reached without FastAPI's layers.
    """

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def answer_error(request: Request, error: Exception) -> Response:
        return _as_api_error(request, error, about).response()

    def max_bytes(path: str) -> int:
        if path.startswith(TRAINING_PATHS):
            return settings.max_message_bytes
        if path == "/v1/files":
            return settings.max_file_bytes
        return settings.max_body_bytes

    # Starlette looks a handler up by the error's class, nearest base first. Both applications
    # need all of them: FastAPI's own would answer in its format, and the direct routes pass it by.
    handlers: dict[int | type[Exception], Callable[..., Coroutine[Any, Any, Response]]] = {
        ApiError: answer_error,
        ConfigurationError: answer_error,
        RequestValidationError: answer_error,
        HTTPException: answer_error,
        ClientDisconnect: answer_error,
        Exception: answer_error,
    }
    inner = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=handlers)
    for router in routers:
        inner.include_router(router)
    guard = Middleware(Guard, token=settings.token(), max_bytes=max_bytes)
    return Starlette(
        routes=[*direct, Route("/health", health), Mount("", inner)],
        exception_handlers=handlers,
        middleware=[guard],
    )


def _as_api_error(request: Request, error: Exception, about: str) -> ApiError:
    """Return the answer to a request that failed with an error."""
    match error:
        case ApiError():
            return error
        case ConfigurationError():
            # A value that only the code which uses it refuses, as in queued operations.
            return bad_request(str(error), code="operation_refused")
        case RequestValidationError():
            # FastAPI validates what is not in the body: parts of the path, headers, the query.
            fault = error.errors()[0]
            name = str(fault["loc"][-1])[:100]
            return invalid_value(name, fault.get("input"), fault["msg"])
        case HTTPException():
            # Raised by the router: an unknown path, or a method that the path does not have.
            route = f"{request.method} {request.url.path[:200]}"
            message = f"{route}: {error.detail}. The routes are {about}."
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            return ApiError(error.status_code, message, kind=kind)
        case ClientDisconnect():
            # Nobody reads it.
            return bad_request("the connection ended before the whole request was sent.")
    logger.error("a request failed: %s", error, exc_info=error)
    return internal_error("the request failed in the service; see its log.")


def http_config(app: ASGIApp) -> uvicorn.Config:
    """Return the server's configuration."""
    return uvicorn.Config(
        app,
        http=_http_protocol(),
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        # Any client could forge a proxy's headers.
        proxy_headers=False,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
        timeout_keep_alive=SECONDS_IDLE,
    )


def _http_protocol() -> type[asyncio.Protocol]:
    """Return uvicorn's fastest installed HTTP parser, refusing in JSON."""
    if find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Parser
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as Parser  # type: ignore[assignment]

    class JsonRefusals(Parser):  # type: ignore[misc]
        # uvicorn calls it for bytes that are not HTTP, before any application is reached.
        def send_400_response(self, msg: str) -> None:
            error = bad_request(f"this is not HTTP: {msg} Send HTTP/1.1.", code="invalid_http")
            body = json.dumps(error.body).encode()
            head = (
                "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return JsonRefusals


class HttpServer(uvicorn.Server):
    """Ends by SIGINT or SIGTERM, without raising the signal again as uvicorn does.

    A raised signal would end the process before models, jobs and the state folder are closed.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the open requests, or at once at a second Ctrl-C."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
