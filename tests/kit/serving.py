"""HTTP servers on the loopback interface, for tests of clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler, bytes], None]
"""Sends the response to a request with a body."""


class Server(ThreadingHTTPServer):
    # The class's default of 5 would refuse some of a level's simultaneous connections.
    request_queue_size = 1024
    daemon_threads = True


@contextmanager
def serving(answer: Answer, *, port: int = 0) -> Iterator[str]:
    """Answer requests within the block; yields the server's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def wait_until(is_so: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for a condition, at most some seconds."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)
