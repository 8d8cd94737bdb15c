"""The command `analyse`: its options, and what it prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nip_astra.cli.options import (
    AsJson,
    Debug,
    Device,
    Plugins,
    Settings,
    Trust,
    Wandb,
    settings_of,
)


def analyse(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run directory of a trainer of chat models.")
    ],
    analysers: Annotated[
        list[str] | None,
        typer.Option("--analyser", metavar="NAME", help="Registered name; all. Repeatable."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="YAML file of a chat model; that of the run."),
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Stored rollouts: train, test or all.")
    ] = "test",
    iteration: Annotated[
        int | None, typer.Option(min=0, metavar="NUMBER", help="The first is 0; all of them.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what another judge has said.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the requests; ask and write nothing.")
    ] = False,
    as_json: AsJson = False,
    plugin: Plugins = None,
    trust: Trust = False,
    device: Device = None,
    wandb: Wandb = None,
    settings: Settings = None,
    debug: Debug = False,
) -> None:
    """Let a judge answer questions about stored rollouts of chat models."""
    from nip_astra.cli import analysis_commands

    request: dict[str, Any] = {
        "split": split,
        "iteration": iteration,
        "is_overwritten": overwrite,
        "plugins": plugin or [],
        "is_trusted": trust,
    }
    analysis_commands.analyse(
        run,
        analysers or [],
        judge,
        request,
        settings_of(settings, device=device, wandb=wandb),
        is_dry_run=dry_run,
        as_json=as_json,
    )
