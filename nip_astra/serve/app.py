"""The application: routes, guards, and errors that are JSON always."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from nip_astra.errors import ConfigurationError
from nip_astra.serve.api_errors import ApiError, error_body, wrong
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.guards import Guard
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.shelf import Shelf
from nip_astra.serve.text_routes import text_routes, to_response

logger = logging.getLogger(__name__)


TRAINING_PATHS = ("/training/", "/api/v1/")
TEXT_ROUTES = (
    "those of OpenAI's for models, completions, files and fine-tuning jobs, and vLLM's "
    "/inference/v1/generate"
)


def build_app(
    shelf: Shelf,
    settings: ServiceSettings,
    completions: CompletionStore,
    *,
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """The service over the models of a shelf.

    Parameters
    ----------
    completions : CompletionStore
        Log of what is answered.
    routers : Sequence[APIRouter]
        Further routes.
    """
    return guarded_app(
        [text_routes(shelf, settings, completions), *routers], settings, about=TEXT_ROUTES
    )


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
