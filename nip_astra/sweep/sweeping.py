"""A whole sweep: check it, execute its runs, and write its tables and report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from nip_astra.errors import ConfigurationError, MissingDependencyError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin
from nip_astra.progress import open_progress, read_progress
from nip_astra.sweep.launchers import FinishedRun, Launcher, LocalProcesses, RayTasks, RunStatus
from nip_astra.sweep.plan import RequestedFigures, SweepPlan, shard_of
from nip_astra.sweep.report import write_sweep_report
from nip_astra.sweep.results import SweepResults, as_csv, read_sweep
from nip_astra.sweep.runner import RunQueue, StaticQueue, SweepRunner
from nip_astra.sweep.search import StudyQueue
from nip_astra.tracking.run_directory import write_atomically

TABLE, SUMMARY, PARQUET, REPORT = "table.csv", "summary.csv", "table.parquet", "report.html"

FIRST_GUESS = 10
"""Iterations assumed of a run before the first has reported its own."""

PlaceName = Literal["processes", "ray"]


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep is executed; none of it changes the results.

    Attributes
    ----------
    settings : Mapping[str, Any]
        Settings of all runs.
    num_processes : int or None
        Runs at once; None for one, or on Ray for as many as the cluster has resources for.
    shard : str or None
        The part of the runs to execute, as `2/4`; None for all.
    place : {"processes", "ray"}
        Processes of this machine, or tasks of a Ray cluster.
    num_cpus, num_gpus : float
        Resources of a run on Ray.
    is_trusted : bool
        Whether code that the runs name is loaded.
    metrics : Sequence[str]
        Figures to show; one that no trainer reports is refused.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    num_processes: int | None = None
    shard: str | None = None
    place: PlaceName = "processes"
    num_cpus: float = 1
    num_gpus: float = 0
    is_trusted: bool = False
    metrics: Sequence[str] = ()


def run_sweep(
    directory: str | Path,
    *,
    options: SweepOptions | None = None,
    progress: bool = True,
    on_end: Callable[[FinishedRun], object] = lambda _: None,
    **plan: Any,
) -> SweepResults:
    """Run every combination, or search, and return the results.

    Called again with the same values it continues. A run that fails does not stop the others; it
    is listed in `failures.json` of the folder.

    Parameters
    ----------
    directory : str or Path
        Holds a folder a run, the tables and the report.
    progress : bool
        Whether one bar over all runs is shown.
    on_end : Callable
        Called with each run as it ends.
    **plan
        Fields of `SweepPlan`: trainers, seeds, grid, search, and more.

    Raises
    ------
    ConfigurationError
        When a combination is wrong; no run was started.
    StopRequested
        By a signal, after all runs in progress have saved their work.
    """
    given = {
        name: list(value) if isinstance(value, range) else value for name, value in plan.items()
    }
    sweep_plan = SweepPlan.from_dict(given)
    do_sweep(
        sweep_plan, Path(directory), options or SweepOptions(), progress=progress, on_end=on_end
    )
    return read_sweep(directory)


def do_sweep(
    plan: SweepPlan,
    directory: Path,
    options: SweepOptions,
    *,
    progress: bool = True,
    on_end: Callable[[FinishedRun], object] = lambda _: None,
) -> list[FinishedRun]:
    """Execute the runs that have not ended, and write tables and report of those that have."""
    figures = check(plan, options)
    runner = runner_of(plan, directory, options, launcher=_launcher(options))
    runs = [] if plan.search else shard_of(plan.runs, options.shard)
    with runner.opened():
        queue: RunQueue = StudyQueue(plan, directory) if plan.search else StaticQueue(runs)
        count = plan.search.num_trials * len(plan.seeds) if plan.search else len(runs)
        bar = SweepBar(count, runner.progress_path, enabled=progress)

        def note(one: FinishedRun) -> None:
            bar.note(one)
            on_end(one)
            if one.status is RunStatus.ENDED:
                figures.note(one.run, directory / one.run.run_id)

        def poll() -> None:
            bar.poll(runner.at_work)

        try:
            finished = runner.work(queue, on_end=note, on_poll=poll)
        finally:
            bar.close()
    write_findings(read_sweep(directory))
    return finished


def check(plan: SweepPlan, options: SweepOptions) -> RequestedFigures:
    """Check all that can be checked before a run starts; returns the rest.

    Raises
    ------
    ConfigurationError
        When a setting, a combination or the name of a figure is wrong.
    """
    for plugin in plan.plugins:
        load_plugin(plugin)
    # A typing error must not surface in the twentieth run.
    ExperimentSettings.from_dict({**ExperimentSettings().to_dict(), **options.settings})
    if plan.search is not None and options.shard is not None:
        raise ConfigurationError(
            f"--shard {options.shard} does not apply to a search, whose trials depend on those "
            "before. Leave it out, or search with --on ray."
        )
    plan.check()
    return RequestedFigures(plan, options.metrics)


def runner_of(
    plan: SweepPlan, directory: Path, options: SweepOptions, *, launcher: Launcher | None = None
) -> SweepRunner:
    """The runner of a sweep."""
    settings = dict(options.settings)
    if options.place == "ray":
        settings.setdefault("num_threads", max(1, int(options.num_cpus)))
    return SweepRunner(
        plan,
        directory,
        num_processes=options.num_processes or 1,
        settings=settings,
        is_trusted=options.is_trusted,
        launcher=launcher,
    )


def write_findings(found: SweepResults) -> None:
    """Write the tables and the report of the results so far."""
    directory = found.directory
    if found.rows:
        write_atomically(directory / TABLE, found.to_csv())
        write_atomically(directory / SUMMARY, as_csv(found.summary()))
        # The Parquet library is optional.
        with suppress(MissingDependencyError):
            found.write_parquet(directory / PARQUET)
    write_sweep_report(found, directory / REPORT)


def _launcher(options: SweepOptions) -> Launcher:
    if options.place == "processes":
        return LocalProcesses(options.num_processes or 1)
    return RayTasks(
        options.settings.get("ray_address"),
        num_at_once=options.num_processes,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
    )


class SweepBar:
    """One progress bar over the iterations of all runs; those of runs to come are estimated.

    Parameters
    ----------
    num_runs : int
        Runs of the sweep, including those that had ended before.
    progress_path : Callable
        File with the progress of a run.
    """

    def __init__(
        self,
        num_runs: int,
        progress_path: Callable[[str], Path],
        *,
        enabled: bool = True,
        tqdm_func: Callable[..., Any] | None = None,
    ) -> None:
        self._num_runs = num_runs
        self._path_of = progress_path
        self._bar = open_progress(num_runs * FIRST_GUESS, enabled, tqdm_func)
        self._known: dict[str, tuple[int, int]] = {}
        self._ended: dict[str, RunStatus] = {}
        self._describe(0)

    def poll(self, at_work: Iterable[str]) -> None:
        """Update the progress of the runs in progress."""
        names = list(at_work)
        for run_id in names:
            progress = read_progress(self._path_of(run_id))
            if progress is not None:
                self._count(run_id, *progress)
        self._describe(len(names))

    def note(self, one: FinishedRun) -> None:
        """Count a run that has ended; one that failed or had ended before counts in full."""
        run_id = one.run.run_id
        self._ended[run_id] = one.status
        total = self._known.get(run_id, (0, self._mean()))[1]
        if one.status is RunStatus.PRUNED:
            total = self._known.get(run_id, (0, 0))[0]
        if one.status is not RunStatus.STOPPED:
            self._count(run_id, total, total, is_resumed=not one.seconds)

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.close()

    def _mean(self) -> int:
        totals = [total for _, total in self._known.values() if total]
        return round(sum(totals) / len(totals)) if totals else FIRST_GUESS

    def _count(self, run_id: str, num_done: int, total: int, *, is_resumed: bool = False) -> None:
        before = self._known.get(run_id, (0, 0))[0]
        self._known[run_id] = (num_done, total)
        expected = max(self._num_runs - len(self._known), 0) * self._mean()
        in_all = sum(one for _, one in self._known.values()) + expected
        if in_all != self._bar.total:
            self._bar.lengthen(in_all - self._bar.total)
        if num_done > before:
            (self._bar.skip if is_resumed else self._bar.step)(num_done - before)

    def _describe(self, num_at_work: int) -> None:
        text = f"{len(self._ended)} of {self._num_runs} runs, {num_at_work} at work"
        failed = sum(status is RunStatus.FAILED for status in self._ended.values())
        self._bar.set_description(f"{text}, {failed} failed" if failed else text)
