"""What `nip-astra serve` does; imported when it runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from nip_astra.cli.commands import quieten_libraries
from nip_astra.cli.terminal import say
from nip_astra.errors import ConfigurationError
from nip_astra.serve.server import serve as run_service
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol


def serve(
    models: Sequence[str],
    given: dict[str, Any],
    *,
    num_threads: int | None,
    protocols: Sequence[TrainingProtocol] = (),
) -> None:
    """Serve models until a signal comes."""
    quieten_libraries()
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    named = _named(models)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    # In place of the one that tells warnings once and without the time.
    logging.getLogger("nip_astra").handlers = [handler]

    def tell(settings: ServiceSettings) -> None:
        names = ", ".join(named)
        address = settings.root_url if protocols else settings.base_url
        say(f"{'training' if protocols else 'serving'} {names} at {address} (Ctrl-C ends it)")
        key = settings.token_variable
        say(f"  api_key: {'any text' if key is None else f'what {key} holds'}")
        sys.stdout.flush()

    run_service(named, ServiceSettings(**given), tell=tell, protocols=protocols)


def _named(models: Sequence[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for one in models:
        name, found, path = one.partition("=")
        if not found or not name or not path:
            raise ConfigurationError(
                f"a model was given as {one!r}, but it takes a name and a place. Give "
                "--model NAME=PATH, for instance target=scenario://pocket_chat/models/target."
            )
        if name in named:
            raise ConfigurationError(
                f"two models were to be served as {name!r}: {named[name]} and {path}. Give each a "
                "name of its own."
            )
        named[name] = path
    return named
