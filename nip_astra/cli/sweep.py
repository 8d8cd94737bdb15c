"""The command that runs many experiments."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nip_astra.cli.options import (
    AsJson,
    Debug,
    Device,
    Plugins,
    Settings,
    Trust,
    Wandb,
    complain,
    say,
    settings_of,
    show,
)
from nip_astra.errors import ConfigurationError, NipAstraError, UntrustedRunError
from nip_astra.safe_text import safe_text, to_json

if TYPE_CHECKING:
    from nip_astra.sweep.launchers import FinishedRun
    from nip_astra.sweep.plan import SweepPlan
    from nip_astra.sweep.results import SweepResults
    from nip_astra.sweep.sweeping import SweepOptions


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
    from nip_astra.experiment_settings import ExperimentSettings
    from nip_astra.sweep.launchers import RunStatus
    from nip_astra.sweep.plan import SweepPlan, grid_of, seeds_of
    from nip_astra.sweep.results import read_sweep
    from nip_astra.sweep.search_space import space_of
    from nip_astra.sweep.sweeping import SweepOptions, check, do_sweep

    given: dict[str, Any] = {} if plan is None else _stored(Path(plan), is_trusted=trust).to_dict()
    own: dict[str, Any] = {
        "trainers": trainer and _names(trainer),
        "scenarios": scenario and _names(scenario),
    }
    own |= {"seeds": seeds and seeds_of(seeds), "parameters": parameters}
    given |= {name: value for name, value in own.items() if value is not None}
    if grid:
        given["grid"] = {**given.get("grid", {}), **grid_of(grid)}
    if plugin:
        given["plugins"] = [*given.get("plugins", []), *plugin]
    searched: dict[str, Any] = {
        "num_trials": num_trials,
        "sampler": sampler,
        "pruner": pruner,
        "objective": objective,
        "direction": direction,
        "space": space_of(search) if search else None,
    }
    searched = {name: value for name, value in searched.items() if value is not None}
    if searched:
        before = given.get("search") or {}
        space = {**before.get("space", {}), **searched.get("space", {})}
        given["search"] = {**before, **searched, "space": space}
    if not given.get("trainers"):
        raise ConfigurationError(
            "a sweep needs a trainer. Give --trainer, for instance ast_dpo,ast_ipo, or a file with "
            "`trainers:`."
        )
    chosen = SweepPlan.from_dict(given)
    directory = Path(ExperimentSettings().runs_dir) / (Path(plan).stem if plan else "sweep")
    if plan is not None and Path(plan).is_dir():
        directory = Path(plan)
    if sweep_dir is not None:
        directory = Path(sweep_dir)
    options = SweepOptions(
        settings=settings_of(settings, device=device, wandb=wandb),
        num_processes=num_processes,
        shard=shard,
        place=on,
        num_cpus=cpus_per_run,
        num_gpus=gpus_per_run,
        is_trusted=trust,
        metrics=metric or [],
    )
    check(chosen, options)
    if dry_run:
        for line in _planned(chosen, directory, options):
            say(line)
        return
    on_end = _printer(chosen, options, as_json=as_json)
    finished = do_sweep(chosen, directory, options, progress=not as_json, on_end=on_end)
    results = read_sweep(directory)
    if results.rows:
        print_results(results, options.metrics, as_json=as_json)
    num_failed = sum(one.status is RunStatus.FAILED for one in finished)
    if num_failed:
        raise NipAstraError(
            f"{num_failed} of {len(finished)} runs failed; their logs are in {directory / 'logs'}. "
            f"Correct the cause and continue with: nip-astra sweep {directory}"
        )


def _stored(path: Path, *, is_trusted: bool) -> SweepPlan:
    """The plan of a file, or of a sweep's folder."""
    from nip_astra.sweep.plan import read_plan
    from nip_astra.sweep.results import read_stored_plan
    from nip_astra.sweep.runner import PLAN_FILE, is_own_sweep

    stored = read_stored_plan(path) if path.is_dir() else read_plan(path)
    if path.is_dir() and not is_trusted and not is_own_sweep(path):
        raise UntrustedRunError(
            f"the sweep {path} is not known to be yours; running it would run the code and "
            f"parameters that its {PLAN_FILE} names. Read that file, then add --trust."
        )
    return stored


