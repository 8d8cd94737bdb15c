"""A service that trains models, in its own process that is killed during its work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import uvicorn

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.serve.app import open_training
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.training import HostedModel
from tests.serve.running import POLICY

DEATHS: dict[str, list[tuple[type, str]]] = {
    "forward_backward": [(HostedModel, "gradients_or_none")],
    "sample": [(HuggingFaceLanguageModel, "generate"), (HuggingFaceLanguageModel, "complete")],
    "save": [(HuggingFaceLanguageModel, "save")],
}
"""Calls in which the service dies, once a state was saved: gradients are added, tokens are drawn,
or weights are written without their optimizer, and no client is informed."""


def _die_in(name: str) -> None:
    saved: list[bool] = []

    @contextmanager
    def dying(block: AbstractContextManager[None]) -> Iterator[None]:
        with block:
            yield
            die()

    def die() -> None:
        if saved:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(kind: type, method: str, then: Callable[[], None]) -> None:
        call: Callable[..., Any] = getattr(kind, method)

        def patched(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            if isinstance(result, AbstractContextManager):
                return dying(result)
            then()
            return result

        setattr(kind, method, patched)

    after(LocalTrainingService, "save_state", lambda: saved.append(True))
    for kind, method in DEATHS[name]:
        after(kind, method, die)


def _serve(
    listening: socket.socket, protocol: TrainingProtocol, state_dir: str, dies_in: str
) -> None:
    _die_in(dies_in)
    settings = ServiceSettings(port=listening.getsockname()[1], state_dir=state_dir)
    with open_training({"policy": str(POLICY)}, settings, [protocol]) as app:
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def dying_server(
    protocol: TrainingProtocol, state_dir: str, dies_in: str
) -> Iterator[tuple[int, Any]]:
    """The port, and the process, which lives until one of `DEATHS`."""
    # Forked from a process that has imported everything and run nothing.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        process = context.Process(target=_serve, args=(listening, protocol, state_dir, dies_in))
        process.start()
    try:
        yield port, process
    finally:
        process.kill()
        process.join()
