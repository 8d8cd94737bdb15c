"""Executes the runs of a sweep, several at once, each in its own process and never twice."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nip_astra.errors import RunDirectoryError, StopRequested
from nip_astra.sweep.launchers import (
    POLL_SECONDS,
    FinishedRun,
    Job,
    Launcher,
    LocalProcesses,
    RunSpec,
    RunStatus,
    status_of,
)
from nip_astra.sweep.plan import Arm, PlannedRun, SweepPlan
from nip_astra.tracking.run_directory import write_atomically
from nip_astra.tracking.run_lock import is_abandoned, run_lock
from nip_astra.trust import is_signed, refuse_links_outside, sign
from nip_astra.utils.processor import num_cores

PLAN_FILE, LOGS_DIR, FAILURES_FILE = "sweep.json", "logs", "failures.json"
SIGNATURE_FILE = "sweep.signature"
"""Whose sweep it is; see `nip_astra.trust`."""

OnEnd = Callable[[FinishedRun], object]


class RunQueue(Protocol):
    """Where the runs of a sweep come from."""

    def take(self) -> PlannedRun | None:
        """The next run to start; None if there is none now."""

    @property
    def is_empty(self) -> bool:
        """Whether no run follows once those that were taken have ended."""

    def goes_on(self, run: PlannedRun) -> bool:
        """Whether a run in progress should continue."""

    def note(self, one: FinishedRun) -> None:
        """Record the outcome of a run."""


class StaticQueue:
    """Runs that are known from the start."""

    def __init__(self, runs: Sequence[PlannedRun]) -> None:
        self._runs = list(runs)

    def take(self) -> PlannedRun | None:
        return self._runs.pop(0) if self._runs else None

    @property
    def is_empty(self) -> bool:
        return not self._runs

    def goes_on(self, run: PlannedRun) -> bool:
        return True

    def note(self, one: FinishedRun) -> None:
        """Nothing depends on it."""


@dataclass
class _Working:
    run: PlannedRun
    job: Job
    spec: RunSpec
    started: float = field(default_factory=time.monotonic)
    is_pruned: bool = False


class SweepRunner:
    """Executes the runs of a plan in a folder, whose files say which have ended.

    Parameters
    ----------
    directory : Path
        Has a folder per run, `sweep.json` and the logs of all runs.
    num_processes : int, optional
        Runs at once; 1 by default.
    settings : Mapping[str, Any]
        Settings of all runs.
    is_trusted : bool
        Whether to load code that the runs name.
    launcher : Launcher, optional
        By default processes of this machine.
    """

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        *,
        num_processes: int = 1,
        settings: Mapping[str, Any] | None = None,
        is_trusted: bool = False,
        launcher: Launcher | None = None,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.launcher = launcher or LocalProcesses(num_processes)
        self.settings = dict(settings or {})
        self.settings.setdefault("num_threads", max(1, num_cores() // self.launcher.num_at_once))
        self.settings.setdefault("wandb_group", directory.name)
        self.is_trusted = is_trusted
        self._stopped_by: str | None = None
        self._ready: list[PlannedRun] = []
        self._working: list[_Working] = []

    def status(self, run: PlannedRun) -> RunStatus:
        """State of a run, from its folder."""
        return status_of(self.directory / run.run_id)

    @property
    def at_work(self) -> list[str]:
        """Ids of the runs in progress."""
        return [one.run.run_id for one in self._working]

    def progress_path(self, run_id: str) -> Path:
        """File with the progress of a run."""
        return self.directory / LOGS_DIR / f"{run_id}.progress"

    def run(
        self,
        runs: Sequence[PlannedRun],
        *,
        on_end: OnEnd = lambda _: None,
        on_poll: Callable[[], object] = lambda: None,
    ) -> list[FinishedRun]:
        """Execute the runs that have not ended. One that fails does not stop the others.

        Parameters
        ----------
        on_end : Callable
            Called with each run as it ends, and with those that had ended before.
        on_poll : Callable
            Called several times a second.

        Raises
        ------
        RunDirectoryError
            When another process executes the sweep, or its folder cannot be written.
        StopRequested
            By a signal, after all runs in progress have saved their work.
        """
        with self.opened():
            return self.work(StaticQueue(runs), on_end=on_end, on_poll=on_poll)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Create the sweep's folder and lock it within the block.

        Raises
        ------
        RunDirectoryError
            When another process executes the sweep, or its folder cannot be written.
        StopRequested
            When a signal came within the block; the work is saved.
        """
        self._prepare_folder()
        with run_lock(self.directory), self._listening():
            yield
        if self._stopped_by is not None:
            raise StopRequested(self._stopped_by, str(self.directory), command="sweep")

    def work(
        self,
        queue: RunQueue,
        *,
        on_end: OnEnd = lambda _: None,
        on_poll: Callable[[], object] = lambda: None,
    ) -> list[FinishedRun]:
        """Execute the runs of a queue that have not ended, in a folder that is `opened`."""
        finished: list[FinishedRun] = []

        def note(one: FinishedRun) -> None:
            finished.append(one)
            queue.note(one)
            on_end(one)

        try:
            while self._working or self._has_more(queue):
                if self._stopped_by is None:
                    self._take(queue, note)
                    self._start(note)
                    self._prune(queue)
                for one in [one for one in self._working if one.job.has_ended()]:
                    self._working.remove(one)
                    note(self._outcome(one))
                on_poll()
                time.sleep(POLL_SECONDS if self._working or self._ready else 0.0)
        finally:
            # After an error, runs in progress save their work.
            for one in self._working:
                one.job.stop()
        self._write_failures(finished)
        return finished

    def _has_more(self, queue: RunQueue) -> bool:
        return self._stopped_by is None and (bool(self._ready) or not queue.is_empty)

    def _take(self, queue: RunQueue, note: OnEnd) -> None:
        while len(self._working) + len(self._ready) < self.launcher.num_at_once:
            run = queue.take()
            if run is None:
                return
            if self.status(run) is RunStatus.ENDED:
                note(FinishedRun(run, RunStatus.ENDED, 0.0))
            else:
                self._ready.append(run)

    def _start(self, note: OnEnd) -> None:
        """Start ready runs, except those that another process still executes."""
        for run in list(self._ready):
            if run.run_id in self.at_work or not is_abandoned(self.directory / run.run_id):
                # A process of a sweep that was killed is saving its work.
                continue
            self._ready.remove(run)
            if self.status(run) is RunStatus.ENDED:
                note(FinishedRun(run, RunStatus.ENDED, 0.0))
                continue
            spec = self._spec(run)
            self._working.append(_Working(run, self.launcher.start(spec), spec))

    def _prune(self, queue: RunQueue) -> None:
        for one in self._working:
            if not one.is_pruned and not queue.goes_on(one.run):
                one.is_pruned = True
                one.job.stop()

    def _prepare_folder(self) -> None:
        if (self.directory / PLAN_FILE).exists() and not is_own_sweep(self.directory):
            refuse_links_outside(self.directory)
        try:
            (self.directory / LOGS_DIR).mkdir(parents=True, exist_ok=True)
            plan = json.dumps(self.plan.to_dict(), indent=2) + "\n"
            write_atomically(self.directory / PLAN_FILE, plan)
            write_atomically(self.directory / SIGNATURE_FILE, sign(plan.encode()) or "")
        except OSError as error:
            raise RunDirectoryError(
                f"{self.directory} cannot be written: {error.strerror or error}. Give another "
                "--sweep-dir."
            ) from error

    def _spec(self, run: PlannedRun) -> RunSpec:
        logs = self.directory.absolute() / LOGS_DIR
        folder = self.directory.absolute() / run.run_id
        begin = ["run", "--trainer", run.arm.trainer, "--seed", str(run.seed)]
        begin += ["--run-id", run.run_id]
        begin += ["--scenario", run.arm.scenario] if run.arm.scenario else []
        begin += ["--parameters", self.plan.parameters] if self.plan.parameters else []
        for override in self.plan.overrides_of(run.arm):
            begin += ["--set", override]
        common = self._common_words(run.arm, self.progress_path(run.run_id).absolute())
        return RunSpec(
            folder=str(folder),
            log=str(logs / f"{run.run_id}.txt"),
            progress=str(self.progress_path(run.run_id).absolute()),
            stop=str(logs / f"{run.run_id}.stop"),
            working_directory=str(Path.cwd()),
            begin=(*begin, *common),
            resume=("resume", str(folder), *common),
        )

    def _common_words(self, arm: Arm, progress_path: Path) -> list[str]:
        """Command-line arguments that start and resume a run."""
        words: list[str] = []
        for plugin in self.plan.plugins:
            words += ["--plugin", plugin]
        settings: dict[str, Any] = {
            **self.settings,
            "wandb_tags": list(dict.fromkeys([*self.settings.get("wandb_tags", ()), *arm.tags])),
            "progress": False,
            "progress_path": str(progress_path),
            "runs_dir": str(self.directory.absolute()),
        }
        if not settings.get("num_actors"):
            # The address is that of the sweep's own tasks.
            settings.pop("ray_address", None)
        for name, value in settings.items():
            words += ["--settings", f"{name}={json.dumps(value)}"]
        return [*words, "--trust"] if self.is_trusted else words

    def _outcome(self, one: _Working) -> FinishedRun:
        seconds = time.monotonic() - one.started
        status = self.status(one.run)
        if status is RunStatus.ENDED:
            return FinishedRun(one.run, status, seconds)
        if one.is_pruned:
            return FinishedRun(one.run, RunStatus.PRUNED, seconds)
        if self._stopped_by is not None:
            return FinishedRun(one.run, RunStatus.STOPPED, seconds)
        message = one.job.fault() or one.spec.last_line()
        return FinishedRun(one.run, RunStatus.FAILED, seconds, message)

    def _write_failures(self, finished: Sequence[FinishedRun]) -> None:
        """Store the last log lines of failed runs, for the report."""
        path = self.directory / FAILURES_FILE
        known = read_failures(self.directory)
        for one in finished:
            known.pop(one.run.run_id, None)
            if one.status is RunStatus.FAILED:
                known[one.run.run_id] = one.message
        write_atomically(path, json.dumps(known, indent=2) + "\n")

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Have signals stop the runs, which save their work, and then the sweep."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _: object) -> None:
            self._stopped_by = signal.Signals(number).name
            for one in self._working:
                one.job.stop()

        before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def is_own_sweep(directory: Path) -> bool:
    """Whether this user made the plan of a sweep's folder on this machine."""
    try:
        plan = (directory / PLAN_FILE).read_bytes()
        signature = (directory / SIGNATURE_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    return is_signed(plan, signature)


def read_failures(directory: Path) -> dict[str, str]:
    """The last log lines of a sweep's failed runs, by run id."""
    try:
        stored = json.loads((directory / FAILURES_FILE).read_text(encoding="utf-8"))
        return {run_id: str(message) for run_id, message in stored.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}
