"""Starting and ending child processes, forked or run as programs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from nip_astra.errors import WorkerProcessError
from nip_astra.trust import read_variable

PERIOD = 0.05
"""Maximum seconds between polls of a process."""
SECONDS_TO_END = 5.0
"""Seconds to wait for the end of a process whose connections are closed."""
SECONDS_BETWEEN_CHECKS = 1.0
"""Maximum seconds between two checks of whether a process works."""
MIN_WORKING_SHARE = 0.01
"""Share of a processor that a working process uses at least."""
_PR_SET_PDEATHSIG = 1
_PACKAGE_HOME = Path(__file__).resolve().parents[2]


def end_with_parent(number: signal.Signals) -> None:
    """Let Linux send this process a signal when its parent ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class Child:
    """A process that this one started."""

    def __init__(self, name: str, pid: int, program: subprocess.Popen[bytes] | None = None) -> None:
        self.name, self.pid, self.program = name, pid, program
        self._code: int | None = None

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.program is not None:
            return self.program.poll()
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                # Some launchers have children reaped by the system, which keeps no code.
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    @property
    def ending(self) -> str:
        """Description of how it ended."""
        code = self.code
        if code is None:
            return "is running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"

    def request_stop(self) -> None:
        """Send SIGTERM without waiting."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the process; return whether it has ended."""
        until = None if seconds is None else time.monotonic() + seconds
        pause = PERIOD / 100
        while self.code is None:
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, PERIOD)
        return True

    def wait_while_working(self, idle_seconds: float) -> bool:
        """Wait for the end of the process; return False once it does nothing for so long.

        A process works if it or one of its descendants uses the processor. Where the system does
        not tell (other than Linux), it always does.
        """
        before, since = cpu_seconds(self.pid), time.monotonic()
        # A thread that only watches, such as a progress line's, uses less.
        min_seconds = MIN_WORKING_SHARE * idle_seconds
        while not self.wait(min(idle_seconds, SECONDS_BETWEEN_CHECKS)):
            now = cpu_seconds(self.pid)
            # Less than before once a descendant has ended.
            if now is None or before is None or abs(now - before) > min_seconds:
                before, since = now, time.monotonic()
            elif time.monotonic() - since >= idle_seconds:
                return False
        return True

    def kill(self) -> None:
        """Kill the process if it is running, and wait for its end."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def stop(self, seconds: float) -> bool:
        """Request a stop and kill after the timeout; return whether it stopped by itself."""
        self.request_stop()
        has_ended = self.wait(seconds)
        self.kill()
        return has_ended


def cpu_seconds(pid: int) -> float | None:
    """Return the processor time of a process and its descendants; None where it is unknown."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            _state, parent, *rest = stat.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            # The process has just ended.
            continue
        parents[int(stat.parent.name)] = int(parent)
        # User and system time, and those of children that have ended, in clock ticks.
        used[int(stat.parent.name)] = sum(map(int, rest[9:13]))
    if pid not in used:
        return None
    ticks = 0
    for process in used:
        ancestor = process
        while ancestor != pid and ancestor in parents:
            ancestor = parents[ancestor]
        ticks += used[process] if ancestor == pid else 0
    return ticks / os.sysconf("SC_CLK_TCK")


class AdoptedChild(Child):
    """A child of an earlier process; its exit code is unknown."""

    def __init__(self, name: str, pid: int | None, started: str | None) -> None:
        super().__init__(name, pid or 0)
        self.started = started

    @property
    def code(self) -> int | None:
        return None if is_running(self.pid, self.started) else 0

    @property
    def ending(self) -> str:
        return "is running" if self.code is None else "ended while it was not watched"


def process_start(pid: int) -> str | None:
    """Return the start time of a process in system units; None if it has ended or is unknown.

    Together with the id, which may be reused, it identifies a process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def is_running(pid: int | None, started: str | None) -> bool:
    """Return whether the process with this id is still the one that started at this time."""
    if not pid:
        return False
    if not Path("/proc").is_dir():
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    return started is not None and process_start(pid) == started


def start_program(name: str, arguments: Sequence[str], *, log: Path, **options: Any) -> Child:
    """Start Python with this package and further `Popen` options; append its output to a file.

    Terminal signals do not reach it.
    """
    path = [str(_PACKAGE_HOME), read_variable("PYTHONPATH") or ""]
    with log.open("ab") as output:
        program = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            start_new_session=True,
            **options,
        )
    return Child(name, program.pid, program)


def check_alive(children: Iterable[Child]) -> None:
    """Raise if any process has ended."""
    for child in children:
        if child.code is not None:
            raise ended_early(child)


def ended_early(child: Child) -> WorkerProcessError:
    """Return the error for a process that ended too early; kill it if it is still running."""
    # Its pipes close a moment before it ends.
    child.wait(SECONDS_TO_END)
    child.kill()
    return WorkerProcessError(
        f"{child.name} (process {child.pid}) {child.ending} before its work was done. "
        "Run with --num-threads 1 if this happens again."
    )
