"""Start a text service in a process of its own, and stop it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from nip_astra.errors import ServiceError
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol

logger = logging.getLogger(__name__)

SECONDS_TO_START = 180.0
"""Loading models takes most of it."""
SECONDS_TO_STOP = 15.0
"""After a signal; then the process is killed."""


class LocalService:
    """A text service in a process of its own; also a context manager that stops it.

    The process ends with the one that started it, however that ends.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    settings : ServiceSettings, optional
        Where it listens, if not on a free port of this machine, and its limits. Without a
        `state_dir` its files, jobs and trained models are gone when it is stopped.
    num_threads : int, optional
        CPU cores that it computes with.
    protocols : Sequence[TrainingProtocol]
        By which clients train the models, "http" and "tinker"; without one, the models answer
        texts.

    Attributes
    ----------
    base_url : str
        What a client is given, for instance `http://127.0.0.1:41234/v1`, or the same without
        `/v1` for one that trains.
    """

    base_url: str

    def __init__(
        self,
        models: Mapping[str, str],
        settings: ServiceSettings | None = None,
        *,
        num_threads: int | None = None,
        protocols: Sequence[TrainingProtocol] = (),
        seconds_to_start: float = SECONDS_TO_START,
    ) -> None:
        settings = settings or ServiceSettings(port=0)
        self._folder = tempfile.TemporaryDirectory(prefix="nip-astra-serve-")
        if settings.state_dir is None:
            state = str(Path(self._folder.name) / "state")
            settings = settings.model_copy(update={"state_dir": state})
        told = Path(self._folder.name) / "service.json"
        self._log = Path(self._folder.name) / "log.txt"
        order = {
            "models": {name: str(path) for name, path in models.items()},
            "settings": settings.to_dict(),
            "num_threads": num_threads,
            "protocols": list(protocols),
            "told": str(told),
        }
        with self._log.open("wb") as log:
            # The pipe closes when this process ends, and that ends the service.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nip_astra.serve.process", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        try:
            self.base_url = self._wait_until_told(told, seconds_to_start)
        except BaseException:
            self.stop()
            raise

    def _wait_until_told(self, told: Path, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not told.exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                what = f"did not start within {seconds:.0f} s" if code is None else "ended at once"
                last = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise ServiceError(
                    f"a text service was to be started, but {what}: {last or 'it said nothing'}. "
                    "Try its models with nip-astra serve, which shows what is wrong."
                )
            time.sleep(0.02)
        return str(json.loads(told.read_text())["base_url"])

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the service's process."""
        return self._process.pid

    def log(self) -> str:
        """What the service has said so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def stop(self) -> None:
        """End the service; nothing happens where it has ended already."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                logger.warning("the text service did not end when asked to, and is killed")
                self._process.kill()
                self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()

    def __enter__(self) -> LocalService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start_service(
    models: Mapping[str, str],
    settings: ServiceSettings | None = None,
    *,
    num_threads: int | None = None,
    protocols: Sequence[TrainingProtocol] = (),
) -> LocalService:
    """Start a text service on a free port and wait until it answers.

    For instance, with a model that a scenario ships:

        with start_service({"target": "scenario://pocket_chat/models/target"}) as service:
            client = openai.OpenAI(base_url=service.base_url, api_key="any")

    Raises
    ------
    ServiceError
        When it cannot be started.
    """
    return LocalService(models, settings, num_threads=num_threads, protocols=protocols)
