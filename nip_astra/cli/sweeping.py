"""The command that runs many experiments."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from nip_astra.cli.options import AsJson, Debug, Device, Plugins, Settings, Trust, Wandb


def sweep(
    plan: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="YAML file of a sweep, or a sweep's folder."),
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Trainers, e.g. ast_dpo,ast_ipo.")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Scenarios; the presets' if none.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="SEEDS", help="0..4, or 0,3,7.")] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C,D", help="Values to run each of. Repeatable."),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(metavar="FILE", help="Parameter file that all runs start from.")
    ] = None,
    plugin: Plugins = None,
    trust: Trust = False,
    sweep_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where its runs are kept: runs/sweep.")
    ] = None,
    search: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A.B=C..D", help="Range to search, e.g. 'training.lr=log 1e-5..1e-3'."
        ),
    ] = None,
    num_trials: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Trials of a search: 20.")
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="Proposes trials: tpe or random.")
    ] = None,
    pruner: Annotated[
        str | None, typer.Option(metavar="NAME", help="Stops trials: median, halving or none.")
    ] = None,
    objective: Annotated[
        str | None, typer.Option(metavar="NAME", help="Figure to search by: dev/failure_rate.")
    ] = None,
    direction: Annotated[
        str | None, typer.Option(metavar="NAME", help="maximize or minimize the objective.")
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, max=1024, help="Runs at once: 1.")
    ] = None,
    on: Annotated[
        Literal["processes", "ray"], typer.Option(help="What does the runs.")
    ] = "processes",
    cpus_per_run: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, help="Cores of a run on Ray.")
    ] = 1,
    gpus_per_run: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, help="GPUs of a run on Ray.")
    ] = 0,
    shard: Annotated[
        str | None, typer.Option(metavar="K/N", help="The k-th of n parts of the runs.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Figure to show, e.g. failure_rate. Repeatable."),
    ] = None,
    device: Device = None,
    wandb: Wandb = None,
    settings: Settings = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the runs; start none.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run every combination of trainers, values and seeds, or search; go on where it was left."""
    from nip_astra.cli import sweep_commands
    from nip_astra.cli.options import settings_of
    from nip_astra.sweep.sweeping import SweepOptions

    sweep_commands.sweep(
        sweep_commands.plan_of(
            plan,
            trainers=trainer,
            scenarios=scenario,
            seeds=seeds,
            grid=grid or [],
            parameters=parameters,
            plugins=plugin or [],
            search=sweep_commands.search_of(
                search or [],
                num_trials=num_trials,
                sampler=sampler,
                pruner=pruner,
                objective=objective,
                direction=direction,
            ),
            is_trusted=trust,
        ),
        sweep_commands.folder_of(plan, sweep_dir),
        SweepOptions(
            settings=settings_of(settings, device=device, wandb=wandb),
            num_processes=num_processes,
            shard=shard,
            place=on,
            num_cpus=cpus_per_run,
            num_gpus=gpus_per_run,
            is_trusted=trust,
            metrics=metric or [],
        ),
        is_dry=dry_run,
        as_json=as_json,
    )
