"""The Typer application behind `run.py` and `nip-astra`."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from nip_astra import __version__
from nip_astra.cli import data, measuring, recipes, serving
from nip_astra.cli.options import (
    EXPERIMENT,
    RUN,
    collection_suspended,
    open_console,
    print_outcome,
    run_argument,
    settings_of,
    shared_options,
    train_or_estimate,
    trainer_names,
    write_line,
)
from nip_astra.cli.options import show as show_parts
from nip_astra.cli.sweep import sweep
from nip_astra.distributed.launch import rank_of_process
from nip_astra.errors import (
    ConfigurationError,
    LostProcessError,
    NipAstraError,
    StopRequested,
    UnexpectedExitError,
    UnknownNameError,
    WorkerProcessError,
    counted,
    nearest_names,
)
from nip_astra.safe_text import safe_text, to_json

if TYPE_CHECKING:
    from nip_astra.overview import Described

RUNS_DIFFER = 1
"""Exit code if a resumed run differs from an uninterrupted one."""
ROOT_OPTIONS = ("--help", "-h", "--version", "--install-completion", "--show-completion")
OTHER_COMMANDS = {"train": "run", "fit": "run", "test": "evaluate", "eval": "evaluate"}
"""Our equivalents of other tools' commands."""
MAX_MATCHES = 12
"""Maximum number of search results shown."""
EXIT_CODES = {"SIGINT": 130, "SIGPIPE": 141, "SIGTERM": 143}
MAX_ALIKE = 3
"""Maximum number of similar warnings shown; a run's log has all of them."""


class RunByDefault(TyperGroup):
    """Commands; options without a command are those of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing and not args:  # a command is being completed
            return super().parse_args(ctx, args)
        if not args or (args[0].startswith("-") and args[0] not in ROOT_OPTIONS):
            args = ["run", *args]
        elif ctx.resilient_parsing:
            pass
        elif not args[0].startswith("-") and args[0] not in self.commands:
            advice = "Without a command, options are those of `run`."
            if args[0] in OTHER_COMMANDS:
                advice = f"Use `nip-astra {OTHER_COMMANDS[args[0]]}`."
            raise UnknownNameError("command", args[0], self.commands, advice)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _exits_refused():
                result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader of our output has seen enough: `nip-astra list | head`. Click's own exit
            # code 1 would report a failure.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_CODES["SIGPIPE"]) from None
        except SystemExit as error:
            # A command of ours ends by returning; what exits is a plug-in.
            raise UnexpectedExitError(error.code) from error
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            raise _in_one_line(error) from error

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        run = self.commands["run"]
        with run.make_context("run", [], parent=ctx, resilient_parsing=True) as context:
            return super().shell_complete(ctx, incomplete) + run.shell_complete(context, incomplete)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        run = self.commands["run"]
        with run.make_context("run", [], parent=ctx, resilient_parsing=True) as sub_context:
            run.format_help(sub_context, formatter)


@contextmanager
def _exits_refused() -> Iterator[None]:
    """Let `os._exit` raise in this process: a plug-in's exit would end an unfinished run with 0.

    Forked processes can still use it.
    """
    exit_at_once, process_id = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process_id:
            exit_at_once(status)
        raise UnexpectedExitError(status, "os._exit")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_at_once


def _in_one_line(error: Any) -> ConfigurationError:
    """Convert an error of options or arguments to the program's own, with advice."""
    context = getattr(error, "ctx", None)
    option_name = getattr(error, "option_name", "") or ""
    names: list[str] = []
    valid_options: set[str] = set()
    if context is not None:
        valid_options = {name for parameter in context.command.params for name in parameter.opts}
        while context.parent is not None:
            names.insert(0, context.info_name)
            context = context.parent
    message = " ".join(error.format_message().split()).rstrip(".")
    advice = f"See `{' '.join(['nip-astra', *names, '--help'])}`."
    is_unlike_any = bool(
        option_name
        and option_name not in valid_options
        and not nearest_names(option_name, sorted(valid_options), 1)
    )
    if option_name == "--set" and names == ["resume"]:
        message = f"No such option: {option_name}"
        advice = "A resumed run keeps the parameters it was started with."
    elif option_name == "--config" and "--parameters" in valid_options:
        message = f"No such option: {option_name}"
        advice = "A parameter file is given by --parameters."
    elif "--set" in valid_options and ("extra argument" in message or is_unlike_any):
        message = f"No such option: {option_name}" if option_name else message
        advice = (
            "Parameters are set by --set, for instance --set training.lr=1e-4, and listed by "
            "`nip-astra show --trainer NAME`."
        )
    return ConfigurationError(f"{message[:1].lower()}{message[1:]}. {advice}")


