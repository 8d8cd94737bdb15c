"""A text service within the test's process, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from nip_astra.serve.app import build_app
from nip_astra.serve.engine import EngineLimits
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.shelf import Shelf

POCKET = Path(__file__).resolve().parents[2] / "scenarios" / "pocket_chat" / "models"


class Running:
    """A service that runs.

    Attributes
    ----------
    base_url : str
        What a client is given.
    shelf : Shelf
        Its models.
    """

    def __init__(self, base_url: str, shelf: Shelf) -> None:
        self.base_url, self.shelf = base_url, shelf

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")


@contextmanager
def running(models: dict[str, str], **settings: object) -> Iterator[Running]:
    """Serve models within the block."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    given = ServiceSettings(port=port, **settings)  # type: ignore[arg-type]
    limits = EngineLimits(max_rows=given.max_rows)
    shelf = Shelf(device=torch.device("cpu"), limits=limits)
    shelf.add_all(models)
    config = uvicorn.Config(build_app(shelf, given), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{port}/v1", shelf)
    finally:
        server.should_exit = True
        thread.join()
