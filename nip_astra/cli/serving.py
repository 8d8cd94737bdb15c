"""The command that serves models to clients of OpenAI's."""

from __future__ import annotations

from typing import Annotated

import typer

from nip_astra.cli.options import Debug, Device, Threads


def serve(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PATH",
            help="A model and its name; folder, hub id, or scenario://pocket_chat/models/target. "
            "Repeatable.",
        ),
    ],
    port: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="8000; 0 takes a free one.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="127.0.0.1; any that others reach needs a token."),
    ] = None,
    token_variable: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Environment variable with the token to ask for."),
    ] = None,
    state_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where files, jobs and their models are kept.")
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
        typer.Option(
            "--settings", metavar="A=B", help="A limit: --settings max_waiting=64. Repeatable."
        ),
    ] = None,
    device: Device = None,
    num_threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Serve models by OpenAI's routes, or train them for clients; ends with Ctrl-C.

    Without --train and --tinker the models answer texts, and jobs train them.
    """
    from nip_astra.cli import serve_commands
    from nip_astra.cli.options import settings_of
    from nip_astra.serve.settings import TrainingProtocol

    given = settings_of(
        settings,
        port=port,
        host=host,
        token_variable=token_variable,
        state_dir=state_dir,
        device=device,
    )
    asked: dict[TrainingProtocol, bool] = {"http": train, "tinker": tinker}
    protocols = [name for name, is_asked in asked.items() if is_asked]
    serve_commands.serve(model, given, num_threads=num_threads, protocols=protocols)