app = typer.Typer(
    cls=RunByDefault,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="nip_astra: models trained against and with each other. Without a command: run.",
)


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Handle the options of the program itself."""


@app.command()
@shared_options(*EXPERIMENT, *RUN, "test_run", "dry_run")
def run(options: Mapping[str, Any]) -> None:
    """Train; `run` is what options without a command mean."""
    experiment, settings = _experiment_arguments(options), settings_of(options)
    from nip_astra.progress import showing

    with showing("Loading", enabled=settings.get("progress") is not False), collection_suspended():
        from nip_astra.resolving.resolution import resolve_experiment

        resolved = resolve_experiment(**experiment)
    train_or_estimate(resolved, settings, is_dry=options["dry_run"])


@app.command()
@shared_options(
    "plugin", "trust", "device", "wandb", "track", "runs_dir", "num_threads", "settings"
)
def resume(
    options: Mapping[str, Any],
    run: Annotated[str, run_argument("Run id, or run directory, e.g. runs/<run id>.")],
    allow_changed_data: Annotated[
        bool, typer.Option("--allow-changed-data", help="Continue although data files changed.")
    ] = False,
) -> None:
    """Resume a stopped run from its latest checkpoint."""
    settings = settings_of(options)
    from nip_astra.experiment_settings import ExperimentSettings
    from nip_astra.progress import showing
    from nip_astra.tracking.run_directory import RunDirectory

    # Before torch is loaded.
    RunDirectory.find(run, settings.get("runs_dir", ExperimentSettings().runs_dir))
    with showing("Loading", enabled=settings.get("progress") is not False), collection_suspended():
        from nip_astra.run import resume_experiment
    plugins, is_trusted = options["plugin"] or [], options["trust"]
    print_outcome(
        resume_experiment(
            run,
            plugins=plugins,
            is_trusted=is_trusted,
            allow_changed_data=allow_changed_data,
            **settings,
        )
    )


@app.command(name="check-resume")
@shared_options(*EXPERIMENT, "device", "num_threads", "settings")
def check_resume(
    options: Mapping[str, Any],
    kills: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, max=100_000, help="Runs that are killed.")
    ] = 10,
    iterations: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, help="Iterations to which loops are cut; by default 4."
        ),
    ] = None,
    runs_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep the runs there, also if all are equal.")
    ] = None,
) -> None:
    """Kill short runs at random file operations, resume and compare; exit code 1 if they differ."""
    experiment = _experiment_arguments(options)
    from nip_astra import resume_check
    from nip_astra.resolving.resolution import resolve_experiment

    resolved = resolve_experiment(**experiment)
    folder = Path(runs_dir or tempfile.mkdtemp(prefix="check-resume-"))

    def show_kill(kill: resume_check.KilledRun) -> None:
        write_line(f"killed before {kill.operation}: {kill.difference or 'equal'}")

    try:
        settings = settings_of({**options, "runs_dir": None})
        check = resume_check.check_resume(
            resolved,
            folder,
            num_kills=kills,
            max_iterations=iterations or resume_check.MAX_ITERATIONS,
            on_kill=show_kill,
            **settings,
        )
    except NipAstraError:
        if runs_dir is None:
            shutil.rmtree(folder)
        raise
    except Exception as error:
        raise WorkerProcessError(
            f"an uninterrupted run failed: {type(error).__name__}: {error}. Its folder is in "
            f"{folder}; run it without check-resume first."
        ) from error
    killed_runs = counted(len(check.kills), "killed run")
    if check.is_equal:
        operations = counted(check.num_operations, "file operation")
        write_line(f"{killed_runs} of {operations}: all equal")
        if check.num_resumed:
            write_line(f"{check.num_resumed} of them trained further from a checkpoint")
        else:
            write_line("nothing was resumed: use more --kills or --iterations")
        if runs_dir is None:
            shutil.rmtree(folder)
        return
    if check.unlike:
        write_line(f"two uninterrupted runs differ: {check.unlike}")
    else:
        num_different = sum(bool(kill.difference) for kill in check.kills)
        write_line(f"different: {num_different} of {killed_runs}")
    write_line(f"runs       {folder}")
    raise typer.Exit(RUNS_DIFFER)


@app.command(name="list")
@shared_options("plugin")
@collection_suspended()
def list_names(
    options: Mapping[str, Any],
    kind: Annotated[
        str | None, typer.Argument(help="trainers, scenarios, scorers, language_models, ...")
    ] = None,
) -> None:
    """List registered names with their origin and description."""
    from rich.text import Text

    from nip_astra.evaluation.tables import plain_table
    from nip_astra.overview import registered

    console, entries = open_console(), registered(kind, options["plugin"] or [])
    for title in dict.fromkeys(entry.kind for entry in entries):
        has_origin = title != "scenarios"
        headings = ["name", "from", "description"] if has_origin else ["name", "description"]
        table = plain_table(title, *headings)
        for entry in entries:
            if entry.kind != title:
                continue
            cells = [entry.name, entry.origin, entry.purpose]
            if not has_origin:
                del cells[1]
            table.add_row(*map(Text, cells))
        console.print(table, "")


@app.command()
@shared_options(*EXPERIMENT)
@collection_suspended()
def show(
    options: Mapping[str, Any],
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print a parameter file.")] = False,
    text: Annotated[
        str | None,
        typer.Argument(metavar="[TEXT]", help="Search parameters, settings and commands for it."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what each parameter is; [TEXT]: search.")
    ] = False,
    settings: Annotated[
        bool, typer.Option("--settings", help="List the settings, which `--settings A=B` sets.")
    ] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show those as well that nothing in the run reads.")
    ] = False,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Show the prompts of chat models in a protocol.")
    ] = False,
) -> None:
    """Show every parameter with its value, origin and description."""
    experiment = _experiment_arguments(options)
    from nip_astra import overview

    if settings:
        show_parts(lambda: [overview.described_table(overview.every_setting())], dict)
        return
    if text is not None:
        descriptions = [*overview.every_parameter(), *described_commands()]
        if options.get("plugin") or options.get("parameters"):
            # The shipped schema lacks the parameters of plug-ins.
            shipped_names = {description.name for description in descriptions}
            for description in overview.show(**experiment).described():
                if description.name not in shipped_names:
                    descriptions.append(description)
        matches = overview.find_described(text, descriptions)
        if not matches:
            raise ConfigurationError(
                f"nothing is described by {text!r}. Try one word of it, or list all by --explain."
            )
        show_parts(lambda: [overview.described_table(matches[:MAX_MATCHES])], dict)
        if len(matches) > MAX_MATCHES:
            write_line(f"and {len(matches) - MAX_MATCHES} more; give more words to see fewer")
        return
    if prompts:
        write_line(overview.prompts_of(**experiment))
        return
    view = overview.show(**experiment)
    if as_yaml:
        write_line(view.to_yaml())
        return
    show_parts(lambda: view.tables(explain=explain, show_all=show_all), dict)


@app.command(name="time")
@shared_options(*EXPERIMENT, "device", "num_threads", "as_json")
def time_parts(
    options: Mapping[str, Any],
    components: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMPONENT]...", help="rollout, update, ...; all if none."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Times to measure, after one that is not.")
    ] = 5,
) -> None:
    """Time parts of a training iteration, e.g. rollout and update; write nothing."""
    experiment = _experiment_arguments(options)
    from rich.text import Text

    from nip_astra.evaluation.tables import plain_table
    from nip_astra.progress import showing
    from nip_astra.resolving.resolution import resolve_experiment
    from nip_astra.run import prepare_experiment
    from nip_astra.trainers.dry_run import time_components

    with showing("Loading"):
        resolved = resolve_experiment(**experiment)
    prepared = prepare_experiment(resolved, **settings_of(options))
    seconds = time_components(prepared.trainer, components or [], num_repeats=repeats)
    table = plain_table(None, "component", "median", "least", "most")
    for name, times in seconds.items():
        figures = (median(times), min(times), max(times))
        table.add_row(Text(name), *(f"{1000 * figure:,.1f} ms" for figure in figures))
    show_parts(lambda: [table], lambda: {"seconds": seconds}, as_json=options["as_json"])


@app.command()
@shared_options("trainer", "scenario", "plugin")
@collection_suspended()
def schema(options: Mapping[str, Any]) -> None:
    """Print the JSON Schema of all parameter files, or of those of a trainer and scenario."""
    experiment = _experiment_arguments(options)
    from nip_astra.overview import schema as schema_of

    write_line(to_json(schema_of(**experiment), indent=1))


for command in measuring.COMMANDS:
    app.command()(command)
app.command()(measuring.analyse)
app.command()(serving.serve)
app.command()(recipes.task)
app.command()(recipes.stress)
app.command()(sweep)
app.command(name="compare-dumps")(measuring.compare_dumps)
app.add_typer(data.app, name="dataset")


def command_tree() -> Iterator[tuple[str, Any]]:
    """Yield each command by name, in the order of the help; those of groups as `dataset create`."""
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        # A group has commands of its own.
        subcommands = getattr(command, "commands", {})
        for subcommand_name, subcommand in subcommands.items():
            yield f"{name} {subcommand_name}", subcommand
        if not subcommands:
            yield name, command


def described_commands() -> Iterator[Described]:
    """Yield commands and their options."""
    from nip_astra.overview import Described

    for name, command in command_tree():
        yield Described(f"nip-astra {name}", "", " ".join((command.help or "").split()))
        for parameter in command.params:
            has_default = parameter.default not in (None, False, ()) and not parameter.required
            default = str(parameter.default) if has_default else ""
            if parameter.param_type_name == "option":
                label = max(parameter.opts, key=len)
            else:
                label = parameter.metavar or parameter.name.upper()
            yield Described(f"nip-astra {name} {label}", default, parameter.help or "")


def _experiment_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `resolve_experiment`; refuse wrong names and files before torch loads."""
    from nip_astra.parameters.content import find_scenario
    from nip_astra.parameters.files import parse_overrides, read_yaml_layers

    trainer, scenario = options.get("trainer"), options.get("scenario")
    file, overrides, plugins = (
        options.get("parameters"),
        options.get("overrides"),
        options.get("plugin"),
    )
    folder = None if scenario is None else find_scenario(scenario)
    if file is not None:
        read_yaml_layers(Path(file), source=file)
    parse_overrides(overrides or [])
    # A plug-in, also one of the scenario, may register trainers.
    has_plugin = bool(plugins or file) or (folder is not None and (folder / "plugin.py").is_file())
    if trainer is not None and not has_plugin:
        valid_names = trainer_names()
        if trainer not in valid_names:
            raise UnknownNameError("trainer", trainer, valid_names, "Load your own with --plugin.")
    return {
        "trainer": trainer,
        "scenario": scenario,
        "parameter_file": file,
        "overrides": overrides or [],
        "seed": options.get("seed"),
        "plugins": plugins or [],
        "is_trusted": options.get("trust", False),
    }


