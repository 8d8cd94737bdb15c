"""A service that trains models, within the test's process, on a port of its own."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from nip_astra.serve.app import open_training
from nip_astra.serve.server import open_socket
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol

POLICY = Path(__file__).resolve().parents[3] / "scenarios" / "arithmetic" / "models" / "policy"


class Server:
    """A service that can be ended and started again at the same address."""

    def __init__(
        self, models: dict[str, str], protocols: Sequence[TrainingProtocol], settings: Any
    ) -> None:
        self.models, self.protocols, self.settings = models, protocols, settings
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listening = open_socket(ServiceSettings(port=self.port))
        self.port = listening.getsockname()[1]
        self._opened = open_training(
            self.models, ServiceSettings(port=self.port, **self.settings), self.protocols
        )
        self.app = self._opened.__enter__()
        config = uvicorn.Config(
            self.app, log_level="warning", access_log=False, timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]})
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._opened.__exit__(None, None, None)


@contextmanager
def training_server(
    protocols: Sequence[TrainingProtocol], models: dict[str, str] | None = None, **settings: object
) -> Iterator[Server]:
    """Train models for clients within the block."""
    with tempfile.TemporaryDirectory() as state:
        server = Server(
            models or {"policy": str(POLICY)}, protocols, {"state_dir": state, **settings}
        )
        server.start()
        try:
            yield server
        finally:
            server.stop()
