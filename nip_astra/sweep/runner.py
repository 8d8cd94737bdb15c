"""Execution of sweeps: launchers start several runs at once, never the same run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, RunDirectoryError, StopRequested, counted
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.files import plain
from nip_astra.plugins import load_plugin
from nip_astra.progress import open_progress, read_progress
from nip_astra.registry import Registry
from nip_astra.run import signals_handled_by
from nip_astra.sweep.plan import (
    FAILURES_FILE,
    LOGS_DIR,
    PLAN_FILE,
    SIGNATURE_FILE,
    FinishedRun,
    PlannedRun,
    RequestedFigures,
    RunQueue,
    RunStatus,
    SweepPlan,
    is_own_sweep,
    read_failures,
    shard_of,
    status_of,
)
from nip_astra.sweep.results import SweepResults, read_sweep
from nip_astra.sweep.search import PRUNERS, SWEEP_SAMPLERS, StudyQueue
from nip_astra.tracking.run_directory import write_atomically
from nip_astra.tracking.run_lock import is_abandoned, run_lock
from nip_astra.trust import refuse_links_outside, sign
from nip_astra.utils.children import Child, end_with_parent, start_program
from nip_astra.utils.processor import num_cores
from nip_astra.utils.ray_cluster import open_ray

POLL_SECONDS = 0.2
MAX_LINE_BYTES = 4096
"""Bytes at the end of a log that are searched for the last line."""
MAX_RETRIES = 3
"""Maximum restarts by Ray of a run whose worker died; each resumes the latest checkpoint."""
FIRST_GUESS = 10
"""Assumed iterations of a run until one has reported its own."""


@dataclass(frozen=True)
class SweepOptions:
    """Execution options of a sweep; they do not change the results.

    Attributes
    ----------
    settings : Mapping[str, Any]
        Settings of all runs.
    num_processes : int or None
        Runs at once; None for one, or on Ray for as many as the cluster has resources for.
    shard : str or None
        The part of the runs to execute, as `2/4`; None for all.
    place : str
        A registered launcher: "processes" of this machine, or "ray" for tasks of a Ray cluster.
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
    place: str = "processes"
    num_cpus: float = 1
    num_gpus: float = 0
    is_trusted: bool = False
    metrics: Sequence[str] = ()


@dataclass(frozen=True)
class RunSpec:
    """A run to start or resume, as text only, so that another machine can do it."""

    folder: str  # the run's directory
    log: str  # file for its output
    stop: str  # file whose existence makes the run save its work and stop
    working_directory: str  # base of relative paths in parameters
    begin: tuple[str, ...]  # command-line arguments
    resume: tuple[str, ...]

    def start(self) -> Child:
        """Start its process, or resume the run."""
        is_begun = status_of(Path(self.folder)) is RunStatus.STOPPED
        return start_program(
            f"run {self.folder}",
            ["-m", "nip_astra", *(self.resume if is_begun else self.begin)],
            log=Path(self.log),
            stdin=subprocess.DEVNULL,
            cwd=self.working_directory,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def last_line(self) -> str:
        """Return the last line of its log."""
        with suppress(OSError), Path(self.log).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LINE_BYTES))
            return log.read().decode("utf-8", errors="replace").strip().rpartition("\n")[2]
        return ""


def execute(spec: RunSpec) -> int:
    """Run to the end or until the stop file exists, and return the exit code.

    A run started by an earlier process is resumed once that process has released it.
    """
    folder = Path(spec.folder)
    while not is_abandoned(folder):
        time.sleep(POLL_SECONDS)
    if status_of(folder) is RunStatus.ENDED:
        return 0
    process = spec.start()
    is_stopping = False
    while not process.wait(POLL_SECONDS):
        if not is_stopping and Path(spec.stop).exists():
            is_stopping = True
            process.request_stop()
    assert process.code is not None
    return process.code


class Job(ABC):
    """A run in progress."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Return whether it has ended, successfully or not."""

    @abstractmethod
    def stop(self) -> None:
        """Request that it saves its work and ends."""

    def fault(self) -> str:
        """Return why it did not end by itself; empty if its own log has the reason."""
        return ""


