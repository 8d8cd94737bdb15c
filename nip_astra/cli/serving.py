"""The command that serves models to OpenAI clients."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from nip_astra.cli.options import option, settings_of, shared_options, write_line
from nip_astra.errors import ConfigurationError


@shared_options("device", "num_threads")
def serve(
    options: Mapping[str, Any],
    model: Annotated[
        list[str],
        option(
            "NAME=PATH",
            "A model and its name; folder, hub id, or scenario://pocket_chat/models/target. "
            "Repeatable.",
        ),
    ],
    port: Annotated[int | None, option("NUMBER", "8000; 0 takes a free one.")] = None,
    host: Annotated[
        str | None, option("ADDRESS", "127.0.0.1; any that others reach needs a token.")
    ] = None,
    token_variable: Annotated[
        str | None, option("NAME", "Environment variable with the token to ask for.")
    ] = None,
    state_dir: Annotated[
        str | None, option("DIR", "Where files, jobs and their models are kept.")
    ] = None,
    train: Annotated[
        bool,
        typer.Option("--train", help="Train the models for clients of train_service.backend http."),
    ] = False,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="Train the models for clients of the tinker SDK.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        option("A=B", "A limit: --settings max_waiting=64. Repeatable.", "--settings"),
    ] = None,
) -> None:
    """Serve models by OpenAI's routes, or train them for clients; ends with Ctrl-C.

    Without --train and --tinker the models answer texts, and jobs train them.
    """
    from nip_astra.serve.server import serve as run_service
    from nip_astra.serve.settings import ServiceSettings, TrainingProtocol

    limits = settings_of({"settings": settings, "device": options["device"]})
    addresses = {
        "port": port,
        "host": host,
        "token_variable": token_variable,
        "state_dir": state_dir,
    }
    limits |= {name: value for name, value in addresses.items() if value is not None}
    choices: dict[TrainingProtocol, bool] = {"http": train, "tinker": tinker}
    protocols = [name for name, is_chosen in choices.items() if is_chosen]
    if options["num_threads"] is not None:
        import torch

        torch.set_num_threads(options["num_threads"])
    model_paths = _parse_models(model)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handler.setLevel(logging.WARNING)
    # In place of the one that tells warnings once and without the time.
    logging.getLogger("nip_astra").handlers = [handler]

    def announce(settings: ServiceSettings) -> None:
        names = ", ".join(model_paths)
        address = settings.root_url if protocols else settings.base_url
        write_line(
            f"{'training' if protocols else 'serving'} {names} at {address} (Ctrl-C ends it)"
        )
        key = settings.token_variable
        write_line(f"  api_key: {'any text' if key is None else f'what {key} holds'}")
        sys.stdout.flush()

    run_service(model_paths, ServiceSettings(**limits), on_start=announce, protocols=protocols)


def _parse_models(assignments: Sequence[str]) -> dict[str, str]:
    """Return the path of each model by its name, from `NAME=PATH`."""
    model_paths: dict[str, str] = {}
    for assignment in assignments:
        name, _, path = assignment.partition("=")
        if not name or not path:
            raise ConfigurationError(
                f"--model {assignment} has no name or no path. Give "
                "--model NAME=PATH, for instance target=scenario://pocket_chat/models/target."
            )
        if name in model_paths:
            raise ConfigurationError(
                f"two models are named {name!r}: {model_paths[name]} and {path}. Give each its "
                "own name."
            )
        model_paths[name] = path
    return model_paths
