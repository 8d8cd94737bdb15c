"""Run the service: open the port, tell the address, serve until a signal, close."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

from nip_astra.errors import ConfigurationError
from nip_astra.serve.engine import EngineLimits
from nip_astra.serve.packages import require_packages
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.shelf import Shelf
from nip_astra.utils.devices import resolve_device

_BACKLOG = 1024


def serve(
    models: Mapping[str, str],
    settings: ServiceSettings,
    *,
    tell: Callable[[ServiceSettings], None],
) -> None:
    """Serve models until SIGINT or SIGTERM.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    tell : Callable
        Called with the settings, the port filled in, once connections are taken.

    Raises
    ------
    ConfigurationError
        When the address cannot be had, or lacks a token.
    ModelLoadError
        When a model cannot be loaded.
    """
    require_packages()
    from nip_astra.serve.http_server import HttpServer, http_config
    from nip_astra.serve.state import open_service

    settings.token()  # refused before models are loaded
    if not models:
        raise ConfigurationError(
            "a text service was to be started without a model. Name one or several: "
            "--model NAME=PATH."
        )
    with _open_socket(settings) as listening:
        settings = settings.model_copy(update={"port": listening.getsockname()[1]})
        shelf = _new_shelf(settings)
        try:
            shelf.add_all(models)
            with open_service(shelf, settings) as service:
                listening.listen(_BACKLOG)
                tell(settings)
                HttpServer(http_config(service.app)).run(sockets=[listening])
        finally:
            shelf.close()


def _new_shelf(settings: ServiceSettings) -> Shelf:
    limits = EngineLimits(
        max_rows=settings.max_rows, max_cache_bytes=int(settings.max_cache_gib * (1 << 30))
    )
    return Shelf(device=resolve_device(settings.device), dtype=settings.dtype, limits=limits)


def _open_socket(settings: ServiceSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise ConfigurationError(
            f"the service was to listen on {settings.host}, port {settings.port}, but cannot: "
            f"{error.strerror or error}. Give another --port, or 0 for a free one."
        ) from error
    return listening
