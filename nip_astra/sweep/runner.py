"""Keep the runs of a sweep going: some at once, each a process of its own, none done twice."""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from nip_astra.errors import RunDirectoryError, StopRequested
from nip_astra.sweep.plan import PlannedRun, SweepPlan
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, REPORT, RESULTS, write_atomically
from nip_astra.tracking.run_lock import is_abandoned, run_lock
from nip_astra.utils.processor import num_cores

PLAN_FILE, LOGS_DIR = "sweep.json", "logs"
POLL_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class RunStatus(StrEnum):
    """How far a run of a sweep is."""

    NEW = "new"
    STOPPED = "stopped"
    """Begun and not ended: it goes on from its latest checkpoint."""
    ENDED = "ended"
    FAILED = "failed"
    """Its process ended with an error in this call of the sweep."""


@dataclass(frozen=True)
class FinishedRun:
    """What became of a run.

    Attributes
    ----------
    message : str
        The last line of the log of a run that failed.
    """

    run: PlannedRun
    status: RunStatus
    seconds: float
    message: str = ""


@dataclass
class _Working:
    run: PlannedRun
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    started: float = field(default_factory=time.monotonic)


class SweepRunner:
    """Runs what a plan asks for in a folder, and knows from the folder what is done.

    Parameters
    ----------
    directory : Path
        Holds a folder a run, `sweep.json`, and the logs of all runs.
    num_processes : int, optional
        Runs at once; without it one.
    settings : Mapping[str, Any]
        Settings of all runs.
    is_trusted : bool
        Whether code that the runs name is loaded.
    """

    def __init__(
        self,
        plan: SweepPlan,
        directory: Path,
        *,
        num_processes: int = 1,
        settings: Mapping[str, Any] | None = None,
        is_trusted: bool = False,
    ) -> None:
        self.plan = plan
        self.directory = directory
        self.num_processes = num_processes
        self.settings = dict(settings or {})
        self.settings.setdefault("num_threads", max(1, num_cores() // num_processes))
        self.settings.setdefault("wandb_group", directory.name)
        self.is_trusted = is_trusted
        self._stopped_by: str | None = None
        self._working: list[_Working] = []

    def status(self, run: PlannedRun) -> RunStatus:
        """How far a run is, by what stands in its folder."""
        folder = self.directory / run.run_id
        if (folder / RESULTS).is_file() and (folder / REPORT).is_file():
            return RunStatus.ENDED
        return RunStatus.STOPPED if (folder / HYPER_PARAMETERS).is_file() else RunStatus.NEW

    def run(
        self,
        runs: Sequence[PlannedRun],
        *,
        on_end: Callable[[FinishedRun], object] = lambda _: None,
    ) -> list[FinishedRun]:
        """Do the runs that have not ended. One that fails does not stop the others.

        Parameters
        ----------
        on_end : Callable
            Told of each run as it ends, those included that had ended before.

        Raises
        ------
        RunDirectoryError
            When another process is at work on the sweep, or its folder cannot be written.
        StopRequested
            By a signal, after all runs at work have saved what they did.
        """
        self._prepare_folder()
        finished: list[FinishedRun] = []

        def note(one: FinishedRun) -> None:
            finished.append(one)
            on_end(one)

        with run_lock(self.directory), self._listening():
            waiting = []
            for run in runs:
                if self.status(run) is RunStatus.ENDED:
                    note(FinishedRun(run, RunStatus.ENDED, 0.0))
                else:
                    waiting.append(run)
            while waiting or self._working:
                if self._stopped_by is None:
                    self._start(waiting)
                elif not self._working:
                    break
                for one in [one for one in self._working if one.process.poll() is not None]:
                    self._working.remove(one)
                    note(self._outcome(one))
                time.sleep(POLL_SECONDS)
        if self._stopped_by is not None:
            raise StopRequested(self._stopped_by, str(self.directory), command="sweep")
        return finished

    def _prepare_folder(self) -> None:
        try:
            (self.directory / LOGS_DIR).mkdir(parents=True, exist_ok=True)
            plan = json.dumps(self.plan.to_dict(), indent=2)
            write_atomically(self.directory / PLAN_FILE, plan + "\n")
        except OSError as error:
            raise RunDirectoryError(
                f"the sweep was to be kept in {self.directory}, but that cannot be written: "
                f"{error.strerror or error}. Give another --sweep-dir."
            ) from error

    def _start(self, waiting: list[PlannedRun]) -> None:
        """Begin as many runs as there is room for, leaving those that a process is still at."""
        for run in list(waiting):
            if len(self._working) >= self.num_processes:
                return
            if not is_abandoned(self.directory / run.run_id):
                # A process of a sweep that was killed is saving its work.
                continue
            waiting.remove(run)
            log = (self.directory / LOGS_DIR / f"{run.run_id}.txt").open("ab")
            process = subprocess.Popen(
                self._command(run),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A signal of the terminal is for the sweep, which hands it on.
                start_new_session=True,
                preexec_fn=_stop_with_parent,
            )
            self._working.append(_Working(run, process, log))

    def _command(self, run: PlannedRun) -> list[str]:
        settings = {**self.settings, "progress": False, "runs_dir": str(self.directory)}
        words = [sys.executable, "-m", "nip_astra"]
        if self.status(run) is RunStatus.STOPPED:
            words += ["resume", str(self.directory / run.run_id)]
        else:
            words += ["run", "--trainer", run.arm.trainer, "--seed", str(run.seed)]
            words += ["--run-id", run.run_id]
            words += ["--scenario", run.arm.scenario] if run.arm.scenario else []
            words += ["--parameters", self.plan.parameters] if self.plan.parameters else []
            for override in self.plan.overrides_of(run.arm):
                words += ["--set", override]
        for plugin in self.plan.plugins:
            words += ["--plugin", plugin]
        for name, value in settings.items():
            words += ["--settings", f"{name}={json.dumps(value)}"]
        return [*words, "--trust"] if self.is_trusted else words

    def _outcome(self, one: _Working) -> FinishedRun:
        one.log.close()
        seconds = time.monotonic() - one.started
        status = self.status(one.run)
        if status is RunStatus.ENDED:
            return FinishedRun(one.run, status, seconds)
        if self._stopped_by is not None:
            return FinishedRun(one.run, RunStatus.STOPPED, seconds)
        log = Path(one.log.name).read_text(encoding="utf-8", errors="replace").strip()
        return FinishedRun(one.run, RunStatus.FAILED, seconds, log.rpartition("\n")[2])

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Have signals end the sweep when what it works on has been saved."""

        def stop(number: int, _: object) -> None:
            self._stopped_by = signal.Signals(number).name
            for one in self._working:
                one.process.send_signal(signal.SIGTERM)

        before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _stop_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent is gone, however that ended."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
