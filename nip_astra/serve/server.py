"""Run the service: open the port, tell the address, serve until a signal, close."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nip_astra.errors import ConfigurationError, MissingDependencyError
from nip_astra.language_models.batch_engine import EngineLimits
from nip_astra.serve.served_models import ServedModels
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.utils.devices import resolve_device

if TYPE_CHECKING:
    from fastapi import FastAPI

_BACKLOG = 1024


def serve(
    models: Mapping[str, str],
    settings: ServiceSettings,
    *,
    tell: Callable[[ServiceSettings], None],
    protocols: Collection[TrainingProtocol] = (),
) -> None:
    """Serve models until SIGINT or SIGTERM.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    tell : Callable
        Called with the settings, the port filled in, once connections are taken.
    protocols : Collection[TrainingProtocol]
        By which clients train the models; without one, the models answer texts.

    Raises
    ------
    ConfigurationError
        When the address cannot be had, or lacks a token.
    ModelLoadError
        When a model cannot be loaded.
    """
    _require_packages()
    settings.token()  # refused before models are loaded
    if not models:
        raise ConfigurationError(
            "a service was to be started without a model. Name one or several: --model NAME=PATH."
        )
    from nip_astra.serve.app import HttpServer, http_config

    with open_socket(settings) as listening:
        settings = settings.model_copy(update={"port": listening.getsockname()[1]})
        with _open_app(models, settings, protocols) as app:
            listening.listen(_BACKLOG)
            tell(settings)
            HttpServer(http_config(app)).run(sockets=[listening])


def _require_packages() -> None:
    """Refuse to start without what the service is made of.

    Raises
    ------
    MissingDependencyError
        With how to install it.
    """
    try:
        import fastapi  # noqa: F401 - the routes
        import python_multipart  # noqa: F401 - reads uploads
        import uvicorn  # noqa: F401 - speaks HTTP
    except ImportError as error:
        raise MissingDependencyError(
            f"a text service was to be started, and it needs the package {error.name}. Install it "
            "with: pip install 'nip_astra[serve]'."
        ) from error


@contextmanager
def _open_app(
    models: Mapping[str, str],
    settings: ServiceSettings,
    protocols: Collection[TrainingProtocol],
) -> Iterator[FastAPI]:
    """The application within the block, its models loaded and its threads at work."""
    from nip_astra.serve.app import open_service, open_training

    if protocols:
        with open_training(models, settings, protocols) as app:
            yield app
        return
    served_models = _empty_models(settings)
    try:
        served_models.add_all(models)
        with open_service(served_models, settings) as service:
            yield service.app
    finally:
        served_models.close()


def _empty_models(settings: ServiceSettings) -> ServedModels:
    limits = EngineLimits(
        max_rows=settings.max_rows, max_cache_bytes=int(settings.max_cache_gib * (1 << 30))
    )
    return ServedModels(device=resolve_device(settings.device), dtype=settings.dtype, limits=limits)


def open_socket(settings: ServiceSettings) -> socket.socket:
    """A socket at the address of a service, which does not listen yet.

    Raises
    ------
    ConfigurationError
        When the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # Only where the protocol is named does asyncio send parts at once. Otherwise an answer's body
    # waits for its head to be acknowledged, which takes the other side 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
