"""A text service within the test's process, on a port of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import uvicorn

from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.serve import job_runner
from nip_astra.serve.app import Service, http_config, open_service
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.server import open_socket
from nip_astra.serve.settings import ServiceSettings

POCKET = Path(__file__).resolve().parents[2] / "scenarios" / "pocket_chat" / "models"


class Running:
    """A service that runs.

    Attributes
    ----------
    base_url : str
        What a client is given.
    served_models : ServedModels
        Its models.
    store : JobStore
        Its files and jobs.
    completions : CompletionStore
        The log of what it answered.
    app : FastAPI
        Its routes.
    runner : JobRunner
        Runs its jobs.
    """

    def __init__(self, base_url: str, served_models: ServedModels, service: Service) -> None:
        self.base_url, self.served_models, self.store = base_url, served_models, service.store
        self.completions, self.app = service.completions, service.app
        self.runner = service.runner

    @property
    def root(self) -> str:
        return self.base_url.removesuffix("/v1")


@contextmanager
def running(models: dict[str, str], **settings: object) -> Iterator[Running]:
    """Serve models within the block."""
    listening = open_socket(ServiceSettings(port=0))
    port = listening.getsockname()[1]
    with tempfile.TemporaryDirectory() as state:
        given = ServiceSettings(**{"port": port, "state_dir": state, **settings})
        served_models = ServedModels(
            device=torch.device("cpu"), limits=EngineLimits(max_rows=given.max_rows)
        )
        served_models.add_all(models)
        with open_service(served_models, given) as service:
            server = uvicorn.Server(http_config(service.app))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
            thread.start()
            while not server.started:
                time.sleep(0.01)
            try:
                url = f"http://127.0.0.1:{port}/v1"
                yield Running(url, served_models, service)
            finally:
                server.should_exit = True
                thread.join()


class _Finished:
    """A job's process that has ended: its work was done in this process."""

    pid = os.getpid()

    def __init__(self, command: Sequence[str], **_: object) -> None:
        self.code = job_runner.main(*command[-2:])

    def poll(self) -> int:
        return self.code


def train_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train jobs in the thread of their runner, not in processes that import torch."""
    popen = SimpleNamespace(Popen=_Finished, DEVNULL=subprocess.DEVNULL)
    signals = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    monkeypatch.setattr(job_runner, "subprocess", popen)
    monkeypatch.setattr(job_runner, "signal", signals)
