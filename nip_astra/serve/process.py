"""The process behind `start_service`: serves until it is told to end, or its starter is gone."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from nip_astra.errors import NipAstraError
from nip_astra.serve.settings import ServiceSettings

_starter_is_gone = threading.Event()


def main(order: str) -> int:
    """Serve what the order describes.

    Parameters
    ----------
    order : str
        JSON: models, settings, num_threads, protocols and the file to tell the address in.
    """
    given = json.loads(order)
    logging.basicConfig(level=logging.WARNING)
    threading.Thread(target=_end_with_starter, name="starter watch", daemon=True).start()
    import torch
    import transformers

    from nip_astra.serve.server import serve

    transformers.utils.logging.disable_progress_bar()
    if given["num_threads"] is not None:
        torch.set_num_threads(given["num_threads"])

    protocols = given["protocols"]

    def address(settings: ServiceSettings) -> str:
        return settings.root_url if protocols else settings.base_url

    def tell(settings: ServiceSettings) -> None:
        told = Path(given["told"])
        written = told.with_suffix(".new")
        written.write_text(json.dumps({"base_url": address(settings), "pid": os.getpid()}))
        written.replace(told)

    try:
        settings = ServiceSettings(**given["settings"])
        serve(given["models"], settings, tell=tell, protocols=protocols)
    except NipAstraError as error:
        sys.stderr.write(f"{str(error).replace(os.linesep, ' ')}\n")
        return 2
    finally:
        if _starter_is_gone.is_set():
            # Nobody else removes its folder any more.
            shutil.rmtree(Path(given["told"]).parent, ignore_errors=True)
    return 0


def _end_with_starter() -> None:
    """Wait for the end of the pipe that the starter holds open."""
    while os.read(0, 1024):
        pass
    _starter_is_gone.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