@contextmanager
def showing_notes() -> Iterator[None]:
    """Write the library's warnings to standard error within the block."""
    logger, handler = logging.getLogger("nip_astra"), NoteHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class NoteHandler(logging.Handler):
    """Writes warnings to standard error, each once and above a progress bar.

    Warnings marked by `is_repeated_at_end` are left to the end of the run. If standard error is
    closed, nothing is written and the run continues.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._written: set[str] = set()
        self._alike: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        is_error = record.levelno > logging.WARNING
        if is_error or text in self._written or getattr(record, "is_repeated_at_end", False):
            return
        self._written.add(text)
        self._alike[record.msg] += 1
        if self._alike[record.msg] <= MAX_ALIKE:
            # A closed pipe is an OSError, a closed file a ValueError.
            with suppress(OSError, ValueError):
                if sys.stderr is not None:  # as Python sets it if the process has none
                    sys.stderr.write(safe_text(f"warning: {text}\n"))


def _print_safely(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(safe_text("".join(traceback.format_exception(kind, error, trace))))


def main() -> None:
    """Run the program: exit code 0 done, 2 wrong input, 130 or 143 stopped by a signal."""
    # Progress bars of model loading and telemetry say nothing to the user of a run.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # A closed stream is none to Python, and half of what writes to it does not ask.
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the end
        elif isinstance(stream := getattr(sys, name), TextIOWrapper):
            # A terminal of another encoding than UTF-8 lacks most characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        with showing_notes():
            app()
    except NipAstraError as error:
        if "--debug" in sys.argv:
            sys.stderr.write(safe_text(traceback.format_exc()))
        is_stop = isinstance(error, StopRequested)
        rank = 0
        with suppress(ConfigurationError):  # perhaps the error itself
            rank = rank_of_process()
        # Of several processes of a run, the leader alone says why it ends.
        if rank == 0 or not (is_stop or isinstance(error, LostProcessError)):
            head = f"process {rank}: " if rank else ""
            sys.stderr.write(f"{head}{'' if is_stop else 'error: '}{error}\n")
        sys.exit(EXIT_CODES.get(error.signal_name, 2) if isinstance(error, StopRequested) else 2)
    except Exception:
        # A fault of ours or of a plug-in, whose message may quote what a model said.
        sys.excepthook = _print_safely
        raise
