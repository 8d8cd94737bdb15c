"""What the commands do; imported when a command runs."""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import transformers
import typer
from rich.console import Console
from rich.text import Text

from nip_astra import resume_check as checking
from nip_astra.cli.terminal import open_console, plain_table, say
from nip_astra.distributed.launch import rank_of_process
from nip_astra.errors import NipAstraError, UnknownNameError, WorkerProcessError
from nip_astra.parameters.content import find_scenario, scenario_names
from nip_astra.plugins import load_plugin
from nip_astra.registry import ALL_REGISTRIES, Registry
from nip_astra.report.terminal import print_dry_run, print_results
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.resume_check import KilledRun
from nip_astra.run import (
    ExperimentResult,
    prepare_experiment,
    resume_experiment,
    run_experiment,
)
from nip_astra.safe_text import to_json
from nip_astra.trainers.timing import time_components

REGISTRY_MODULES = (
    "nip_astra.language_models.base",
    "nip_astra.reward_terms.base",
    "nip_astra.scenario_base.text.analysers.base",
    "nip_astra.scenarios.registry",
    "nip_astra.scenarios.images.pretrained.base",
    "nip_astra.scorers.base",
    "nip_astra.trainers.registry",
)
"""Modules with a registry; plug-ins may add registries of their own."""
RUNS_DIFFER = 1
"""Exit code where a resumed run differs from an uninterrupted one."""


def run(experiment: dict[str, Any], settings: dict[str, Any], *, dry_run: bool) -> None:
    """Train, or with `dry_run` show what training would cost."""
    quieten_libraries()
    resolved = resolve_experiment(**experiment)
    if dry_run:
        prepared = prepare_experiment(resolved, **settings)
        trainer = prepared.trainer
        price = trainer.settings.device_price
        print_dry_run(trainer.dry_run(), open_console(), device_price=price)
        return
    _report(run_experiment(resolved, **settings))


def resume(path: str, settings: dict[str, Any], *, plugins: list[str], is_trusted: bool) -> None:
    """Go on with a run."""
    quieten_libraries()
    _report(resume_experiment(path, plugins=plugins, is_trusted=is_trusted, **settings))


def check_resume(
    experiment: dict[str, Any], settings: dict[str, Any], *, num_kills: int, runs_dir: str | None
) -> None:
    """Kill short runs, resume and compare them; exit with 1 where one differs."""
    quieten_libraries()
    resolved = resolve_experiment(**experiment)
    kept = Path(runs_dir or tempfile.mkdtemp(prefix="check-resume-"))

    def tell(one: KilledRun) -> None:
        say(f"killed before {one.operation}: {one.difference or 'equal'}")

    try:
        found = checking.check_resume(resolved, kept, num_kills=num_kills, on_kill=tell, **settings)
    except NipAstraError:
        if runs_dir is None:
            shutil.rmtree(kept)
        raise
    except Exception as error:
        raise WorkerProcessError(
            f"an uninterrupted run failed: {type(error).__name__}: {error}. Its folder is in "
            f"{kept}; run it without check-resume first."
        ) from error
    if found.is_equal:
        say(f"{len(found.kills)} killed runs of {found.num_operations} file operations: all equal")
        if runs_dir is None:
            shutil.rmtree(kept)
        return
    num_unlike = sum(bool(one.difference) for one in found.kills)
    say(
        f"two uninterrupted runs differ: {found.unlike}"
        if found.unlike
        else f"{num_unlike} of {len(found.kills)} killed runs differ"
    )
    say(f"runs       {kept}")
    raise typer.Exit(RUNS_DIFFER)


def time_parts(
    experiment: dict[str, Any],
    settings: dict[str, Any],
    components: Sequence[str],
    *,
    num_repeats: int,
    as_json: bool,
) -> None:
    """Time parts of an experiment's iteration; writes nothing."""
    quieten_libraries()
    prepared = prepare_experiment(resolve_experiment(**experiment), **settings)
    seconds = time_components(prepared.trainer, components, num_repeats=num_repeats)
    if as_json:
        say(to_json({"seconds": seconds}, indent=2))
        return
    table = plain_table(None, "component", "median", "least", "most")
    for name, times in seconds.items():
        figures = (median(times), min(times), max(times))
        table.add_row(Text(name), *(f"{1000 * figure:,.1f} ms" for figure in figures))
    open_console().print(table)


def list_names(kind: str | None, plugins: list[str]) -> None:
    """Print the names of one kind, or of every kind."""
    for module in REGISTRY_MODULES:
        importlib.import_module(module)
    for spec in plugins:
        load_plugin(spec)
    console = open_console()
    for name in [_singular(kind)] if kind else sorted(ALL_REGISTRIES):
        title = "scenario kinds" if name == "scenario" else f"{name.replace('_', ' ')}s"
        registry = ALL_REGISTRIES[name]
        table = plain_table(title, "name", "from", "what it is")
        for entry in registry.names():
            table.add_row(
                Text(entry), Text(registry.origin(entry)), Text(_purpose(registry, entry))
            )
        console.print(table, "")
        if name == "scenario":
            _print_scenarios(console)


def _report(result: ExperimentResult) -> None:
    if rank_of_process() > 0:
        return
    print_results(result.results, result.run_directory.path, open_console())


def quieten_libraries() -> None:
    """Keep progress bars and advice of transformers off the screen."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _print_scenarios(console: Console) -> None:
    table = plain_table("scenarios", "name", "what it is")
    for name in scenario_names():
        readme = find_scenario(name) / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        blocks = [block for block in text.split("\n\n") if block and not block.startswith("#")]
        table.add_row(name, Text(" ".join(blocks[0].split()) if blocks else ""))
    console.print(table, "")


def _singular(kind: str) -> str:
    name = kind.removesuffix("s").replace("-", "_")
    if name not in ALL_REGISTRIES:
        raise UnknownNameError(
            "kind", kind, [f"{known}s" for known in ALL_REGISTRIES], "Without one, all are listed."
        )
    return name


def _purpose(registry: Registry[Any], name: str) -> str:
    """The first line of a docstring, or why it cannot be read; one fault hides no others."""
    try:
        text = registry.get(name).__doc__ or ""
    except NipAstraError as error:
        return f"cannot be used: {error}"
    return text.strip().partition("\n")[0]
