"""The command that runs many experiments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nip_astra.cli.options import (
    complain,
    open_console,
    option,
    settings_of,
    shared_options,
    write_line,
)
from nip_astra.errors import NipAstraError, UnknownNameError, counted
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.safe_text import safe_text, to_json

if TYPE_CHECKING:
    from rich.table import Table

    from nip_astra.sweep.plan import FinishedRun, SweepPlan
    from nip_astra.sweep.results import SweepResults


@shared_options("plugin", "trust", "device", "wandb", "settings", "as_json")
def sweep(
    options: Mapping[str, Any],
    plan: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="YAML file of a sweep, or a sweep's folder."),
    ] = None,
    trainers: Annotated[
        str | None, option("NAMES", "Trainers, e.g. ast_dpo,ast_ipo.", "--trainer")
    ] = None,
    scenarios: Annotated[
        str | None, option("NAMES", "Scenarios; the presets' if none.", "--scenario")
    ] = None,
    seeds: Annotated[str | None, option("SEEDS", "0..4, or 0,3,7.")] = None,
    grid: Annotated[
        list[str] | None, option("A.B=C,D", "Values to run each of. Repeatable.", "--set")
    ] = None,
    parameters: Annotated[
        str | None, option("FILE", "Parameter file that all runs start from.")
    ] = None,
    sweep_dir: Annotated[str | None, option("DIR", "Where its runs are kept: runs/sweep.")] = None,
    ranges: Annotated[
        list[str] | None,
        option("A.B=C..D", "Range to search, e.g. 'training.lr=log 1e-5..1e-3'.", "--search"),
    ] = None,
    num_trials: Annotated[int | None, option("NUMBER", "Trials of a search: 20.", min=1)] = None,
    sampler: Annotated[str | None, option("NAME", "Proposes trials: tpe or random.")] = None,
    pruner: Annotated[str | None, option("NAME", "Stops trials: median, halving or none.")] = None,
    objective: Annotated[
        str | None, option("NAME", "Figure to search by: dev/failure_rate.")
    ] = None,
    direction: Annotated[str | None, option("NAME", "maximize or minimize the objective.")] = None,
    num_processes: Annotated[
        int | None, option("NUMBER", "Runs at once: 1.", min=1, max=1024)
    ] = None,
    on: Annotated[str, option("NAME", "Launcher of the runs: processes or ray.")] = "processes",
    cpus_per_run: Annotated[float, option("NUMBER", "Cores of a run on Ray.", min=0)] = 1,
    gpus_per_run: Annotated[float, option("NUMBER", "GPUs of a run on Ray.", min=0)] = 0,
    shard: Annotated[str | None, option("K/N", "The k-th of n parts of the runs.")] = None,
    metric: Annotated[
        list[str] | None, option("NAME", "Figure to show, e.g. failure_rate. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the runs; start none.")
    ] = False,
) -> None:
    """Run every combination of trainers, values and seeds, or search; resume if interrupted."""
    from nip_astra.sweep.plan import RunStatus, read_plan
    from nip_astra.sweep.runner import SweepOptions, check_sweep, run_sweep

    sweep_plan = read_plan(plan, options)
    directory, as_json = _choose_folder(plan, sweep_dir), options["as_json"]
    sweep_options = SweepOptions(
        settings=settings_of(options),
        num_processes=num_processes,
        shard=shard,
        place=on,
        num_cpus=cpus_per_run,
        num_gpus=gpus_per_run,
        is_trusted=options["trust"],
        metrics=metric or [],
    )
    if dry_run:
        check_sweep(sweep_plan, sweep_options, directory)
        _list(sweep_plan, directory, shard, as_json=as_json)
        return
    outcomes: list[RunStatus] = []

    def show_end(finished: FinishedRun) -> None:
        outcomes.append(finished.status)
        position = f"{len(outcomes)}/{_num_runs(sweep_plan, shard)}"
        _show_run(finished, position, as_json=as_json)

    results = run_sweep(
        directory,
        options=sweep_options,
        progress=not as_json,
        on_end=show_end,
        **sweep_plan.to_dict(),
    )
    if results.rows:
        _show(results, sweep_options.metrics, as_json=as_json)
    num_failed = outcomes.count(RunStatus.FAILED)
    if num_failed:
        raise NipAstraError(
            f"{num_failed} of {counted(len(outcomes), 'run')} failed; their logs are in "
            f"{directory / 'logs'}. Fix the cause and continue with: nip-astra sweep {directory}"
        )


def _choose_folder(source: str | None, sweep_dir: str | None) -> Path:
    """Return the folder of the runs: --sweep-dir, an existing sweep, or the name of the file."""
    if sweep_dir is not None:
        return Path(sweep_dir)
    if source is not None and Path(source).is_dir():
        return Path(source)
    return Path(ExperimentSettings().runs_dir) / (Path(source).stem if source else "sweep")


def _num_runs(plan: SweepPlan, shard: str | None) -> int:
    from nip_astra.sweep.plan import shard_of

    if plan.search is not None:
        return plan.search.num_trials * len(plan.seeds)
    return len(shard_of(plan.runs, shard))


def _list(plan: SweepPlan, directory: Path, shard: str | None, *, as_json: bool) -> None:
    from nip_astra.sweep.plan import shard_of, status_of

    if as_json:
        runs = [] if plan.search else shard_of(plan.runs, shard)
        folders = [run.folder_in(directory) for run in runs]
        rows = [{"run_id": folder.name, "status": status_of(folder)} for folder in folders]
        write_line(to_json({"plan": plan.to_dict(), "runs": rows}))
        return
    if plan.search is None:
        for run in shard_of(plan.runs, shard):
            folder = run.folder_in(directory)
            status = status_of(folder)
            write_line(f"{folder.name}  {status:8}  {run.arm.name}  seed {run.seed}")
        return
    objectives = {plan.objective_of(plan.resolve(arm)) for arm in plan.first_arms}
    write_line(
        f"{counted(plan.search.num_trials, 'trial')} of {counted(len(plan.seeds), 'run')} each, by "
        f"{plan.search.sampler}, to {plan.search.direction} {', '.join(sorted(objectives))}"
    )
    for path, choice in plan.choices.items():
        write_line(f"{path}  {choice}")


def _show_run(finished: FinishedRun, position: str, *, as_json: bool) -> None:
    run = finished.run
    text = f"[{position}] {run.arm.name} seed {run.seed}: {finished.status}"
    if finished.seconds:
        text += f" after {finished.seconds:.0f} s"
    if finished.message:
        text += f": {finished.message}"
    # Standard output has nothing but JSON then.
    if as_json or finished.status == "failed":
        complain(text)
    else:
        write_line(text)


def _show(results: SweepResults, metrics: Sequence[str], *, as_json: bool) -> None:
    from nip_astra.sweep.results import SUMMARY, TABLE
    from nip_astra.tracking.figure_names import current_figure_name
    from nip_astra.tracking.run_directory import REPORT

    names = [current_figure_name(name) for name in metrics] or [results.headline()]
    for name in names:
        if name not in results.figure_names:
            raise UnknownNameError("figure", name, results.figure_names, "Give it by --metric.")
    if as_json:
        write_line(json.dumps([row for name in names for row in _rows(results, name)]))
        return
    console = open_console()
    for name in names:
        console.print(_table(results, name), "")
    for caution in results.cautions(names):
        write_line(f"caution    {caution}")
    for title, file in (("table", TABLE), ("summary", SUMMARY), ("report", REPORT)):
        write_line(f"{title:10} {results.directory / file}")


def _table(results: SweepResults, name: str) -> Table:
    from nip_astra.evaluation.tables import plain_table

    table = plain_table(
        f"{name}, means over seeds with 95 % intervals of Student's t",
        *("arm", "seeds", "before", "after", "interval", "each seed", "less the first", "p"),
    )
    for arm, before, after, difference in results.compared(name):
        if after is None:
            table.add_row(safe_text(arm.name), "0", *[""] * 6)
            continue
        table.add_row(
            safe_text(arm.name),
            str(len(after.values)),
            "" if before is None else f"{before.mean:.3g}",
            f"{after.mean:.3g}",
            _interval(after.low, after.high),
            after.each("{:.3g}".format),
            ""
            if difference is None
            else f"{difference.mean:+.3g} {_interval(difference.low, difference.high)}",
            "" if difference is None or difference.p is None else f"{difference.p:.2g}",
        )
    return table


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{low:.3g}, {high:.3g}]"


def _rows(results: SweepResults, name: str) -> list[dict[str, Any]]:
    return [
        {"arm": arm.name, "trainer": arm.trainer, "values": dict(arm.values), "figure": name}
        | after._asdict()
        | {"less_first_arm": None if difference is None else difference._asdict()}
        | {"selected_by": results.selected_by}
        for arm, _, after, difference in results.compared(name)
        if after is not None
    ]
