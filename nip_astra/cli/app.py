"""The Typer application behind `run.py` and `nip-astra`."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from nip_astra import __version__
from nip_astra.errors import NipAstraError, StopRequested, UnknownNameError

ROOT_OPTIONS = ("--help", "-h", "--version")
EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143}


class RunByDefault(TyperGroup):
    """Commands, where options without a command are those of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ROOT_OPTIONS):
            args = ["run", *args]
        elif not args[0].startswith("-") and args[0] not in self.commands:
            advice = "Without a command, options are those of `run`."
            raise UnknownNameError("command", args[0], self.commands, advice)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        run = self.commands["run"]
        with run.make_context("run", [], parent=ctx, resilient_parsing=True) as sub_context:
            run.format_help(sub_context, formatter)


app = typer.Typer(
    cls=RunByDefault,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="nip_astra: models trained against and with each other. Without a command: run.",
)

Trainer = Annotated[
    str | None, typer.Option(metavar="NAME", help="Registered trainer, e.g. ast_dpo.")
]
ScenarioName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Scenario: a name, or a folder with a scenario.yaml."),
]
ParameterFile = Annotated[
    str | None,
    typer.Option(
        "--parameters", metavar="FILE", help="YAML file, in place of the trainer's preset."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Override a parameter: --set training.lr=1e-4. Repeatable."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="NUMBER", help="Root of all randomness.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="FILE", help="Python file or module that registers names. Repeatable."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda or auto.")]
Threads = Annotated[int | None, typer.Option(metavar="NUMBER", help="CPU threads of torch.")]
Wandb = Annotated[
    str | None, typer.Option(metavar="MODE", help="W&B: disabled, offline or online.")
]
FailIf = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION", help="Exit with 1 where it holds, e.g. 'failure_rate.high > 0.05'."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def run(
    trainer: Trainer = None,
    scenario: ScenarioName = None,
    parameters: ParameterFile = None,
    overrides: Overrides = None,
    seed: Seed = None,
    plugin: Plugins = None,
    device: Device = None,
    wandb: Wandb = None,
    run_id: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run and its folder.")
    ] = None,
    runs_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where runs are kept.")
    ] = None,
    num_threads: Threads = None,
    test_run: Annotated[
        bool, typer.Option("--test-run", help="Cut every loop to one iteration.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Validate, load, run one smallest step; write nothing."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Train; `run` is what options without a command mean."""
    from nip_astra.cli import commands

    commands.run(
        _experiment_arguments(trainer, scenario, parameters, overrides, seed, plugin),
        _settings_arguments(
            device=device,
            wandb=wandb,
            run_id=run_id,
            runs_dir=runs_dir,
            num_threads=num_threads,
            test_run=test_run or None,
        ),
        dry_run=dry_run,
    )


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="Run directory, e.g. runs/<run id>.")],
    device: Device = None,
    wandb: Wandb = None,
    num_threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Go on with a stopped run from its latest checkpoint."""
    from nip_astra.cli import commands

    commands.resume(run, _settings_arguments(device=device, wandb=wandb, num_threads=num_threads))


@app.command(name="list")
def list_names(
    kind: Annotated[
        str | None, typer.Argument(help="trainers, scenarios, scorers, language_models, ...")
    ] = None,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """List what is registered, where it comes from and what it does."""
    from nip_astra.cli import commands

    commands.list_names(kind, plugin or [])


@app.command()
def show(
    trainer: Trainer = None,
    scenario: ScenarioName = None,
    parameters: ParameterFile = None,
    overrides: Overrides = None,
    seed: Seed = None,
    plugin: Plugins = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print a parameter file.")] = False,
    debug: Debug = False,
) -> None:
    """Show every parameter, its value, and where the value comes from."""
    from nip_astra.cli import commands

    commands.show(
        _experiment_arguments(trainer, scenario, parameters, overrides, seed, plugin),
        as_yaml=as_yaml,
    )


@app.command()
def schema(
    trainer: Trainer = None,
    scenario: ScenarioName = None,
    plugin: Plugins = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of the parameter files of a trainer and scenario."""
    from nip_astra.cli import commands

    commands.schema(_experiment_arguments(trainer, scenario, None, None, None, plugin))


@app.command()
def evaluate(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run directories or checkpoints.")
    ],
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Model, or run whose target it is. Repeatable."),
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Registered name, YAML file, or own. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Folder in RUN/evaluations.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="Opening prompts: train, dev or test.")
    ] = "test",
    seed: Seed = None,
    num_episodes: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Conversations of the attacker.")
    ] = None,
    num_turns: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Turns of a conversation.")
    ] = None,
    probability_episodes: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="NUMBER", help="Conversations for the probability of failure; 0: none."
        ),
    ] = None,
    importance_sampling: Annotated[
        bool,
        typer.Option(
            "--importance-sampling/--monte-carlo-only",
            help="Whether half of those have a turn of the attacker's.",
        ),
    ] = True,
    batch_size: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Conversations at once.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(metavar="SCORE", help="Score from which a response fails.")
    ] = None,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="The attacker as it was before training.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over.")] = False,
    fail_if: FailIf = None,
    as_json: AsJson = False,
    overrides: Overrides = None,
    plugin: Plugins = None,
    device: Device = None,
    num_threads: Threads = None,
    debug: Debug = False,
) -> None:
    """Measure attackers on held-out prompts; goes on where a killed evaluation was."""
    from nip_astra.cli import evaluation_commands

    evaluation_commands.evaluate(
        evaluation_commands.EvaluateRequest(
            runs=runs,
            targets=target or [],
            scorers=scorer or [],
            name=name,
            split=split,
            seed=seed,
            num_episodes=num_episodes,
            num_turns=num_turns,
            probability_episodes=probability_episodes,
            importance_sampling=importance_sampling,
            batch_size=batch_size,
            threshold=threshold,
            is_untrained=untrained,
            is_overwritten=overwrite,
            overrides=overrides or [],
            plugins=plugin or [],
            fail_if=fail_if,
            as_json=as_json,
        ),
        _settings_arguments(device=device, num_threads=num_threads),
    )


@app.command()
def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory, or an evaluation.")],
    scorer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Registered name, YAML file, or own. Repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Folder in RUN/evaluations.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(metavar="SCORE", help="Score from which a response fails.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over.")] = False,
    fail_if: FailIf = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
    device: Device = None,
    debug: Debug = False,
) -> None:
    """Rate the stored conversations of a run by other scorers; generates nothing."""
    from nip_astra.cli import stored_evaluations

    stored_evaluations.score(
        run,
        scorer or [],
        name=name,
        threshold=threshold,
        plugins=plugin or [],
        is_overwritten=overwrite,
        settings_fields=_settings_arguments(device=device),
        fail_if=fail_if,
        as_json=as_json,
    )


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Run directories or evaluations.")
    ],
    fail_if: FailIf = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON file to write the comparison to.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare evaluations with the first, paired by opening prompt."""
    from nip_astra.cli import stored_evaluations

    stored_evaluations.compare_runs(runs, fail_if=fail_if, out=out, as_json=as_json)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Run directories; several are compared.")
    ],
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="RUN/report.html, or comparison.html for several runs."),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option("--redact/--reveal", help="Whether the text of failures is blurred."),
    ] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
    debug: Debug = False,
) -> None:
    """Write one HTML page about a run, or about several side by side."""
    from nip_astra.cli import report_commands

    report_commands.report(runs, output=output, redact=redact, is_opened=open_page)


def _experiment_arguments(
    trainer: str | None,
    scenario: str | None,
    parameter_file: str | None,
    overrides: list[str] | None,
    seed: int | None,
    plugins: list[str] | None,
) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "scenario": scenario,
        "parameter_file": parameter_file,
        "overrides": overrides or [],
        "seed": seed,
        "plugins": plugins or [],
    }


def _settings_arguments(**given: Any) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def main() -> None:
    """Run the program: exit code 0 done, 2 wrong input, 130 or 143 stopped by a signal."""
    # Progress bars of model loading and telemetry say nothing to the user of a run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("nip_astra").addHandler(logging.NullHandler())
    try:
        app()
    except NipAstraError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        is_stop = isinstance(error, StopRequested)
        sys.stderr.write(f"{'' if is_stop else 'error: '}{error}\n")
        sys.exit(EXIT_CODES.get(error.signal_name, 2) if isinstance(error, StopRequested) else 2)
