"""What the commands do; imported when a command runs."""

from __future__ import annotations

import json
import sys
from typing import Any

import transformers
import yaml
from rich.console import Console
from rich.table import Table

from nip_astra.errors import UnknownNameError
from nip_astra.parameters.content import find_scenario, scenario_names
from nip_astra.parameters.loading import flatten
from nip_astra.plugins import load_plugin
from nip_astra.registry import ALL_REGISTRIES
from nip_astra.report.terminal import print_dry_run, print_results
from nip_astra.resolution import resolve_experiment
from nip_astra.run import (
    ExperimentResult,
    prepare_experiment,
    resume_experiment,
    run_experiment,
)


def run(experiment: dict[str, Any], settings: dict[str, Any], *, dry_run: bool) -> None:
    """Train, or with `dry_run` show what training would cost."""
    _quieten_libraries()
    resolved = resolve_experiment(**experiment)
    if dry_run:
        prepared = prepare_experiment(resolved, **settings)
        print_dry_run(prepared.trainer.dry_run(), Console())
        return
    _report(run_experiment(resolved, **settings))


def resume(path: str, settings: dict[str, Any]) -> None:
    """Go on with a run."""
    _quieten_libraries()
    _report(resume_experiment(path, **settings))


def list_names(kind: str | None, plugins: list[str]) -> None:
    """Print the names of one kind, or of every kind."""
    for spec in plugins:
        load_plugin(spec)
    kinds = [_singular(kind)] if kind else sorted(ALL_REGISTRIES)
    console = Console()
    for name in kinds:
        registry = ALL_REGISTRIES[name]
        title = "scenario kinds" if name == "scenario" else f"{name.replace('_', ' ')}s"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("name", "from", "what it is"):
            table.add_column(column)
        for entry in registry.names():
            table.add_row(entry, registry.origin(entry), _first_line(registry.get(entry)))
        console.print(table, "")
        if name == "scenario":
            _print_scenarios(console)


def show(experiment: dict[str, Any], *, as_yaml: bool) -> None:
    """Print the resolved parameters."""
    resolved = resolve_experiment(**experiment)
    values = resolved.hyper_params.to_dict()
    if as_yaml:
        sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("parameter", "value", "from"):
        table.add_column(column, overflow="fold")
    for path, value in flatten(values):
        table.add_row(path, _short(value), resolved.sources.get(path, ""))
    Console().print(table)


def schema(experiment: dict[str, Any]) -> None:
    """Print the JSON Schema."""
    resolved = resolve_experiment(**experiment)
    sys.stdout.write(json.dumps(type(resolved.hyper_params).model_json_schema(), indent=2) + "\n")


def _report(result: ExperimentResult) -> None:
    print_results(result.results, result.run_directory.path, Console())


def _quieten_libraries() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _print_scenarios(console: Console) -> None:
    table = Table(title="scenarios", title_justify="left", box=None, pad_edge=False)
    table.add_column("name")
    table.add_column("what it is")
    for name in scenario_names():
        readme = find_scenario(name) / "README.md"
        lines = readme.read_text(encoding="utf-8").splitlines() if readme.is_file() else []
        text = next((line for line in lines if line and not line.startswith("#")), "")
        table.add_row(name, text)
    console.print(table, "")


def _singular(kind: str) -> str:
    name = kind.removesuffix("s").replace("-", "_")
    if name not in ALL_REGISTRIES:
        raise UnknownNameError(
            "kind", kind, [f"{known}s" for known in ALL_REGISTRIES], "Without one, all are listed."
        )
    return name


def _first_line(entry: object) -> str:
    return (entry.__doc__ or "").strip().splitlines()[0] if entry.__doc__ else ""


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 100 else f"{text[:97]}..."
