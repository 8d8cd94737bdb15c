"""Run Python code that a model wrote, where it can reach nothing.

The code runs under bubblewrap: namespaces of its own without a network, a file system that holds a
read-only Python and one empty folder, no environment, and limits on time, memory, processes and
file size. A user namespace without privileges is used throughout; who runs as root becomes an
unprivileged user first, since root is not held by limits on processes. What is left is the
kernel's own interface: no system call is filtered.

Where bubblewrap cannot do this, functions are called by an interpreter without access to the
machine, if that is installed and knows all that they need (`nip_astra.utils.interpreter`). Where it
does not, and for whole programs, nothing is run: there is no weaker way.

What the code gives back is untrusted. Expected results stay outside, so that code which knows how
it is checked gains nothing by it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import call_in_interpreter, why_no_interpreter
from nip_astra.utils.sandbox_values import CallResult as CallResult
from nip_astra.utils.sandbox_values import Outcome, SandboxResult
from nip_astra.utils.sandbox_values import SandboxLimits as SandboxLimits

_ASKED = "code that a model wrote was to be run, and it runs in a sandbox alone"
_TODO = (
    "Install bubblewrap (Debian: apt install bubblewrap) and allow user namespaces; functions that "
    "need a part of Python only can be called without it: pip install 'nip_astra[sandbox]'."
)
_NOBODY = 65534
_PYTHON = "/python"
_GRACE_SECONDS = 2.0
_MIB = 2**20

# Read by the Python in the sandbox, before the code: limits, then the code under its own name.
_LAUNCHER = """
import json, os, resource, sys
limits, code = json.loads(sys.stdin.readline())
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
exec(compile(code, "<code>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""

# Calls a function of the code; a line for each call. Stands behind the code in the same program.
_CALLER = """
def _call_all(name, calls):
    from json import dumps
    from sys import __stdout__
    for arguments in calls:
        try:
            line = dumps({"value": globals()[name](*arguments)})
        except Exception as error:
            line = dumps({"error": type(error).__name__ + ": " + str(error)[:200]})
        __stdout__.write("\\n" + _MARK + line + "\\n")
"""


def run_in_sandbox(
    code: str, stdin: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a Python program where it can reach nothing.

    Parameters
    ----------
    code : str
        The program.
    stdin : str
        What it reads from standard input.
    limits : SandboxLimits, optional
        What it may use.

    Raises
    ------
    SandboxUnavailableError
        When this machine offers no sandbox; the code is not run.
    """
    check_sandbox()
    return _run(code, stdin, limits or SandboxLimits())


def call_in_sandbox(
    code: str,
    function: str,
    calls: Sequence[Sequence[Any]],
    limits: SandboxLimits | None = None,
) -> list[CallResult]:
    """Call a function that untrusted code defines, with each of several lists of arguments.

    All calls are made by one process, one after the other; those that the limits cut off have an
    error. Compare the values with what is expected here, outside of the sandbox.

    Parameters
    ----------
    code : str
        Source that defines the function.
    function : str
        Its name.
    calls : sequence of sequence
        Arguments of each call, as JSON can hold them.

    Returns
    -------
    list of CallResult
        One a call, in order.

    Raises
    ------
    SandboxUnavailableError
        When this machine offers no sandbox, or none that knows all that the code needs.
    """
    if why := why_no_bubblewrap():
        if missing := why_no_interpreter():
            raise SandboxUnavailableError(f"{_ASKED}, but {why}, and {missing}. {_TODO}")
        return call_in_interpreter(code, function, calls, limits or SandboxLimits())
    mark = f"{os.urandom(8).hex()}:"
    program = (
        f"{code}\n_MARK = {mark!r}\n{_CALLER}\n"
        f"_call_all({function!r}, __import__('json').loads({json.dumps(list(calls))!r}))\n"
    )
    result = run_in_sandbox(program, limits=limits)
    lines = [line[len(mark) :] for line in result.stdout.splitlines() if line.startswith(mark)]
    found = [_read_call(line) for line in lines[: len(calls)]]
    why = _why_cut_off(result)
    return [*found, *[CallResult(error=why)] * (len(calls) - len(found))]


def check_sandbox() -> None:
    """Refuse to go on where this machine offers no sandbox for whole programs.

    Raises
    ------
    SandboxUnavailableError
        With what was tried and what to install.
    """
    if why := why_no_bubblewrap():
        raise SandboxUnavailableError(f"{_ASKED}, but {why}. {_TODO}")


@lru_cache(maxsize=1)
def why_no_bubblewrap() -> str:
    """Why this machine offers no sandbox of bubblewrap; empty where it does."""
    if not sys.platform.startswith("linux") or shutil.which("bwrap") is None:
        return "there is no `bwrap` on this machine"
    probe = "import os; print(os.getuid() != 0 and os.listdir('.') == [])"
    result = _run(probe, "", SandboxLimits(seconds=20))
    if result.stdout.strip() == "True":
        return ""
    said = result.stderr.strip().splitlines()[-1:] or ["nothing"]
    return f"bubblewrap cannot make one here: it ended with {result.exit_code} and said {said[0]!r}"


def _run(code: str, stdin: str, limits: SandboxLimits) -> SandboxResult:
    given = json.dumps([_resource_limits(limits), code]) + "\n" + stdin
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        process = subprocess.Popen(
            _command(limits),
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            env={},
            cwd="/",
            start_new_session=True,
        )
        is_late = False
        try:
            process.communicate(given.encode("utf-8", "surrogatepass"), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
        seconds = time.monotonic() - started
        exit_code = _exit_code(process.returncode)
        outcome: Outcome = (
            "timeout"
            if is_late
            else "killed"
            if exit_code < 0
            else "failed"
            if exit_code
            else "finished"
        )
        stdout, stderr = (_read(file, limits.file_mib * _MIB) for file in (out, err))
        return SandboxResult(outcome, exit_code, stdout, stderr, seconds)


def _command(limits: SandboxLimits) -> list[str]:
    """The command that runs the launcher in the sandbox; as root, after ceasing to be it."""
    bwrap = shutil.which("bwrap") or "bwrap"
    prefix = os.path.realpath(sys.base_prefix)
    python = f"{_PYTHON}/bin/python{sysconfig.get_python_version()}"
    is_root = os.getuid() == 0
    inner = [
        *(
            bwrap,
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--as-pid-1",
        ),
        *("--new-session", "--clearenv", "--hostname", "sandbox"),
        *_libraries(["/usr/lib", "/usr/lib64"]),
        *("--ro-bind", _PYTHON if is_root else prefix, _PYTHON),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--size", str(limits.folder_mib * _MIB), "--tmpfs", "/work", "--chdir", "/work"),
        *("--remount-ro", "/", "--", python, "-I", "-B", "-c", _LAUNCHER),
    ]
    if not is_root:
        return inner
    outer = [
        *(bwrap, "--unshare-net", "--unshare-ipc", "--die-with-parent", "--clearenv"),
        *_libraries(["/usr"]),
        *("--ro-bind", prefix, _PYTHON, "--dev", "/dev", "--bind", "/proc", "/proc"),
        *("--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--cap-drop", "ALL"),
        *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--"),
        *("/usr/bin/setpriv", "--reuid", str(_NOBODY), "--regid", str(_NOBODY)),
        *("--clear-groups", "--no-new-privs", "--"),
    ]
    return outer + inner


def _libraries(folders: Sequence[str]) -> list[str]:
    """Options that show shared libraries; of /usr only these folders, where there are any."""
    options = [
        part for path in folders if Path(path).is_dir() for part in ("--ro-bind", path, path)
    ]
    for path in (Path("/", name) for name in ("bin", "lib", "lib64")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir() and path.name != "bin":
            options += ["--ro-bind", str(path), str(path)]
    return options


def _resource_limits(limits: SandboxLimits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_mib * _MIB,
        "RLIMIT_NPROC": limits.num_processes,
        "RLIMIT_FSIZE": limits.file_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what still runs; the sandbox's processes die with the first of them."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_GRACE_SECONDS)


def _exit_code(returncode: int) -> int:
    """The code's own exit code: bubblewrap reports a signal as 128 and its number."""
    return 128 - returncode if returncode > 128 else returncode


def _read(file: IO[bytes], size: int) -> str:
    file.seek(0)
    return file.read(size).decode("utf-8", "replace")


def _read_call(line: str) -> CallResult:
    try:
        told = json.loads(line)
        return CallResult(told.get("value"), str(told.get("error", "")))
    except (ValueError, AttributeError):
        return CallResult(error="its result is no JSON")


def _why_cut_off(result: SandboxResult) -> str:
    if result.outcome == "timeout":
        return f"stopped after {result.seconds:.1f} s"
    if result.outcome == "killed":
        return f"ended by signal {-result.exit_code}"
    last = result.stderr.strip().splitlines()[-1:]
    return last[0][:200] if last else "ended before the call"
