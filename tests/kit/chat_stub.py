"""A chat-completions service on the loopback interface that answers from a list."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.kit.serving import serving


@dataclass
class Reply:
    """The service's reply to a request; `cut_at` ends the connection after this many bytes.

    With `is_chunked` the length is not sent in advance, so a cut leaves half a stream.
    """

    status: int = 200
    content: str | None = None
    body: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    waits_for: threading.Event | None = None
    cut_at: int | None = None
    is_chunked: bool = False

    @property
    def payload(self) -> bytes:
        """The body as sent."""
        if self.body is not None:
            return self.body.encode()
        message = {"role": "assistant", "content": self.content}
        return json.dumps({"choices": [{"index": 0, "message": message}]}).encode()


def rating(value: Any, **more: Any) -> Reply:
    """A well-formed answer."""
    return Reply(content=json.dumps({"reason": "so it is", "rating": value, **more}))


class ChatStub:
    """The service; records its requests."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply]) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.base_url = ""
        self._lock = threading.Lock()

    def take(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        """Record a request and reply to it."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self.paths.append(path)
        return self.answer(body, number)


@contextmanager
def chat_stub(
    answer: Callable[[dict[str, Any], int], Reply] | list[Reply], *, port: int = 0
) -> Iterator[ChatStub]:
    """Serve replies: from a function of body and number of the request, or in sequence."""
    stub = ChatStub(answer if callable(answer) else lambda body, number: answer[number])

    def respond(request: BaseHTTPRequestHandler, body: bytes) -> None:
        headers = {name.title(): value for name, value in request.headers.items()}
        reply = stub.take(request.path, headers, json.loads(body))
        if reply.waits_for is not None:
            reply.waits_for.wait(timeout=30)
            request.close_connection = True
            return
        request.send_response(reply.status)
        for name, value in reply.headers.items():
            request.send_header(name, value)
        sent = reply.payload[: reply.cut_at]
        if reply.is_chunked:
            request.send_header("Transfer-Encoding", "chunked")
            end = b"" if reply.cut_at is not None else b"0\r\n\r\n"
            sent = f"{len(sent):x}\r\n".encode() + sent + b"\r\n" + end
        else:
            request.send_header("Content-Length", str(len(reply.payload)))
        request.end_headers()
        request.wfile.write(sent)
        request.close_connection = reply.cut_at is not None

    with serving(respond, port=port) as address:
        stub.base_url = f"{address}/v1"
        yield stub
