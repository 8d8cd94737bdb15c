"""What `nip-astra sweep` does; imported when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from tqdm import tqdm

from nip_astra.cli.terminal import complain, open_console, say
from nip_astra.errors import ConfigurationError, NipAstraError, UntrustedRunError
from nip_astra.evaluation.tables import plain_table
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.safe_text import safe_text
from nip_astra.sweep.launchers import FinishedRun, RunStatus
from nip_astra.sweep.plan import (
    PlannedRun,
    SweepPlan,
    grid_of,
    read_plan,
    seeds_of,
    shard_of,
)
from nip_astra.sweep.results import SweepResults, read_stored_plan, read_sweep
from nip_astra.sweep.runner import PLAN_FILE, is_own_sweep
from nip_astra.sweep.search_space import space_of
from nip_astra.sweep.sweeping import (
    REPORT,
    SUMMARY,
    TABLE,
    SweepOptions,
    check,
    do_sweep,
    runner_of,
)


def plan_of(
    source: str | None,
    *,
    trainers: str | None,
    scenarios: str | None,
    seeds: str | None,
    grid: Sequence[str],
    parameters: str | None,
    plugins: Sequence[str],
    search: Mapping[str, Any] | None = None,
    is_trusted: bool = False,
) -> SweepPlan:
    """The plan of a file or folder, with what the command line says in its place.

    Raises
    ------
    UntrustedRunError
        When a sweep's folder is not the user's own, and not trusted.
    """
    stored = None
    if source is not None:
        path = Path(source)
        stored = read_stored_plan(path) if path.is_dir() else read_plan(path)
        if path.is_dir() and not is_trusted and not is_own_sweep(path):
            raise UntrustedRunError(
                f"the sweep {path} is not known to be yours; running it would run the code and "
                f"parameters that its {PLAN_FILE} names. Read that file, then add --trust."
            )
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
    if search is not None:
        before = given.get("search") or {}
        space = {**before.get("space", {}), **search.get("space", {})}
        given["search"] = {**before, **search, "space": space}
    if not given.get("trainers"):
        raise ConfigurationError(
            "a sweep was asked for, but no trainer. Name one or several, for instance --trainer "
            "ast_dpo,ast_ipo, or give a file with `trainers:`."
        )
    return SweepPlan.from_dict(given)


def search_of(ranges: Sequence[str], **given: Any) -> dict[str, Any] | None:
    """What the command line says of a search; None where it says nothing."""
    said = {name: value for name, value in given.items() if value is not None}
    if ranges:
        said["space"] = space_of(ranges)
    return said or None


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
    options: SweepOptions,
    *,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Check all, run what has not ended, and tell what was found."""
    check(plan, options)
    if is_dry:
        _list(plan, directory, options)
        return
    num_runs = len(shard_of(plan.runs, options.shard))
    if plan.search is not None:
        num_runs = plan.search.num_trials * len(plan.seeds)
    teller = _Teller(num_runs, as_json=as_json)
    finished = do_sweep(plan, directory, options, progress=not as_json, on_end=teller)
    failed = [one for one in finished if one.status is RunStatus.FAILED]
    found = read_sweep(directory)
    if found.rows:
        _tell(found, options.metrics, as_json=as_json)
    if failed:
        raise NipAstraError(
            f"{len(failed)} of {len(finished)} runs failed; their logs are in "
            f"{directory / 'logs'}. Mend the cause and go on with: nip-astra sweep {directory}"
        )


def _list(plan: SweepPlan, directory: Path, options: SweepOptions) -> None:
    """Say what would be run."""
    if plan.search is not None:
        said = f"{plan.search.num_trials} trials of {len(plan.seeds)} runs each, by"
        objectives = {plan.objective_of(plan.resolve(arm)) for arm in plan.first_arms}
        say(
            f"{said} {plan.search.sampler}, to {plan.search.direction} "
            f"{', '.join(sorted(objectives))}"
        )
        for path, choice in plan.choices.items():
            say(f"{path}  {choice}")
        return
    runner = runner_of(plan, directory, options)
    for run in shard_of(plan.runs, options.shard):
        say(f"{run.run_id}  {runner.status(run):8}  {run.arm.name}  seed {run.seed}")


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
        # A bar that is being drawn makes room for the line.
        with tqdm.external_write_mode(file=sys.stderr):
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
    if as_json:
        say(json.dumps(_as_plain(found, names)))
        return
    console = open_console()
    for name in names:
        console.print(_table(found, name), "")
    for caution in found.cautions(names):
        say(f"caution    {caution}")
    say(f"table      {directory / TABLE}")
    say(f"summary    {directory / SUMMARY}")
    say(f"report     {directory / REPORT}")


def _table(found: SweepResults, name: str) -> Table:
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


def _as_plain(found: SweepResults, names: Sequence[str]) -> list[dict[str, Any]]:
    arms = found.arms
    return [
        {"arm": arm.name, "trainer": arm.trainer, "values": dict(arm.values), "figure": name}
        | mean._asdict()
        | {"less_first_arm": None if beside is None else beside._asdict()}
        | {"selected_by": found.selected_by}
        for name in names
        for arm in arms
        if (mean := found.over_seeds(arm, name)) is not None
        for beside in [found.difference(arm, arms[0], name) if arm != arms[0] else None]
    ]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