class Launcher(ABC):
    """Starts runs; subclasses registered by `register_launcher` are selected by `--on`.

    Attributes
    ----------
    num_at_once : int
        Runs in progress at the same time.
    """

    def __init__(self, options: SweepOptions) -> None:
        self.num_at_once = options.num_processes or 1

    @property
    def num_threads(self) -> int:
        """Default number of CPU cores per run."""
        return max(1, num_cores() // self.num_at_once)

    @abstractmethod
    def start(self, spec: RunSpec) -> Job:
        """Start a run, or resume it."""


LAUNCHERS: Registry[type[Launcher]] = Registry("launcher")


def register_launcher(name: str) -> Callable[[type[Launcher]], type[Launcher]]:
    """Register a `Launcher` subclass under its name for `--on`; a decorator."""
    return LAUNCHERS.register(name)


@register_launcher("processes")
class LocalProcesses(Launcher):
    """Runs each run as a process on this machine."""

    def start(self, spec: RunSpec) -> Job:
        return _Process(spec.start())


class _Process(Job):
    def __init__(self, process: Child) -> None:
        self._process = process

    def has_ended(self) -> bool:
        return self._process.code is not None

    def stop(self) -> None:
        self._process.request_stop()

    def fault(self) -> str:
        return self._process.ending if (self._process.code or 0) < 0 else ""


@register_launcher("ray")
class RayTasks(Launcher):
    """Runs each run as a task on any machine of a Ray cluster.

    All machines see the sweep's folder under the same path. Ray restarts a task whose worker died,
    which resumes the run from its latest checkpoint. The setting `ray_address` names the cluster.
    """

    def __init__(self, options: SweepOptions) -> None:
        self._options = options
        self._ray = open_ray(options.settings.get("ray_address"))
        required = {"CPU": options.num_cpus, "GPU": options.num_gpus}
        self._task = self._ray.remote(
            num_cpus=options.num_cpus, num_gpus=options.num_gpus, max_retries=MAX_RETRIES
        )(execute)
        available = self._ray.cluster_resources()
        # How many runs each kind of resource has room for.
        num_runs = [
            int(available.get(name, 0) // amount) for name, amount in required.items() if amount
        ]
        self.num_at_once = options.num_processes or max(1, min(num_runs, default=1))

    @property
    def num_threads(self) -> int:
        return max(1, int(self._options.num_cpus))

    def start(self, spec: RunSpec) -> Job:
        Path(spec.stop).unlink(missing_ok=True)
        return _Task(self._ray, self._task.remote(spec), spec)


class _Task(Job):
    def __init__(self, ray: Any, reference: Any, spec: RunSpec) -> None:
        self._ray, self._reference, self._spec = ray, reference, spec
        self._fault = ""

    def has_ended(self) -> bool:
        ended, _ = self._ray.wait([self._reference], timeout=0)
        if not ended:
            return False
        try:
            self._ray.get(self._reference)
        except self._ray.exceptions.RayError as error:
            # The sweep continues; this run counts as failed.
            self._fault = str(error).strip().rpartition("\n")[2]
        Path(self._spec.stop).unlink(missing_ok=True)
        return True

    def stop(self) -> None:
        Path(self._spec.stop).touch()

    def fault(self) -> str:
        return self._fault


def run_sweep(
    directory: str | Path,
    *,
    options: SweepOptions | None = None,
    progress: bool = True,
    on_end: Callable[[FinishedRun], object] = lambda _: None,
    **plan: Any,
) -> SweepResults:
    """Run every combination, or search, and return the results.

    If called again with the same values, it continues. A run that fails does not stop the others;
    it is listed in `failures.json` of the folder.

    Parameters
    ----------
    directory : str or Path
        Holds a folder per run, the tables and the report.
    progress : bool
        Whether one bar over all runs is shown.
    on_end : Callable
        Called with each run as it ends.
    **plan
        Fields of `SweepPlan`: trainers, seeds, grid, search, and more.

    Raises
    ------
    ConfigurationError
        When a combination is wrong, or a run in the folder began with other parameters; no run was
        started.
    StopRequested
        By a signal, after all runs in progress have saved their work.
    """
    directory, options = Path(directory), options or SweepOptions()
    sweep_plan = SweepPlan.from_dict(plain(plan))
    figures = check_sweep(sweep_plan, options, directory)

    def report_end(finished: FinishedRun) -> None:
        on_end(finished)
        if finished.status is RunStatus.ENDED:
            figures.note(finished.run, finished.run.folder_in(directory))

    SweepRunner(sweep_plan, directory, options).run(on_end=report_end, progress=progress)
    results = read_sweep(directory)
    results.write()
    return results


def check_sweep(
    plan: SweepPlan, options: SweepOptions, directory: Path | None = None
) -> RequestedFigures:
    """Check everything that can be checked before a run starts; return the rest.

    `directory` is the folder of the sweep, which may have runs.
    """
    for plugin in plan.plugins:
        load_plugin(plugin)
    settings = ExperimentSettings.from_dict({**ExperimentSettings().to_dict(), **options.settings})
    LAUNCHERS.get(options.place)
    shard_of([], options.shard)
    if plan.search is not None:
        SWEEP_SAMPLERS.get(plan.search.sampler)
        PRUNERS.get(plan.search.pruner)
        if options.shard is not None:
            raise ConfigurationError(
                f"--shard {options.shard} does not apply to a search, whose trials depend on "
                "earlier ones. Leave it out, or search with --on ray."
            )
    plan.check(directory, is_test_run=settings.test_run)
    return RequestedFigures(plan, options.metrics)


@dataclass
class _ActiveRun:
    """A run in progress: its job, and when it was started."""

    run: PlannedRun
    job: Job
    spec: RunSpec
    started: float = field(default_factory=time.monotonic)
    is_pruned: bool = False


class SweepRunner:
    """Executes the runs of a plan in a folder, whose files record which have ended."""

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        options: SweepOptions | None = None,
        *,
        launcher: Launcher | None = None,
    ) -> None:
        self.plan, self.directory, self.options = plan, directory, options or SweepOptions()
        self.launcher = launcher or LAUNCHERS.get(self.options.place)(self.options)
        self.settings = {
            "num_threads": self.launcher.num_threads,
            "wandb_group": directory.name,
            **self.options.settings,
        }
        self._stopped_by: str | None = None
        self._ready: list[PlannedRun] = []
        self._active_runs: list[_ActiveRun] = []

    def run(
        self, *, on_end: Callable[[FinishedRun], object] = lambda _: None, progress: bool = False
    ) -> list[FinishedRun]:
        """Execute the runs that have not ended. Failed runs do not stop the others.

        `on_end` is called with each run as it ends, and with those that had ended before.
        """
        self._make_folder()
        with run_lock(self.directory), signals_handled_by(self._stop):
            runs = [] if self.plan.search else shard_of(self.plan.runs, self.options.shard)
            num_runs = len(runs)
            queue = RunQueue(runs)
            if self.plan.search is not None:
                num_runs = self.plan.search.num_trials * len(self.plan.seeds)
                queue = StudyQueue(self.plan, self.directory)
            # Now, since a sweep that is refused must not replace the plan of the one in the folder.
            self._write_plan()
            bar = SweepBar(num_runs, self._progress_path, enabled=progress)
            try:
                finished = self._work(queue, bar, on_end)
            finally:
                bar.close()
        if self._stopped_by is not None:
            raise StopRequested(self._stopped_by, str(self.directory), command="sweep")
        return finished

    def _work(
        self, queue: RunQueue, bar: SweepBar, on_end: Callable[[FinishedRun], object]
    ) -> list[FinishedRun]:
        finished: list[FinishedRun] = []

        def note(finished_run: FinishedRun) -> None:
            finished.append(finished_run)
            queue.note(finished_run)
            bar.note(finished_run)
            on_end(finished_run)

        def is_work_left() -> bool:
            if self._active_runs:
                return True
            # A stopped sweep starts no further run.
            return self._stopped_by is None and (bool(self._ready) or not queue.is_empty)

        try:
            while is_work_left():
                if self._stopped_by is None:
                    self._take(queue, note)
                    self._start(note)
                    self._prune(queue)
                ended_runs = [active for active in self._active_runs if active.job.has_ended()]
                for active_run in ended_runs:
                    self._active_runs.remove(active_run)
                    note(self._outcome(active_run))
                bar.poll(self._active_run_ids)
                is_waiting = bool(self._active_runs or self._ready)
                time.sleep(POLL_SECONDS if is_waiting else 0.0)
        finally:
            # After an error, runs in progress save their work.
            for active_run in self._active_runs:
                active_run.job.stop()
        self._write_failures(finished)
        return finished

    @property
    def _active_run_ids(self) -> list[str]:
        return [active_run.run.run_id for active_run in self._active_runs]

    def _progress_path(self, run_id: str) -> Path:
        return self.directory.absolute() / LOGS_DIR / f"{run_id}.progress"

    def _has_ended(self, run: PlannedRun, note: Callable[[FinishedRun], object]) -> bool:
        is_ended = status_of(run.folder_in(self.directory)) is RunStatus.ENDED
        if is_ended:
            note(FinishedRun(run, RunStatus.ENDED, 0.0))
        return is_ended

    def _take(self, queue: RunQueue, note: Callable[[FinishedRun], object]) -> None:
        while len(self._active_runs) + len(self._ready) < self.launcher.num_at_once:
            run = queue.take()
            if run is None:
                return
            if not self._has_ended(run, note):
                self._ready.append(run)

    def _start(self, note: Callable[[FinishedRun], object]) -> None:
        """Start ready runs, except those that another process is executing."""
        for run in list(self._ready):
            is_active = run.run_id in self._active_run_ids
            if is_active or not is_abandoned(run.folder_in(self.directory)):
                # A process of a sweep that was killed is saving its work.
                continue
            self._ready.remove(run)
            if not self._has_ended(run, note):
                spec = self._spec(run)
                self._active_runs.append(_ActiveRun(run, self.launcher.start(spec), spec))

    def _prune(self, queue: RunQueue) -> None:
        for active_run in self._active_runs:
            if not active_run.is_pruned and not queue.goes_on(active_run.run):
                active_run.is_pruned = True
                active_run.job.stop()

    def _make_folder(self) -> None:
        if (self.directory / PLAN_FILE).exists() and not is_own_sweep(self.directory):
            refuse_links_outside(self.directory)
        try:
            (self.directory / LOGS_DIR).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.directory} cannot be written: {error.strerror or error}. Give another "
                "--sweep-dir."
            ) from error

    def _write_plan(self) -> None:
        plan = json.dumps(self.plan.to_dict(), indent=2) + "\n"
        write_atomically(self.directory / PLAN_FILE, plan)
        write_atomically(self.directory / SIGNATURE_FILE, sign(plan.encode()) or "")

    def _spec(self, run: PlannedRun) -> RunSpec:
        directory = self.directory.absolute()
        arm, logs, folder = run.arm, directory / LOGS_DIR, run.folder_in(directory)
        begin = ["run", "--trainer", arm.trainer, "--seed", str(run.seed), "--run-id", folder.name]
        if arm.scenario:
            begin += ["--scenario", arm.scenario]
        if self.plan.parameters:
            begin += ["--parameters", self.plan.parameters]
        for override in self.plan.overrides_of(arm):
            begin += ["--set", override]
        tags = [*self.settings.get("wandb_tags", ()), *arm.tags]
        settings: dict[str, Any] = {
            **self.settings,
            "wandb_tags": list(dict.fromkeys(tags)),
            "progress": False,
            "progress_path": str(self._progress_path(run.run_id)),
            "runs_dir": str(directory),
        }
        if not settings.get("num_actors"):
            # The address is that of the sweep's own tasks.
            settings.pop("ray_address", None)
        common: list[str] = []
        for plugin in self.plan.plugins:
            common += ["--plugin", plugin]
        for name, value in settings.items():
            common += ["--settings", f"{name}={json.dumps(value)}"]
        if self.options.is_trusted:
            common.append("--trust")
        return RunSpec(
            folder=str(folder),
            log=str(logs / f"{run.run_id}.txt"),
            stop=str(logs / f"{run.run_id}.stop"),
            working_directory=str(Path.cwd()),
            begin=(*begin, *common),
            resume=("resume", str(folder), *common),
        )

    def _outcome(self, active_run: _ActiveRun) -> FinishedRun:
        status = status_of(active_run.run.folder_in(self.directory))
        message = ""
        if status is not RunStatus.ENDED:
            if active_run.is_pruned:
                status = RunStatus.PRUNED
            elif self._stopped_by is not None:
                status = RunStatus.STOPPED
            else:
                status = RunStatus.FAILED
                message = active_run.job.fault() or active_run.spec.last_line()
        seconds = time.monotonic() - active_run.started
        return FinishedRun(active_run.run, status, seconds, message)

    def _write_failures(self, finished: Sequence[FinishedRun]) -> None:
        """Store the last log lines of failed runs, for the report."""
        failures = read_failures(self.directory)
        for finished_run in finished:
            run_id = finished_run.run.run_id
            failures.pop(run_id, None)
            if finished_run.status is RunStatus.FAILED:
                failures[run_id] = finished_run.message
        write_atomically(self.directory / FAILURES_FILE, json.dumps(failures, indent=2) + "\n")

    def _stop(self, number: int, _: object) -> None:
        """Signal the runs to save their work, then end the sweep."""
        self._stopped_by = signal.Signals(number).name
        for active_run in self._active_runs:
            active_run.job.stop()


