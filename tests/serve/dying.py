"""A service that trains models, in its own process that is killed during its work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.services.training import LocalTrainingService
from nip_astra.serve.app import open_training
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.training import HostedModel
from tests.serve.running import POLICY


class _Death:
    """Kills this process during an operation, once a state was saved."""

    def __init__(self) -> None:
        self.num_saved = 0
        save = LocalTrainingService.save_state

        def counted(service: LocalTrainingService, directory: Path) -> None:
            save(service, directory)
            self.num_saved += 1

        LocalTrainingService.save_state = counted  # type: ignore[method-assign, assignment]

    def come(self) -> None:
        if self.num_saved:
            os.kill(os.getpid(), signal.SIGKILL)

    def in_forward_backward(self) -> None:
        """Gradients are added, and no client is informed."""
        whole = HostedModel.gradients_or_none

        @contextmanager
        def dying(model: HostedModel) -> Iterator[None]:
            with whole(model):
                yield
                self.come()

        HostedModel.gradients_or_none = dying  # type: ignore[method-assign, assignment]

    def in_sample(self) -> None:
        """Tokens are drawn, and no client is informed."""
        for name in ("generate", "complete"):
            self._after(HuggingFaceLanguageModel, name)

    def in_save(self) -> None:
        """The weights are written, but not yet the optimizer."""
        self._after(HuggingFaceLanguageModel, "save")

    def _after(self, kind: type, name: str) -> None:
        call: Callable[..., Any] = getattr(kind, name)

        def dying(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            self.come()
            return result

        setattr(kind, name, dying)


DEATHS: dict[str, Callable[[_Death], None]] = {
    "forward_backward": _Death.in_forward_backward,
    "sample": _Death.in_sample,
    "save": _Death.in_save,
}


def _serve(
    listening: socket.socket, protocol: TrainingProtocol, state_dir: str, dies_in: str
) -> None:
    DEATHS[dies_in](_Death())
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
