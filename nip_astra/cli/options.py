"""Shared options of commands, and output to the terminal."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

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

    entry_points = metadata.entry_points(group="nip_astra.trainers")
    installed = sorted({entry_point.name for entry_point in entry_points})
    return [*map(str, TrainerType), *installed]


def _scenario_names() -> list[str]:
    from nip_astra.parameters.content import scenario_names

    return scenario_names()


def _presets() -> list[str]:
    from nip_astra.parameters.content import content_root

    working_directory = Path.cwd()
    presets = []
    for file in sorted(content_root().glob("parameters/*/*.yaml")):
        if file.is_relative_to(working_directory):
            file = file.relative_to(working_directory)
        presets.append(str(file))
    return presets


def _runs() -> list[str]:
    from nip_astra.tracking.run_directory import HYPER_PARAMETERS

    return sorted(file.parent.name for file in Path("runs").glob(f"*/{HYPER_PARAMETERS}"))


def _completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return the shell's completion of a value; if no name fits, it completes files."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


def run_argument(meaning: str, metavar: str = "RUN") -> Any:
    """Return the argument for a run, which the shell completes."""
    return typer.Argument(metavar=metavar, help=meaning, autocompletion=_completed(_runs))


def option(metavar: str, meaning: str, *flags: str, **keywords: Any) -> Any:
    """Return an option with a value."""
    return typer.Option(*flags, metavar=metavar, help=meaning, **keywords)


def _option(kind: Any, *arguments: str, **keywords: Any) -> Any:
    return Annotated[kind, option(*arguments, **keywords)]


def _flag(name: str, meaning: str) -> Any:
    return Annotated[bool, typer.Option(f"--{name}", help=meaning)]


OPTIONS: Mapping[str, Any] = {
    "trainer": _option(
        str | None,
        "NAME",
        "Registered trainer, e.g. ast_dpo.",
        autocompletion=_completed(trainer_names),
    ),
    "scenario": _option(
        str | None,
        "NAME",
        "Scenario: a name, or a folder with a scenario.yaml.",
        autocompletion=_completed(_scenario_names),
    ),
    "parameters": _option(
        str | None,
        "FILE",
        "YAML file, in place of the trainer's preset.",
        autocompletion=_completed(_presets),
    ),
    "overrides": _option(
        list[str] | None,
        "A.B=C",
        "Override a parameter: --set training.lr=1e-4. Repeatable.",
        "--set",
    ),
    "seed": _option(int | None, "NUMBER", "Root of all randomness."),
    "plugin": _option(
        list[str] | None, "FILE", "Python file or module that registers names. Repeatable."
    ),
    "trust": _flag("trust", "Load the code and keys that a run names, though it is not your own."),
    "device": _option(str | None, "NAME", "cpu, cuda or auto."),
    "wandb": _option(str | None, "MODE", "W&B: disabled, offline or online."),
    "track": _option(
        str | None, "A,B", "Trackers: wandb, mlflow, trackio, tensorboard, or registered ones."
    ),
    "run_id": _option(str | None, "NAME", "Name of the run and its folder."),
    "runs_dir": _option(str | None, "DIR", "Where runs are kept."),
    "num_threads": _option(int | None, "NUMBER", "CPU cores to use, by threads or processes."),
    "settings": _option(
        list[str] | None,
        "A=B",
        "Override a setting: --settings checkpoint_period=5. Repeatable.",
    ),
    "test_run": _flag("test-run", "Cut every loop to one iteration."),
    "dry_run": _flag("dry-run", "Validate, load, run one smallest step; write nothing."),
    "scorers": _option(
        list[str] | None, "NAME", "Registered name, YAML file, or own. Repeatable.", "--scorer"
    ),
    "name": _option(str | None, "NAME", "Folder in RUN/evaluations."),
    "threshold": _option(float | None, "SCORE", "Score from which a response fails."),
    "labelled": _option(
        str | None, "FILE", "Labelled responses (JSONL) that measure the scorers; or none."
    ),
    "embedder": _option(str | None, "NAME", "Groups failing probes: ngram, or an encoder's model."),
    "overwrite": _flag("overwrite", "Start over."),
    "fail_if": _option(
        str | None, "CONDITION", "Exit with 1 where it holds, e.g. 'failure_rate.high > 0.05'."
    ),
    "as_json": _flag("json", "Print JSON in place of tables."),
    "debug": _flag("debug", "Show the traceback of an error."),
}
"""Options that several commands have, by the name of their value."""
EXPERIMENT = ("trainer", "scenario", "parameters", "overrides", "seed", "plugin", "trust")
"""Options that name an experiment."""
RUN = ("device", "wandb", "track", "run_id", "runs_dir", "num_threads", "settings")
"""Options for the settings of a run."""


def shared_options(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add some of `OPTIONS`, and --debug, to a command.

    It receives the values of all of them as `options`. Options of this command alone are further
    parameters.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters["options"]
        command_parameters = list(parameters)
        for name in (*names, "debug"):
            parameters[name] = inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=False if get_args(OPTIONS[name])[0] is bool else None,
                annotation=OPTIONS[name],
            )

        @functools.wraps(command)
        def call(**options: Any) -> None:
            command(options, **{name: options[name] for name in command_parameters})

        call.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]  # read by Typer
        return call

    return decorate


@contextmanager
def collection_suspended() -> Iterator[None]:
    """Suspend garbage collection: of the objects that imports create, nearly all stay.

    Otherwise collections take a tenth of the time of loading torch.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among a command's options: `settings`, and those with separate names."""
    from nip_astra.parameters.files import parse_overrides

    settings = parse_overrides(options.get("settings") or [], "--settings").values
    for name in ("device", "wandb", "run_id", "runs_dir", "num_threads"):
        if options.get(name) is not None:
            settings[name] = options[name]
    if options.get("track") is not None:
        names = map(str.strip, options["track"].split(","))
        settings["trackers"] = [name for name in names if name]
    if options.get("test_run"):
        settings["test_run"] = True
    return settings


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

        result = estimate(resolved, **settings)
        print_dry_run(result.estimate, open_console(), device_price=result.device_price)
        return
    from nip_astra.run import run_experiment

    print_outcome(run_experiment(resolved, **settings))


def print_outcome(result: ExperimentResult) -> None:
    """Print the results of a run, in the leading process."""
    from nip_astra.report.terminal import print_results

    if rank_of_process() == 0:
        print_results(result.results, result.run_directory.path, open_console())