class SweepBar:
    """One progress bar over the iterations of all runs; those of pending runs are estimated."""

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
        # By run id: iterations done and in all, of the runs that have reported any.
        self._progress: dict[str, tuple[int, int]] = {}
        self._ended: dict[str, RunStatus] = {}
        self.poll([])

    def poll(self, at_work: Iterable[str]) -> None:
        """Update the progress of the runs in progress."""
        ids = list(at_work)
        for run_id in ids:
            progress = read_progress(self._path_of(run_id))
            if progress is not None:
                self._count(run_id, *progress)
        text = f"{len(self._ended)} of {counted(self._num_runs, 'run')}, {len(ids)} at work"
        num_failed = sum(status is RunStatus.FAILED for status in self._ended.values())
        self._bar.set_description(f"{text}, {num_failed} failed" if num_failed else text)

    def note(self, finished: FinishedRun) -> None:
        """Count an ended run in full, also if it failed or had ended before."""
        run_id, status = finished.run.run_id, finished.status
        self._ended[run_id] = status
        num_done, total = self._progress.get(run_id, (0, self._mean_total()))
        if status is RunStatus.PRUNED:
            total = num_done
        if status is not RunStatus.STOPPED:
            # A run that had ended before took no time of this sweep.
            self._count(run_id, total, total, is_resumed=not finished.seconds)

    def close(self) -> None:
        """Restore the terminal."""
        self._bar.close()

    def _mean_total(self) -> int:
        totals = [total for _, total in self._progress.values() if total]
        return round(sum(totals) / len(totals)) if totals else FIRST_GUESS

    def _count(self, run_id: str, num_done: int, total: int, *, is_resumed: bool = False) -> None:
        num_done_before, _ = self._progress.get(run_id, (0, 0))
        self._progress[run_id] = (num_done, total)
        num_pending_runs = max(self._num_runs - len(self._progress), 0)
        sweep_total = sum(run_total for _, run_total in self._progress.values())
        sweep_total += num_pending_runs * self._mean_total()
        if sweep_total != self._bar.total:
            self._bar.lengthen(sweep_total - self._bar.total)
        num_new = num_done - num_done_before
        if num_new > 0:
            if is_resumed:
                self._bar.skip(num_new)
            else:
                self._bar.step(num_new)
