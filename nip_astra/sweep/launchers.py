"""Launchers of a sweep's runs: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from nip_astra.sweep.plan import PlannedRun
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, REPORT, RunDirectory
from nip_astra.tracking.run_lock import is_abandoned
from nip_astra.utils.children import Child, end_with_parent, start_program
from nip_astra.utils.ray_cluster import open_ray

POLL_SECONDS = 0.2
MAX_LINE_BYTES = 4096
"""Bytes at the end of a log that are searched for its last line."""
MAX_RETRIES = 3
"""How often Ray restarts a run whose worker died; each goes on from the latest checkpoint."""


class RunStatus(StrEnum):
    """State of a run of a sweep."""

    NEW = "new"
    STOPPED = "stopped"
    """Started and not ended: it is resumed from its latest checkpoint."""
    ENDED = "ended"
    PRUNED = "pruned"
    """Stopped for good because other trials did better."""
    FAILED = "failed"
    """Its process ended with an error in this call of the sweep."""


@dataclass(frozen=True)
class FinishedRun:
    """The outcome of a run.

    Attributes
    ----------
    message : str
        The last line of a failed run's log.
    """

    run: PlannedRun
    status: RunStatus
    seconds: float
    message: str = ""


@dataclass(frozen=True)
class RunSpec:
    """How a run is started or resumed; only text, so that another machine can do it.

    Attributes
    ----------
    folder : str
        The run's directory.
    log : str
        File for its output.
    progress : str
        File with its progress.
    stop : str
        File whose existence makes the run save its work and stop.
    working_directory : str
        Base of relative paths in parameters.
    begin, resume : tuple[str, ...]
        Command-line arguments.
    """

    folder: str
    log: str
    progress: str
    stop: str
    working_directory: str
    begin: tuple[str, ...]
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
        """The last line of its log."""
        with suppress(OSError), Path(self.log).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - MAX_LINE_BYTES))
            return log.read().decode("utf-8", errors="replace").strip().rpartition("\n")[2]
        return ""


def status_of(folder: Path) -> RunStatus:
    """State of the run in a folder, from its files."""
    if RunDirectory(folder).has_ended and (folder / REPORT).is_file():
        return RunStatus.ENDED
    return RunStatus.STOPPED if (folder / HYPER_PARAMETERS).is_file() else RunStatus.NEW


def execute(spec: RunSpec) -> int:
    """Run to the end or until the stop file exists, and return the exit code.

    A run that an earlier process has started is resumed once that process has released it.
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
        """Whether it has ended, successfully or not."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to save its work and end."""

    def fault(self) -> str:
        """Why it could not be executed at all; empty if its own log says so."""
        return ""


class Launcher(ABC):
    """Starts runs.

    Attributes
    ----------
    num_at_once : int
        Runs in progress at the same time.
    """

    num_at_once: int

    @abstractmethod
    def start(self, spec: RunSpec) -> Job:
        """Start a run, or resume it."""


class LocalProcesses(Launcher):
    """Each run is a process of this machine."""

    def __init__(self, num_at_once: int) -> None:
        self.num_at_once = num_at_once

    def start(self, spec: RunSpec) -> Job:
        return _Process(spec.start())


class _Process(Job):
    def __init__(self, process: Child) -> None:
        self._process = process

    def has_ended(self) -> bool:
        return self._process.code is not None

    def stop(self) -> None:
        self._process.request_stop()


class RayTasks(Launcher):
    """Each run is a task of a Ray cluster, on any of its machines.

    All machines see the sweep's folder under the same path. Ray restarts a task whose worker died,
    which resumes the run from its latest checkpoint.

    Parameters
    ----------
    address : str or None
        Of the cluster; None takes the environment's RAY_ADDRESS, or starts Ray on this machine.
    num_at_once : int or None
        None for as many as the cluster has resources for.
    num_cpus, num_gpus : float
        Resources of a run.

    Raises
    ------
    MissingDependencyError
        When Ray is not installed.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        num_at_once: int | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
    ) -> None:
        self._ray = open_ray(address)
        self._task = self._ray.remote(
            num_cpus=num_cpus, num_gpus=num_gpus, max_retries=MAX_RETRIES
        )(execute)
        available = self._ray.cluster_resources()
        needed = {"CPU": num_cpus, "GPU": num_gpus}
        room = [available.get(name, 0) // amount for name, amount in needed.items() if amount]
        self.num_at_once = num_at_once or max(1, int(min(room, default=1)))

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
            # The sweep goes on; this run counts as failed.
            self._fault = str(error).strip().rpartition("\n")[2]
        Path(self._spec.stop).unlink(missing_ok=True)
        return True

    def stop(self) -> None:
        Path(self._spec.stop).touch()

    def fault(self) -> str:
        return self._fault
