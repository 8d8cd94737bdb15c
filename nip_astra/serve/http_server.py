"""uvicorn, whose every refusal is a JSON error, and which ends by a signal as a program ends."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from importlib import import_module
from importlib.util import find_spec
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from nip_astra.serve.api_errors import wrong

SECONDS_TO_FINISH = 5
"""How long requests that are being answered may go on once the service is told to end."""
SECONDS_IDLE = 75
"""After which a connection without requests is closed. Clients keep theirs for a few seconds; one
that is closed just as it is used again costs an attempt."""


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
