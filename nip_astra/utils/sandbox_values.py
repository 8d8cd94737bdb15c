"""What code that a model wrote may use, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Outcome: TypeAlias = Literal["finished", "failed", "timeout", "killed"]


@dataclass(frozen=True)
class SandboxLimits:
    """What code may use.

    Attributes
    ----------
    seconds : float
        Wall-clock seconds, the start of Python included.
    cpu_seconds : int
        Processor seconds of each process.
    memory_mib : int
        Address space of each process, MiB; where a control group can be made also the memory of
        all of them together, beside that of the folder.
    num_processes : int
        Processes and threads at a time.
    file_mib : int
        Size of each file and each of stdout and stderr, MiB.
    folder_mib : int
        Size of the writable folder, MiB.
    """

    seconds: float = 10.0
    cpu_seconds: int = 5
    memory_mib: int = 512
    num_processes: int = 4
    file_mib: int = 1
    folder_mib: int = 16


@dataclass(frozen=True)
class SandboxResult:
    """What became of code in the sandbox.

    Attributes
    ----------
    outcome : {"finished", "failed", "timeout", "killed"}
        Exit code 0, another one, stopped at the wall-clock limit, or ended by a signal.
    exit_code : int
        Of the code; negative for a signal, as in `subprocess`.
    stdout, stderr : str
        What it wrote, at most `file_mib` each; bytes that are no UTF-8 are replaced.
    seconds : float
        Wall-clock seconds.
    """

    outcome: Outcome
    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True)
class CallResult:
    """What one call of a function gave.

    Attributes
    ----------
    value : object
        Its result, as JSON has it; None with an error.
    error : str
        Why there is no result; empty where there is one.
    """

    value: Any = None
    error: str = ""
