"""Starting and stopping of a text service in its own process, which runs this module."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from nip_astra.errors import NipAstraError
from nip_astra.language_models.services.service_process import SECONDS_TO_START, ServiceProcess
from nip_astra.serve.server import serve
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.tracking.run_directory import write_atomically


class LocalService(ServiceProcess):
    """A text service in its own process; also a context manager that stops it.

    The process ends with the one that started it, however that ends.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    settings : ServiceSettings, optional
        Address, by default a free port of this machine, and limits. Without a `state_dir` its
        files, jobs and trained models are deleted when it stops.
    num_threads : int, optional
        CPU threads.
    protocols : Sequence[TrainingProtocol]
        Protocols by which clients train the models, "http" and "tinker"; without one, the models
        generate text.
    """

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
        super().__init__(
            models,
            settings.to_dict(),
            num_threads=num_threads,
            protocols=protocols,
            seconds_to_start=seconds_to_start,
        )


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


# ---- the process

_starter_ended = threading.Event()


def main(order: str) -> int:
    """Serve the JSON `order` of `ServiceProcess` until a signal, or until the starter ends."""
    options = json.loads(order)
    logging.basicConfig(level=logging.WARNING)
    # Before the imports below, which take seconds: the starter may end meanwhile.
    threading.Thread(target=_end_with_starter, name="starter watch", daemon=True).start()
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    if options["num_threads"] is not None:
        torch.set_num_threads(options["num_threads"])
    protocols = options["protocols"]
    address_file = Path(options["address_file"])

    def report_address(settings: ServiceSettings) -> None:
        # Tinker's clients and ours append the whole path, OpenAI's what follows /v1.
        url = settings.root_url if protocols else settings.base_url
        # Atomically: the starter polls for this file, and reads it as soon as it exists.
        write_atomically(address_file, json.dumps({"base_url": url, "pid": os.getpid()}))

    try:
        settings = ServiceSettings(**options["settings"])
        serve(options["models"], settings, on_start=report_address, protocols=protocols)
    except NipAstraError as error:
        sys.stderr.write(f"{str(error).replace(os.linesep, ' ')}\n")
        return 2
    finally:
        if _starter_ended.is_set():
            # The starter can no longer remove its folder.
            shutil.rmtree(address_file.parent, ignore_errors=True)
    return 0


def _end_with_starter() -> None:
    """Wait until the starter closes its end of the pipe on stdin, which also its death does."""
    while os.read(0, 1024):
        pass
    _starter_ended.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
