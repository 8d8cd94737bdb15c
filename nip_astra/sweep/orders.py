"""What the process of one run is told, and how far a run is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from nip_astra.sweep.plan import PlannedRun
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, REPORT, RunDirectory
from nip_astra.tracking.run_lock import is_abandoned
from nip_astra.trust import read_variable
from nip_astra.utils.children import end_with_parent

POLL_SECONDS = 0.2
LAST_LINES = 4096
"""Bytes at the end of a log in which its last line is looked for."""
_PACKAGE_HOME = Path(__file__).resolve().parents[2]


class RunStatus(StrEnum):
    """How far a run of a sweep is."""

    NEW = "new"
    STOPPED = "stopped"
    """Begun and not ended: it goes on from its latest checkpoint."""
    ENDED = "ended"
    PRUNED = "pruned"
    """Stopped for good, since other trials did better."""
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


@dataclass(frozen=True)
class RunOrder:
    """What begins a run, or goes on with it; holds text only, so that another machine can do it.

    Attributes
    ----------
    folder : str
        The run's directory.
    log : str
        Where its output goes.
    progress : str
        File that tells how far it is.
    stop : str
        File whose being there asks the run to save its work and stop.
    working_directory : str
        In which relative paths of parameters are looked for.
    begin, go_on : tuple[str, ...]
        Words of the command line after the program's name.
    """

    folder: str
    log: str
    progress: str
    stop: str
    working_directory: str
    begin: tuple[str, ...]
    go_on: tuple[str, ...]

    def command(self) -> list[str]:
        """What does the run, or what is left of it."""
        is_begun = status_of(Path(self.folder)) is RunStatus.STOPPED
        return [sys.executable, "-m", "nip_astra", *(self.go_on if is_begun else self.begin)]

    def start(self) -> subprocess.Popen[bytes]:
        """Begin its process."""
        path = [str(_PACKAGE_HOME), read_variable("PYTHONPATH") or ""]
        with Path(self.log).open("ab") as log:
            return subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.working_directory,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                # A signal of the terminal is for the sweep, which hands it on.
                start_new_session=True,
                preexec_fn=partial(end_with_parent, signal.SIGTERM),
            )

    def last_line(self) -> str:
        """The last line of its log."""
        with suppress(OSError):
            with Path(self.log).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_LINES))
                said = log.read().decode("utf-8", errors="replace").strip()
            return said.rpartition("\n")[2]
        return ""


def status_of(folder: Path) -> RunStatus:
    """How far a run is, by what stands in its folder."""
    if RunDirectory(folder).has_ended and (folder / REPORT).is_file():
        return RunStatus.ENDED
    return RunStatus.STOPPED if (folder / HYPER_PARAMETERS).is_file() else RunStatus.NEW


def carry_out(order: RunOrder) -> int:
    """Do a run to its end, or until it is asked to stop, and give its exit code.

    What an earlier process has begun is gone on with once that process has let go of the run.
    """
    folder = Path(order.folder)
    while not is_abandoned(folder):
        time.sleep(POLL_SECONDS)
    if status_of(folder) is RunStatus.ENDED:
        return 0
    process = order.start()
    is_asked_to_stop = False
    while process.poll() is None:
        if not is_asked_to_stop and Path(order.stop).exists():
            is_asked_to_stop = True
            process.send_signal(signal.SIGTERM)
        time.sleep(POLL_SECONDS)
    return process.returncode
