"""Shared options of commands, and output to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nip_astra.distributed.launch import rank_of_process
from nip_astra.safe_text import safe_text, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from nip_astra.resolving.resolution import ResolvedExperiment
    from nip_astra.run import ExperimentResult

PIPE_WIDTH = 160
"""Columns of a table written to a file or pipe."""


def trainer_names() -> list[str]:
    """Return shipped and installed trainers, without importing them."""
    from nip_astra.parameters.types import TrainerType

    installed = {one.name for one in metadata.entry_points(group="nip_astra.trainers")}
    return [*map(str, TrainerType), *sorted(installed)]


def _scenario_names() -> list[str]:
    from nip_astra.parameters.content import scenario_names

    return scenario_names()


def _presets() -> list[str]:
    from nip_astra.parameters.content import content_root

    root, here = content_root(), Path.cwd()
    files = sorted(root.glob("parameters/*/*.yaml"))
    return [str(one.relative_to(here) if one.is_relative_to(here) else one) for one in files]


def _runs() -> list[str]:
    from nip_astra.tracking.run_directory import HYPER_PARAMETERS

    return sorted(file.parent.name for file in Path("runs").glob(f"*/{HYPER_PARAMETERS}"))


def _completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the shell's completion of a value; if no name fits, it completes files."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


complete_runs = _completed(_runs)
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Runs, checkpoints, models, lists of probes, or chat models.",
        autocompletion=complete_runs,
    ),
]
Trainer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Registered trainer, e.g. ast_dpo.",
        autocompletion=_completed(trainer_names),
    ),
]
ScenarioName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Scenario: a name, or a folder with a scenario.yaml.",
        autocompletion=_completed(_scenario_names),
    ),
]
ParameterFile = Annotated[
    str | None,
    typer.Option(
        "--parameters",
        metavar="FILE",
        help="YAML file, in place of the trainer's preset.",
        autocompletion=_completed(_presets),
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="A.B=C", help="Override a parameter: --set training.lr=1e-4. Repeatable."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--settings",
        metavar="A=B",
        help="Override a setting: --settings checkpoint_period=5. Repeatable.",
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="NUMBER", help="Root of all randomness.")]
Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="FILE", help="Python file or module that registers names. Repeatable."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Load the code and keys that a run names, though it is not your own."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda or auto.")]
RunId = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run and its folder.")]
TestRun = Annotated[bool, typer.Option("--test-run", help="Cut every loop to one iteration.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Validate, load, run one smallest step; write nothing.")
]
RunsDir = Annotated[str | None, typer.Option(metavar="DIR", help="Where runs are kept.")]
Threads = Annotated[
    int | None,
    typer.Option(metavar="NUMBER", help="CPU cores to use, by threads or processes."),
]
Wandb = Annotated[
    str | None, typer.Option(metavar="MODE", help="W&B: disabled, offline or online.")
]
Track = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="Trackers: wandb, mlflow, trackio, tensorboard, or registered ones."
    ),
]
FailIf = Annotated[
    str | None,
    typer.Option(
        metavar="CONDITION", help="Exit with 1 where it holds, e.g. 'failure_rate.high > 0.05'."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer", metavar="NAME", help="Registered name, YAML file, or own. Repeatable."
    ),
]
EvaluationName = Annotated[
    str | None, typer.Option("--name", metavar="NAME", help="Folder in RUN/evaluations.")
]
Threshold = Annotated[
    float | None, typer.Option(metavar="SCORE", help="Score from which a response fails.")
]
Labelled = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Labelled responses (JSONL) that measure the scorers; or none.",
    ),
]
EmbedderName = Annotated[
    str | None,
    typer.Option(
        "--embedder", metavar="NAME", help="Groups failing probes: ngram, or an encoder's model."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start over.")]
Targets = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="MODEL", help="Model, or run whose target it is. Repeatable."),
]
Column = Annotated[
    str,
    typer.Option(metavar="NAME", help="Column of the probes, where RUN is a list of them."),
]
Split = Annotated[
    str, typer.Option(metavar="NAME", help="Opening prompts or problems: train, dev or test.")
]
NumEpisodes = Annotated[
    int | None,
    typer.Option(
        min=1, max=1_000_000, metavar="NUMBER", help="Conversations of the attacker, or problems."
    ),
]
NumTurns = Annotated[
    int | None,
    typer.Option(min=1, max=1_000, metavar="NUMBER", help="Turns of a conversation."),
]
ProbabilityEpisodes = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=1_000_000,
        metavar="NUMBER",
        help="Conversations for the probability of failure; 0: none.",
    ),
]
ImportanceSampling = Annotated[
    bool,
    typer.Option(
        "--importance-sampling/--monte-carlo-only",
        help="Whether half of those have a turn of the attacker's.",
    ),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, metavar="NUMBER", help="Conversations at once.")
]
Untrained = Annotated[
    bool, typer.Option("--untrained", help="The model as it was before training.")
]


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among a command's options: `settings`, and those with separate names."""
    from nip_astra.parameters.files import parse_overrides

    own = ("device", "wandb", "run_id", "runs_dir", "num_threads")
    given = parse_overrides(options.get("settings") or [], "--settings").values
    given |= {name: options[name] for name in own if options.get(name) is not None}
    if options.get("track") is not None:
        names = map(str.strip, options["track"].split(","))
        given["trackers"] = [name for name in names if name]
    return given | ({"test_run": True} if options.get("test_run") else {})


def open_console() -> Console:
    """Open the console of the current standard output."""
    from nip_astra.evaluation.tables import SafeConsole

    return SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPE_WIDTH)


def write_line(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{safe_text(text)}\n")


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{safe_text(text)}\n")


def show(
    tables: Callable[[], Iterable[Any]], plain: Callable[[], Any], *, as_json: bool = False
) -> None:
    """Print tables, or plain values as JSON."""
    if as_json:
        write_line(to_json(plain(), indent=2))
        return
    console = open_console()
    for part in tables():
        console.print(part)


def train_or_estimate(
    resolved: ResolvedExperiment, settings: Mapping[str, Any], *, is_dry: bool
) -> None:
    """Run an experiment, or its smallest step, and print the results."""
    if is_dry:
        from nip_astra.overview import dry_run as estimate
        from nip_astra.report.terminal import print_dry_run

        found = estimate(resolved, **settings)
        print_dry_run(found.estimate, open_console(), device_price=found.device_price)
        return
    from nip_astra.run import run_experiment

    print_outcome(run_experiment(resolved, **settings))


def print_outcome(result: ExperimentResult) -> None:
    """Print the results of a run, in the leading process."""
    from nip_astra.report.terminal import print_results

    if rank_of_process() == 0:
        print_results(result.results, result.run_directory.path, open_console())