def _planned(plan: SweepPlan, directory: Path, options: SweepOptions) -> Iterator[str]:
    """The runs of a sweep, or the space of a search."""
    from nip_astra.sweep.plan import shard_of
    from nip_astra.sweep.sweeping import runner_of

    if plan.search is None:
        runner = runner_of(plan, directory, options)
        for run in shard_of(plan.runs, options.shard):
            yield f"{run.run_id}  {runner.status(run):8}  {run.arm.name}  seed {run.seed}"
        return
    objectives = {plan.objective_of(plan.resolve(arm)) for arm in plan.first_arms}
    yield (
        f"{plan.search.num_trials} trials of {len(plan.seeds)} runs each, by "
        f"{plan.search.sampler}, to {plan.search.direction} {', '.join(sorted(objectives))}"
    )
    for path, choice in plan.choices.items():
        yield f"{path}  {choice}"


def _printer(plan: SweepPlan, options: SweepOptions, *, as_json: bool) -> Any:
    """A function that prints a line about each run as it ends."""
    from tqdm import tqdm

    from nip_astra.sweep.launchers import RunStatus
    from nip_astra.sweep.plan import shard_of

    total = len(shard_of(plan.runs, options.shard))
    if plan.search is not None:
        total = plan.search.num_trials * len(plan.seeds)
    count = 0

    def on_end(one: FinishedRun) -> None:
        nonlocal count
        count += 1
        line = f"[{count}/{total}] {one.run.arm.name} seed {one.run.seed}: {one.status}"
        if one.seconds:
            line += f" after {one.seconds:.0f} s"
        if one.message:
            line += f": {one.message}"
        # A bar that is being drawn makes room for the line.
        with tqdm.external_write_mode(file=sys.stderr):
            (complain if as_json or one.status is RunStatus.FAILED else say)(line)

    return on_end


def print_results(found: SweepResults, metrics: Sequence[str], *, as_json: bool) -> None:
    """Print the chosen figures of each arm, or the headline, and where more is written."""
    from nip_astra.sweep.sweeping import REPORT, SUMMARY, TABLE

    names = list(metrics) or [found.headline()]
    unknown = [name for name in names if name not in found.figure_names]
    if unknown:
        raise ConfigurationError(
            f"the runs have no figure {unknown[0]!r}. They have {', '.join(found.figure_names)}."
        )
    if as_json:
        say(to_json([row for name in names for row in _rows(found, name)]))
        return
    show(lambda: [part for name in names for part in (_table(found, name), "")], dict)
    for caution in found.cautions(names):
        say(f"caution    {caution}")
    for kind, file in (("table", TABLE), ("summary", SUMMARY), ("report", REPORT)):
        say(f"{kind:<10} {found.directory / file}")


def _table(found: SweepResults, name: str) -> Any:
    from nip_astra.evaluation.tables import plain_table

    arms = found.arms
    table = plain_table(
        f"{name}, means over seeds with 95 % intervals of Student's t",
        *("arm", "seeds", "before", "after", "interval", "each seed", "less the first", "p"),
    )
    for arm in arms:
        after, before = found.over_seeds(arm, name), found.over_seeds(arm, name, "before")
        if after is None:
            table.add_row(safe_text(arm.name), "0", *[""] * 6)
            continue
        beside = found.difference(arm, arms[0], name) if arm != arms[0] else None
        table.add_row(
            safe_text(arm.name),
            str(len(after.values)),
            "" if before is None else f"{before.mean:.3g}",
            f"{after.mean:.3g}",
            _interval(after.low, after.high),
            " ".join(f"{value:.3g}" for value in after.values.values()),
            "" if beside is None else f"{beside.mean:+.3g} {_interval(beside.low, beside.high)}",
            "" if beside is None or beside.p is None else f"{beside.p:.2g}",
        )
    return table


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{low:.3g}, {high:.3g}]"


def _rows(found: SweepResults, name: str) -> Iterator[Mapping[str, Any]]:
    """A figure of each arm as plain values."""
    arms = found.arms
    for arm in arms:
        mean = found.over_seeds(arm, name)
        if mean is None:
            continue
        beside = found.difference(arm, arms[0], name) if arm != arms[0] else None
        described = {"arm": arm.name, "trainer": arm.trainer, "values": dict(arm.values)}
        yield {
            **described,
            "figure": name,
            **mean._asdict(),
            "less_first_arm": None if beside is None else beside._asdict(),
            "selected_by": found.selected_by,
        }


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
