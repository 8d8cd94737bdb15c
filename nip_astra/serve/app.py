"""The applications: routes, guards, and errors that are JSON always; and what serves them."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.serve.api_errors import ApiError, error_body, wrong
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.guards import Guard
from nip_astra.serve.job_routes import job_routes
from nip_astra.serve.job_runner import JobRunner
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.text_routes import text_routes, to_response
from nip_astra.serve.training.bases import Bases
from nip_astra.serve.training.http_routes import training_routes
from nip_astra.serve.training.tinker.host import TinkerHost
from nip_astra.serve.training.tinker.messages import schema as require_messages
from nip_astra.serve.training.tinker.routes import tinker_routes
from nip_astra.serve.training.work import WorkQueue
from nip_astra.tracking.run_lock import run_lock
from nip_astra.utils.devices import resolve_device

logger = logging.getLogger(__name__)

TRAINING_PATHS = ("/training/", "/api/v1/")
TEXT_ROUTES = (
    "those of OpenAI's for models, completions, files and fine-tuning jobs, and vLLM's "
    "/inference/v1/generate"
)
TRAINING_ROUTES = {
    "http": "those under /training/v1/models",
    "tinker": "those of Tinker's under /api/v1",
}
SECONDS_TO_FINISH = 5
"""How long requests that are being answered may go on once the service is told to end."""
SECONDS_IDLE = 75
"""After which a connection without requests is closed. Clients keep theirs for a few seconds; one
that is closed just as it is used again costs an attempt."""


@dataclass
class Service:
    """An application with its jobs at work, and the log of what it answered."""

    app: FastAPI
    store: JobStore
    runner: JobRunner
    completions: CompletionStore


@contextmanager
def open_service(models: ServedModels, settings: ServiceSettings) -> Iterator[Service]:
    """Have the state folder to oneself and work on its jobs within the block.

    Raises
    ------
    ConfigurationError
        When the folder cannot be used, or another service has it.
    """
    folder = settings.state_folder()
    with _lock(folder):
        store = JobStore(folder)
        store.clear_unfinished()
        runner = JobRunner(store, models)
        completions = CompletionStore(folder)
        jobs = job_routes(store, runner, models, settings)
        routers = [text_routes(models, settings, completions), jobs]
        app = guarded_app(routers, settings, about=TEXT_ROUTES)
        runner.start()
        try:
            yield Service(app, store, runner, completions)
        finally:
            runner.close()
            models.close()
            completions.close()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = run_lock(folder)
        lock.__enter__()
    except (OSError, RunDirectoryError) as error:
        raise ConfigurationError(
            f"a text service was to keep its files and jobs in {folder}, but cannot: {error} Give "
            "it another folder: --state-dir DIR."
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


@contextmanager
def open_training(
    models: Mapping[str, str],
    settings: ServiceSettings,
    protocols: Collection[TrainingProtocol],
) -> Iterator[FastAPI]:
    """Load models, and work on what clients ask for within the block.

    Raises
    ------
    ModelLoadError
        When a model cannot be loaded.
    """
    if "tinker" in protocols:
        require_messages()
    bases = Bases(models, resolve_device(settings.device))
    work = WorkQueue(settings.max_waiting)
    routers: list[APIRouter] = []
    if "http" in protocols:
        routers.append(training_routes(bases, work, settings))
    if "tinker" in protocols:
        host = TinkerHost(bases, work, settings)
        routers.append(tinker_routes(host))
    about = " and ".join(TRAINING_ROUTES[name] for name in protocols)
    try:
        yield guarded_app(routers, settings, about=about)
    finally:
        work.close()


def guarded_app(routers: Sequence[APIRouter], settings: ServiceSettings, *, about: str) -> FastAPI:
    """Routes behind the guards, with errors that are JSON always.

    Parameters
    ----------
    about : str
        Which routes there are, for whoever asks for another one.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for router in routers:
        app.include_router(router)

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        return to_response(error)

    @app.exception_handler(ConfigurationError)
    async def refuse_request(_: Request, error: ConfigurationError) -> Response:
        # A number that the part which reads it refuses, as for operations that wait for their turn.
        return to_response(wrong(str(error), code="operation_refused"))

    @app.exception_handler(RequestValidationError)
    async def refuse_value(_: Request, error: RequestValidationError) -> Response:
        fault = error.errors()[0]
        name, given = str(fault["loc"][-1])[:100], ascii(fault.get("input"))[:80]
        text = f"{name} is {given}: {fault['msg']}. Give another value."
        return to_response(wrong(text, name, "invalid_value"))

    @app.exception_handler(HTTPException)
    async def refuse_route(request: Request, error: HTTPException) -> Response:
        text = (
            f"{request.method} {request.url.path[:200]} was asked for, but {error.detail}. The "
            f"routes are {about}."
        )
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return JSONResponse(error_body(text, kind), error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def leave(_: Request, error: Exception) -> Response:
        # Nobody reads it.
        return to_response(wrong("the connection ended before the whole request was sent."))

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> Response:
        logger.error("a request failed: %s", error, exc_info=error)
        text = "the service failed at this request; its log says why"
        return JSONResponse(error_body(text, "server_error"), 500)

    def max_bytes(path: str) -> int:
        if path.startswith(TRAINING_PATHS):
            return settings.max_message_bytes
        return settings.max_file_bytes if path == "/v1/files" else settings.max_body_bytes

    app.add_middleware(Guard, token=settings.token(), max_bytes=max_bytes)
    return app


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=_protocol(),
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
        timeout_keep_alive=SECONDS_IDLE,
    )


def _protocol() -> type[asyncio.Protocol]:
    """What reads HTTP: uvicorn's fastest that is installed, refusing in JSON."""
    name, kind = "h11_impl", "H11Protocol"
    if find_spec("httptools") is not None:
        name, kind = "httptools_impl", "HttpToolsProtocol"
    base = getattr(import_module(f"uvicorn.protocols.http.{name}"), kind)

    class JsonRefusals(base):  # type: ignore[misc, valid-type]
        """Answers what is no HTTP as the routes answer what is no request."""

        def send_400_response(self, msg: str) -> None:
            error = wrong(
                f"the connection was to bring a request, but it is no HTTP: {msg} Send HTTP/1.1.",
                code="invalid_http",
            )
            body = json.dumps(error.body).encode()
            head = (
                "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.transport.close()

    return JsonRefusals


class HttpServer(uvicorn.Server):
    """Ends by SIGINT or SIGTERM; the signal is not raised again afterwards, as uvicorn's would."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the open requests, or at once where Ctrl-C comes a second time."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
