"""The service from start to end: open the port, load the models, serve until a signal, close."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping

from nip_astra.errors import ConfigurationError
from nip_astra.lazy import import_extra
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol

_BACKLOG = 1024
"""Connections that the system accepts before the service does; many clients start at once."""


def serve(
    models: Mapping[str, str],
    settings: ServiceSettings,
    *,
    on_start: Callable[[ServiceSettings], None],
    protocols: Collection[TrainingProtocol] = (),
) -> None:
    """Serve models until SIGINT or SIGTERM.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    on_start : Callable
        Called with the settings, port included, once connections are accepted.
    protocols : Collection[TrainingProtocol]
        Protocols by which clients train the models; without one, the models generate text.

    Raises
    ------
    ConfigurationError
        When the address is not available, or needs a token.
    ModelLoadError
        When a model cannot be loaded.
    """
    for package in ("fastapi", "python_multipart", "uvicorn"):
        import_extra(package, "the service", "serve")
    # A missing token is refused before models are loaded, which may take minutes.
    settings.token()
    if not models:
        raise ConfigurationError("no model to serve. Give one or several: --model NAME=PATH.")
    # Its module imports the packages checked above.
    from nip_astra.serve.app import HttpServer, http_config, open_app

    # The port is taken before the models are loaded, so that a taken one is known at once, but
    # accepts connections only after that: a client can wait until it can connect.
    with open_socket(settings) as listening:
        settings = settings.model_copy(update={"port": listening.getsockname()[1]})
        with open_app(models, settings, protocols) as app:
            try:
                listening.listen(_BACKLOG)
            except OSError as error:
                # Another service was bound to the port meanwhile, and listens first.
                raise _unavailable(settings, error) from error
            on_start(settings)
            HttpServer(http_config(app)).run(sockets=[listening])


def open_socket(settings: ServiceSettings) -> socket.socket:
    """Return a socket bound to the address of a service, not listening yet."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends parts at once only for a socket that names its protocol. Otherwise the body of
    # a response waits 40 ms for the acknowledgement of its head.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A restarted service may take its port although old connections are in TIME_WAIT.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
    except OSError as error:
        listening.close()
        raise _unavailable(settings, error) from error
    return listening


def _unavailable(settings: ServiceSettings, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot listen on {settings.host}, port {settings.port}: {error.strerror or error}. "
        "Give another --port, or 0 for a free one."
    )
