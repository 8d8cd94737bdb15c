"""What `nip-astra sweep` does; imported when it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from nip_astra.cli.terminal import complain, open_console, plain_table, say
from nip_astra.errors import ConfigurationError, NipAstraError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin
from nip_astra.report.page import write_report
from nip_astra.safe_text import safe_text
from nip_astra.sweep.plan import (
    PlannedRun,
    SweepPlan,
    grid_of,
    read_plan,
    seeds_of,
    shard_of,
)
from nip_astra.sweep.results import SweepResults, read_stored_plan, read_sweep
from nip_astra.sweep.runner import FinishedRun, RunStatus, SweepRunner
from nip_astra.tracking.run_directory import write_atomically

MAX_RUNS_OF_REPORT = 24
"""A page about more runs is too long to read."""


def plan_of(
    source: str | None,
    *,
    trainers: str | None,
    scenarios: str | None,
    seeds: str | None,
    grid: Sequence[str],
    parameters: str | None,
    plugins: Sequence[str],
) -> SweepPlan:
    """The plan of a file or folder, with what the command line says in its place."""
    stored = None
    if source is not None:
        path = Path(source)
        stored = read_stored_plan(path) if path.is_dir() else read_plan(path)
    given: dict[str, Any] = {} if stored is None else stored.to_dict()
    if trainers is not None:
        given["trainers"] = _names(trainers)
    if scenarios is not None:
        given["scenarios"] = _names(scenarios)
    if seeds is not None:
        given["seeds"] = seeds_of(seeds)
    if grid:
        given["grid"] = {**given.get("grid", {}), **grid_of(grid)}
    if parameters is not None:
        given["parameters"] = parameters
    if plugins:
        given["plugins"] = [*given.get("plugins", []), *plugins]
    if not given.get("trainers"):
        raise ConfigurationError(
            "a sweep was asked for, but no trainer. Name one or several, for instance --trainer "
            "ast_dpo,ast_ipo, or give a file with `trainers:`."
        )
    return SweepPlan.from_dict(given)


def folder_of(source: str | None, sweep_dir: str | None) -> Path:
    """Where the runs are kept: as told, the given folder, or one named for the file."""
    if sweep_dir is not None:
        return Path(sweep_dir)
    if source is not None and Path(source).is_dir():
        return Path(source)
    return Path(ExperimentSettings().runs_dir) / (Path(source).stem if source else "sweep")


def sweep(
    plan: SweepPlan,
    directory: Path,
    settings: Mapping[str, Any],
    *,
    num_processes: int,
    shard: str | None,
    metrics: Sequence[str],
    is_trusted: bool,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Check all, run what has not ended, and tell what was found."""
    for plugin in plan.plugins:
        load_plugin(plugin)
    # Before anything runs, so that the twentieth run does not fail for a slip of the pen.
    ExperimentSettings.from_dict({**ExperimentSettings().to_dict(), **settings})
    plan.check()
    runs = shard_of(plan.runs, shard)
    runner = SweepRunner(
        plan, directory, num_processes=num_processes, settings=settings, is_trusted=is_trusted
    )
    if is_dry:
        for run in runs:
            say(f"{run.run_id}  {runner.status(run):8}  {run.arm.name}  seed {run.seed}")
        return
    finished = runner.run(runs, on_end=_Teller(len(runs), as_json=as_json))
    failed = [one for one in finished if one.status is RunStatus.FAILED]
    found = read_sweep(directory)
    if found.rows:
        _tell(found, metrics, as_json=as_json)
    if failed:
        raise NipAstraError(
            f"{len(failed)} of {len(runs)} runs failed; their logs are in {directory / 'logs'}. "
            f"Mend the cause and go on with: nip-astra sweep {directory}"
        )


class _Teller:
    """Tells of each run as it ends."""

    def __init__(self, num_runs: int, *, as_json: bool) -> None:
        self.num_runs = num_runs
        self.as_json = as_json
        self.count = 0

    def __call__(self, one: FinishedRun) -> None:
        self.count += 1
        said = f"[{self.count}/{self.num_runs}] {_title(one.run)}: {one.status}"
        if one.seconds:
            said += f" after {one.seconds:.0f} s"
        if one.message:
            said += f": {one.message}"
        if self.as_json or one.status is RunStatus.FAILED:
            complain(said)
        else:
            say(said)


def _title(run: PlannedRun) -> str:
    return f"{run.arm.name} seed {run.seed}"


def _tell(found: SweepResults, metrics: Sequence[str], *, as_json: bool) -> None:
    names = list(metrics) or [found.headline()]
    unknown = [name for name in names if name not in found.figure_names]
    if unknown:
        raise ConfigurationError(
            f"the figure {unknown[0]!r} was to be shown, but the runs have none of that name. "
            f"They have {', '.join(found.figure_names)}."
        )
    directory = found.directory
    write_atomically(directory / "table.csv", found.to_csv())
    if as_json:
        say(json.dumps(_as_plain(found, names)))
    else:
        console = open_console()
        for name in names:
            console.print(_table(found, name), "")
    ended = list(dict.fromkeys(row["run_id"] for row in found.rows))
    if not as_json:
        say(f"table      {directory / 'table.csv'}")
    if len(ended) <= MAX_RUNS_OF_REPORT:
        path = write_report([directory / one for one in ended], directory / "report.html")
        if not as_json:
            say(f"report     {path}")


def _table(found: SweepResults, name: str) -> Table:
    arms = found.plan.arms
    table = plain_table(
        f"{name}, means over seeds with 95 % intervals of Student's t",
        *("arm", "seeds", "before", "after", "interval", f"less {arms[0].name}", "p"),
    )
    for arm in arms:
        after, before = found.over_seeds(arm, name), found.over_seeds(arm, name, "before")
        if after is None:
            table.add_row(safe_text(arm.name), "0", "", "", "", "", "")
            continue
        beside = found.difference(arm, arms[0], name) if arm != arms[0] else None
        table.add_row(
            safe_text(arm.name),
            str(len(after.values)),
            "" if before is None else f"{before.mean:.3g}",
            f"{after.mean:.3g}",
            _interval(after.low, after.high),
            "" if beside is None else f"{beside.mean:+.3g} {_interval(beside.low, beside.high)}",
            "" if beside is None or beside.p is None else f"{beside.p:.2g}",
        )
    return table


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"[{low:.3g}, {high:.3g}]"


def _as_plain(found: SweepResults, names: Sequence[str]) -> list[dict[str, Any]]:
    arms = found.plan.arms
    return [
        {"arm": arm.name, "trainer": arm.trainer, "values": dict(arm.values), "figure": name}
        | mean._asdict()
        | {"less_first_arm": None if beside is None else beside._asdict()}
        for name in names
        for arm in arms
        if (mean := found.over_seeds(arm, name)) is not None
        for beside in [found.difference(arm, arms[0], name) if arm != arms[0] else None]
    ]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
