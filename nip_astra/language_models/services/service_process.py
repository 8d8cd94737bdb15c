"""A text service in a separate process, started by a user or by a chat model."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.utils.children import start_program

logger = logging.getLogger(__name__)

SECONDS_TO_START = 180.0
"""Maximum start time, most of which is loading models."""
SECONDS_TO_STOP = 15.0
"""Seconds after the signal until the process is killed."""


class ServiceProcess:
    """A text service in its own process; see `nip_astra.serve.LocalService` for the parameters.

    Signals to the terminal's process group do not reach it, so that an interrupted run can finish
    its step.

    Attributes
    ----------
    base_url : str
        Address for clients, for instance `http://127.0.0.1:41234/v1`, without `/v1` for training.
    """

    base_url: str

    def __init__(
        self,
        models: Mapping[str, str],
        settings: Mapping[str, Any],
        *,
        num_threads: int | None = None,
        protocols: Sequence[str] = (),
        seconds_to_start: float = SECONDS_TO_START,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nip-astra-serve-")
        state = settings.get("state_dir") or str(Path(self._folder.name) / "state")
        address_file = Path(self._folder.name) / "service.json"
        self._log = Path(self._folder.name) / "log.txt"
        order = {
            "models": {name: str(path) for name, path in models.items()},
            "settings": {**settings, "state_dir": state},
            "num_threads": num_threads,
            "protocols": list(protocols),
            "address_file": str(address_file),
        }
        # The pipe closes when this process ends, and that ends the service.
        self._process = start_program(
            "a text service",
            ["-m", "nip_astra.serve.local_service", json.dumps(order)],
            log=self._log,
            stdin=subprocess.PIPE,
        )
        try:
            self.base_url = self._wait_for_address(address_file, seconds_to_start)
        except BaseException:
            self.stop()
            raise

    def _wait_for_address(self, address_file: Path, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        while not address_file.exists():
            is_alive = self.is_alive
            if not is_alive or time.monotonic() > deadline:
                reason = f"did not start within {seconds:.0f} s"
                if not is_alive:
                    reason = f"its process {self._process.ending} at once"
                last_line = self.log().strip().rpartition("\n")[2]
                raise ServiceError(
                    f"cannot start a text service: {reason}: {last_line or 'no output'}. "
                    "Start its models with nip-astra serve to see the cause."
                )
            time.sleep(0.02)
        return str(json.loads(address_file.read_text())["base_url"])

    @property
    def is_alive(self) -> bool:
        return self._process.code is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """Output of the service so far."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def stop(self) -> None:
        """Stop the service if it is running."""
        if not self._process.stop(SECONDS_TO_STOP):
            logger.warning("the text service did not end at the signal, and was killed")
        if self._process.program is not None and self._process.program.stdin is not None:
            self._process.program.stdin.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def digest_files(model: str) -> str:
    """Return a short text that changes with the files of a model; empty for a hub id."""
    path = Path(model)
    if path.is_dir():
        files = sorted(path.rglob("*"))
    elif path.exists():
        files = [path]
    else:
        files = []
    if not files:
        return ""
    # Size and time of each file: weights of gigabytes are not read for it.
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


_SHARED: weakref.WeakValueDictionary[tuple[str, str, str], OwnService] = (
    weakref.WeakValueDictionary()
)


class OwnService:
    """A service of one model that starts on first use and stops with its last user."""

    def __init__(self, name: str, weights: str, device: str) -> None:
        self.name, self.weights, self.device = name, weights, device
        self._process: ServiceProcess | None = None
        self._lock = threading.Lock()

    @classmethod
    def shared(cls, name: str, weights: str, device: str) -> OwnService:
        """Return this process's service for a model."""
        key = (name, weights, device)
        service = _SHARED.get(key)
        if service is None:
            service = cls(name, weights, device)
            _SHARED[key] = service
        return service

    @property
    def address(self) -> str | None:
        """Address of the service; None while it is not running."""
        process = self._process
        return process.base_url if process is not None and process.is_alive else None

    def start(self) -> str:
        """Start it if it is not running; return its address."""
        with self._lock:
            if self.address is None:
                if self._process is not None:
                    logger.warning("the service of %r has ended and is started again", self.name)
                    self._process.stop()
                settings = {"port": 0, "device": self.device}
                try:
                    self._process = ServiceProcess({self.name: self.weights}, settings)
                except ServiceError as error:
                    raise ConfigurationError(
                        f"the chat model {self.name!r} has service: local, but {error}"
                    ) from error
                weakref.finalize(self, self._process.stop)
                logger.info("serving %r at %s", self.name, self._process.base_url)
            assert self._process is not None
            return self._process.base_url

    def stop(self) -> None:
        """Stop it; the next use starts it again."""
        with self._lock:
            process = self._process
            self._process = None
        if process is not None:
            process.stop()
