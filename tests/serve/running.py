"""Services within the test's process, each on its own port."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import uvicorn
from starlette.types import ASGIApp

from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.parameters.content import content_root
from nip_astra.serve import job_runner
from nip_astra.serve.app import Service, http_config, open_service, open_training
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.server import open_socket
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.utils.children import Child

POCKET = content_root() / "scenarios" / "pocket_chat" / "models"
POLICY = content_root() / "scenarios" / "arithmetic" / "models" / "policy"


@contextmanager
def answering(app: ASGIApp, listening: Any) -> Iterator[None]:
    """Answer requests in a thread within the block."""
    config = http_config(app)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class Running(Service):
    """A text service that answers, with its models and their address."""

    root: str
    served_models: ServedModels

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


@contextmanager
def running(models: dict[str, str], **settings: Any) -> Iterator[Running]:
    """Serve models within the block."""
    with (
        tempfile.TemporaryDirectory() as state,
        open_socket(ServiceSettings(port=settings.pop("port", 0))) as listening,
    ):
        settings = {"port": listening.getsockname()[1], "state_dir": state, **settings}
        given = ServiceSettings(**settings)
        limits = EngineLimits(max_rows=given.max_rows)
        served_models = ServedModels(device=torch.device("cpu"), limits=limits)
        served_models.add_all(models)
        with open_service(served_models, given) as service, answering(service.app, listening):
            yield Running(**vars(service), root=given.root_url, served_models=served_models)


def pocket_service(port: int = 0) -> AbstractContextManager[Running]:
    """Serve the target of pocket_chat within the block, under its scenarios' name."""
    return running({"pocket": str(POCKET / "target")}, port=port)


class TrainingServer:
    """A training service that can be stopped and restarted at the same address."""

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
        settings = ServiceSettings(port=self.port, **self.settings)
        self._open = ExitStack()
        opened = open_training(self.models, settings, self.protocols)
        self.app = self._open.enter_context(opened)
        self._open.enter_context(answering(self.app, listening))

    def stop(self) -> None:
        self._open.close()


@contextmanager
def training_server(
    protocols: Sequence[TrainingProtocol], models: dict[str, str] | None = None, **settings: object
) -> Iterator[TrainingServer]:
    """Train models for clients within the block."""
    with tempfile.TemporaryDirectory() as state:
        given = {"state_dir": state, **settings}
        server = TrainingServer(models or {"policy": str(POLICY)}, protocols, given)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def train_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train jobs in their runner's thread, not in processes that import torch."""

    def run_here(name: str, arguments: Sequence[str], **_: object) -> Child:
        code = job_runner.main(*arguments[-2:])
        return Child(name, os.getpid(), SimpleNamespace(poll=lambda: code))  # type: ignore[arg-type]

    signals = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    monkeypatch.setattr(job_runner, "start_program", run_here)
    monkeypatch.setattr(job_runner, "signal", signals)
