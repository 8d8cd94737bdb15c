"""Run Python code that a model wrote, isolated from the machine.

The code runs under bubblewrap: separate namespaces without a network, a file system with a
read-only Python and one empty folder, no environment, an empty keyring, a filter of system calls
(https://docs.kernel.org/userspace-api/seccomp_filter.html; refused calls fail with EPERM), and
limits on time, memory, processes and file size. If a control group can be made, it bounds the
memory of all processes together. Root becomes an unprivileged user first, since limits on processes
do not apply to root.

Without bubblewrap, functions are called by an interpreter without access to the machine, if it is
installed and supports the code (`nip_astra.utils.interpreter`). Otherwise nothing is run.

The code's output is untrusted. Expected results stay outside of the sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import logging
import os
import platform
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils.interpreter import CallResult as CallResult
from nip_astra.utils.interpreter import (
    Outcome,
    SandboxResult,
    call_in_interpreter,
    run_in_interpreter,
    why_no_interpreter,
)
from nip_astra.utils.interpreter import SandboxLimits as SandboxLimits

logger = logging.getLogger(__name__)

_NEEDS_SANDBOX = "code of a model runs in a sandbox only"
_TODO = (
    "Install bubblewrap (Debian: apt install bubblewrap) and allow user namespaces, or, for simple "
    "functions: pip install 'nip_astra[sandbox]'."
)
_NOBODY = 65534
_PYTHON = "/python"
_GRACE_SECONDS = 10.0
_MIB = 2**20
_GROUPS, _OWN_GROUPS = "/sys/fs/cgroup", Path("/proc/self/cgroup")
_GROUP_NAME = "nip-astra"
_numbers = itertools.count()

OPEN_CALLS = (
    "keyrings, memory of System V, AF_VSOCK, io_uring, performance counters, bpf and traces of "
    "processes are open to code there"
)
"""Kernel features that only the system call filter blocks."""

_PROBE = """
import os
state = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(os.getuid() != 0 and os.listdir(".") == [], state.get("Seccomp", "0"))
"""

# Read by the Python in the sandbox, before the code: limits, then the code under its own name.
_LAUNCHER = """
import json, os, resource, sys
limits, code = json.loads(sys.stdin.readline())
for name, value in limits.items():
    resource.setrlimit(getattr(resource, name), (value, value))
exec(compile(code, "<code>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
"""

# After the code in the same program: calls its function, one line per call.
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

# Values cross between sandboxes as JSON, with marks for other types.
_CODING = """
def _encoded(value):
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [_encoded(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(one) for one in item] for item in value.items()]}
    return [_encoded(one) for one in value] if isinstance(value, list) else value
def _decoded(value):
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        if kind == "dict":
            return {_decoded(key): _decoded(one) for key, one in items}
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(_decoded, items))
    return [_decoded(one) for one in value] if isinstance(value, list) else value
"""

# After untrusted code: calls its function for another sandbox.
_ANSWERER = """
def _answer_all(name, mark):
    from json import dumps, loads
    from sys import __stdin__, __stdout__
    for line in __stdin__:
        try:
            answer = dumps({"value": _encoded(globals()[name](*_decoded(loads(line))))})
        except Exception as error:
            answer = dumps({"error": type(error).__name__ + ": " + str(error)[:200]})
        __stdout__.write("\\n" + mark + answer + "\\n")
        __stdout__.flush()
"""

# Before trusted code: lets it call that function like its own.
_ASKER = """
def _ask(asking, answering, mark, longest):
    from json import dumps, loads
    requests, answers = open(asking, "w"), open(answering, errors="replace")
    def call(*arguments):
        print(dumps(_encoded(list(arguments))), file=requests, flush=True)
        while line := answers.readline(longest):
            if line.startswith(mark):
                answer = loads(line[len(mark):])
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return _decoded(answer["value"])
        raise RuntimeError("it ended before the call")
    return call
"""


def run_in_sandbox(
    code: str, stdin: str = "", limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a Python program in a sandbox; `SandboxUnavailableError` if there is none."""
    check_sandbox()
    return _run(code, stdin, limits or SandboxLimits(), _filter())


def call_in_sandbox(
    code: str,
    function: str,
    calls: Sequence[Sequence[Any]],
    limits: SandboxLimits | None = None,
) -> list[CallResult]:
    """Call a function that untrusted code defines, with each of several lists of arguments.

    One process makes all calls in order; those cut off by the limits have an error. Compare the
    values with the expected ones here, outside of the sandbox. Arguments must be JSON values.

    Raises `SandboxUnavailableError` if this machine has no sandbox that supports the code.
    """
    if why_no_bubblewrap():
        check_any_sandbox()
        return call_in_interpreter(code, function, calls, limits or SandboxLimits())
    mark = f"{os.urandom(8).hex()}:"
    program = (
        f"{code}\n_MARK = {mark!r}\n{_CALLER}\n"
        f"_call_all({function!r}, __import__('json').loads({json.dumps(list(calls))!r}))\n"
    )
    result = run_in_sandbox(program, limits=limits)
    lines = [line[len(mark) :] for line in result.stdout.splitlines() if line.startswith(mark)]
    results = [_read_call(line) for line in lines[: len(calls)]]
    # Calls that the program did not reach.
    missing = CallResult(error=_why_cut_off(result))
    return [*results, *[missing] * (len(calls) - len(results))]


def run_beside_in_sandbox(
    code: str, function: str, checker: str, limits: SandboxLimits | None = None
) -> SandboxResult:
    """Run a program that calls a function of untrusted code, which runs in another sandbox.

    The code sees only the arguments of each call; values are plain: those of JSON, tuples, sets and
    dictionaries. In `checker`, the program, a call raises RuntimeError if the function does or its
    process ended. `limits` apply to each of the two.

    Raises `SandboxUnavailableError` if this machine has no sandbox; nothing is run.
    """
    check_sandbox()
    limits, program, mark = limits or SandboxLimits(), _filter(), f"{os.urandom(8).hex()}:"
    answerer = f"{code}\n{_CODING}{_ANSWERER}\n_answer_all({function!r}, {mark!r})\n"

    def run() -> SandboxResult:
        with ExitStack() as files:
            requests, asking = _pipe(files)
            answers, giving = _pipe(files)
            unread = files.enter_context(tempfile.TemporaryFile())
            files.enter_context(_sandbox(limits, program, requests, giving, unread))
            # The checker must notice when the other process closes them.
            requests.close()
            giving.close()
            left = memoryview(_first_line(answerer, limits))
            with suppress(BrokenPipeError):
                while left:
                    left = left[asking.write(left) :]
            ends = (asking.fileno(), answers.fileno())
            longest = limits.file_mib * _MIB
            asker = f"{_CODING}{_ASKER}\n{function} = _ask(*{ends}, {mark!r}, {longest})\n{checker}"
            return _run_here(_first_line(asker, limits), limits, program, ends)

    return _in_new_keyring(run)


def run_program(code: str, limits: SandboxLimits) -> SandboxResult:
    """Run a Python program, in the interpreter if there is no sandbox.

    Raises `SandboxUnavailableError` if neither is available, or the interpreter lacks a part of
    Python that the code needs.
    """
    if why_no_bubblewrap():
        check_any_sandbox()
        return run_in_interpreter(code, limits)
    return run_in_sandbox(code, limits=limits)


def check_any_sandbox() -> None:
    """Raise `SandboxUnavailableError` if there is neither a sandbox nor an interpreter."""
    if (why := why_no_bubblewrap()) and (missing := why_no_interpreter()):
        raise SandboxUnavailableError(f"{_NEEDS_SANDBOX}, but {why}, and {missing}. {_TODO}")


def check_sandbox() -> None:
    """Raise `SandboxUnavailableError` if whole programs cannot be run."""
    if why := why_no_bubblewrap():
        raise SandboxUnavailableError(f"{_NEEDS_SANDBOX}, but {why}. {_TODO}")


@lru_cache(maxsize=1)
def why_no_bubblewrap() -> str:
    """Return why bubblewrap does not work here; empty if it does."""
    if not sys.platform.startswith("linux") or shutil.which("bwrap") is None:
        return "there is no `bwrap` on this machine"
    return _why_failed(b"") if why_no_filter() else ""


@lru_cache(maxsize=1)
def why_no_filter() -> str:
    """Return why system calls are not filtered; empty if they are."""
    if not (program := filter_program(platform.machine())):
        return f"the numbers of system calls on {platform.machine()} are not known"
    return _why_failed(program)


@lru_cache(maxsize=1)
def why_no_memory_group() -> str:
    """Return why the total memory of all processes is not limited; empty if it is."""
    for parent, *_ in _group_parents():
        for left in parent.glob(f"{_GROUP_NAME}-*"):
            # Its process was killed, and could not remove it.
            if not Path("/proc", left.name.split("-")[-2]).exists():
                with suppress(OSError):
                    left.rmdir()
    with _memory_group(SandboxLimits()) as group:
        entering = subprocess.run(_enter(group, ["/bin/true"]), capture_output=True)
        if group and entering.returncode == 0:
            return ""
    return "this process may make no control group with a limit of memory"


def _why_failed(program: bytes) -> str:
    result = _run(_PROBE, "", SandboxLimits(seconds=20), program)
    if result.stdout.split() == ["True", "2" if program else "0"]:
        return ""
    last = result.stderr.strip().splitlines()[-1:] or ["nothing"]
    return f"bubblewrap fails here: it ended with {result.exit_code} and wrote {last[0]!r}"


@lru_cache(maxsize=1)
def _filter() -> bytes:
    """Return the system call filter; empty, with a warning, if there is none."""
    if not (why := why_no_filter()):
        return filter_program(platform.machine())
    logger.warning("system calls are not filtered in the sandbox (%s): %s", why, OPEN_CALLS)
    return b""


def _run(code: str, stdin: str, limits: SandboxLimits, program: bytes) -> SandboxResult:
    sent = _first_line(code, limits) + stdin.encode("utf-8", "surrogatepass")
    return _in_new_keyring(lambda: _run_here(sent, limits, program))


def _first_line(code: str, limits: SandboxLimits) -> bytes:
    """Return the launcher's input: resource limits and the code."""
    resources = {
        "RLIMIT_CPU": limits.cpu_seconds,
        "RLIMIT_AS": limits.memory_mib * _MIB,
        # And bubblewrap's own process.
        "RLIMIT_NPROC": limits.num_processes + 1,
        "RLIMIT_FSIZE": limits.file_mib * _MIB,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    return f"{json.dumps([resources, code])}\n".encode()


def _pipe(files: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reading, writing = os.pipe()
    return (
        files.enter_context(os.fdopen(reading, "rb", buffering=0)),
        files.enter_context(os.fdopen(writing, "wb", buffering=0)),
    )


def _in_new_keyring(run: Callable[[], SandboxResult]) -> SandboxResult:
    """Run in a new thread with an empty session keyring, which its processes inherit."""
    with ThreadPoolExecutor(1, initializer=join_new_keyring) as pool:
        return pool.submit(run).result()


def _run_here(
    sent: bytes, limits: SandboxLimits, program: bytes, descriptors: Sequence[int] = ()
) -> SandboxResult:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        with _sandbox(limits, program, subprocess.PIPE, out, err, descriptors) as process:
            is_late = False
            left = limits.seconds - (time.monotonic() - started)
            try:
                process.communicate(sent, max(left, 0))
            except subprocess.TimeoutExpired:
                is_late = True
        seconds = time.monotonic() - started
        exit_code = process.returncode
        if exit_code > 128:  # bubblewrap's report of a signal
            exit_code = 128 - exit_code
        outcome: Outcome = "failed" if exit_code > 0 else "killed" if exit_code else "finished"
        for file in (out, err):
            file.seek(0)
        stdout, stderr = (
            file.read(limits.file_mib * _MIB).decode("utf-8", "replace") for file in (out, err)
        )
        return SandboxResult("timeout" if is_late else outcome, exit_code, stdout, stderr, seconds)


@contextmanager
def _sandbox(
    limits: SandboxLimits,
    program: bytes,
    stdin: IO[bytes] | int,
    stdout: IO[bytes],
    stderr: IO[bytes],
    descriptors: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a sandbox that waits for its code; all of its processes end with the block."""
    with ExitStack() as files:
        group = None
        if not why_no_memory_group():
            group = files.enter_context(_memory_group(limits))
        info, info_writer = _pipe(files)
        filtering = files.enter_context(tempfile.TemporaryFile())
        filtering.write(program)
        filtering.seek(0)
        fds = (info_writer.fileno(), *([filtering.fileno()] if program else []))
        process = subprocess.Popen(
            _enter(group, _command(limits, *fds)),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={},
            cwd="/",
            start_new_session=True,
            pass_fds=(*fds, *descriptors),
        )
        info_writer.close()
        first = _first_process(info, limits.seconds)
        try:
            yield process
        finally:
            _end(process, first)


def _first_process(info: IO[bytes], seconds: float) -> int | None:
    """Return a descriptor of the sandbox's first process; all others end with it."""
    deadline = time.monotonic() + seconds
    report = b""
    while True:
        match = re.search(rb'"child-pid": (\d+)\D', report)
        if match is not None:
            break
        if not _is_ready(info.fileno(), deadline - time.monotonic()):
            return None
        chunk = info.read(4096)
        if not chunk:
            # bubblewrap has ended.
            return None
        report += chunk
    with suppress(OSError):
        return os.pidfd_open(int(match[1]))
    return None


def _is_ready(descriptor: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(max(seconds, 0) * 1000))


def _end(process: subprocess.Popen[bytes], first: int | None) -> None:
    """Kill the sandbox's first process; all others end with it.

    The code may have disabled its end with the parent.
    """
    if first is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(first, signal.SIGKILL)
        _is_ready(first, _GRACE_SECONDS)
        os.close(first)
    elif process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_GRACE_SECONDS)


@contextmanager
def _memory_group(limits: SandboxLimits) -> Iterator[Path | None]:
    """Create a control group that limits a sandbox's memory; None if impossible."""
    group = None
    for parent, limit, swap in _group_parents():
        group = parent / f"{_GROUP_NAME}-{os.getpid()}-{next(_numbers)}"
        try:
            group.mkdir()
            size = (limits.memory_mib + limits.folder_mib) * _MIB
            (group / limit).write_text(str(size), encoding="ascii")
            with suppress(OSError):
                (group / swap[0]).write_text(swap[1] or str(size), encoding="ascii")
            break
        except OSError:
            with suppress(OSError):
                group.rmdir()
            group = None
    try:
        yield group
    finally:
        deadline = time.monotonic() + _GRACE_SECONDS
        while group is not None and time.monotonic() < deadline:
            try:
                group.rmdir()
                break
            except OSError:
                # The kernel may not have let go of the last process yet.
                time.sleep(0.01)


def _group_parents() -> Iterator[tuple[Path, str, tuple[str, str]]]:
    """Yield control groups that this process may be able to divide, with their limit files."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                group = Path(f"{_GROUPS}/memory{path}")
                yield group, "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", "")
            elif not controllers:
                # A group that holds processes hands no limits on, but a sibling can be made.
                for parent in (Path(f"{_GROUPS}{path}"), Path(f"{_GROUPS}{path}").parent):
                    with suppress(OSError):
                        handed_on = (parent / "cgroup.subtree_control").read_text(encoding="ascii")
                        if "memory" in handed_on.split():
                            yield parent, "memory.max", ("memory.swap.max", "0")


def _enter(group: Path | None, command: list[str]) -> list[str]:
    """Wrap a command so that it first moves into a control group."""
    if group is None:
        return command
    return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', f"{group}/cgroup.procs", *command]


def _command(limits: SandboxLimits, info: int, filtering: int | None = None) -> list[str]:
    """Return the command that runs the launcher in the sandbox; root becomes unprivileged first."""
    bwrap = shutil.which("bwrap") or "bwrap"
    prefix = os.path.realpath(sys.base_prefix)
    python = f"{_PYTHON}/bin/python{sysconfig.get_python_version()}"
    is_root = os.getuid() == 0
    inner = [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--clearenv", "--hostname", "sandbox"),
        # Where an interpreter with a shared library would look for it is not in the sandbox.
        *("--setenv", "LD_LIBRARY_PATH", f"{_PYTHON}/lib"),
        *(() if is_root else ("--info-fd", str(info))),
        *(() if filtering is None else ("--seccomp", str(filtering))),
        *_libraries(["/usr/lib", "/usr/lib64"]),
        *("--ro-bind", _PYTHON if is_root else prefix, _PYTHON),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        # The first process is bubblewrap's own, which ends all others: nobody may write to it.
        *("--tmpfs", "/proc/1", "--remount-ro", "/proc/1"),
        *("--size", str(limits.folder_mib * _MIB), "--tmpfs", "/work", "--chdir", "/work"),
        *("--remount-ro", "/", "--", python, "-I", "-B", "-c", _LAUNCHER),
    ]
    if not is_root:
        return inner
    outer = [
        # Root without capabilities cannot kill nobody's processes, but with a namespace they end.
        *(bwrap, "--unshare-net", "--unshare-ipc", "--unshare-pid", "--die-with-parent"),
        *("--clearenv", "--info-fd", str(info)),
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
    """Return options that bind shared libraries, from /usr only these folders."""
    options = [
        part for path in folders if Path(path).is_dir() for part in ("--ro-bind", path, path)
    ]
    for path in (Path("/", name) for name in ("bin", "lib", "lib64")):
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir() and path.name != "bin":
            options += ["--ro-bind", str(path), str(path)]
    return options


def _read_call(line: str) -> CallResult:
    try:
        result = json.loads(line)
        return CallResult(result.get("value"), str(result.get("error", "")))
    except (ValueError, AttributeError, RecursionError):
        return CallResult(error="its result is not JSON")


def _why_cut_off(result: SandboxResult) -> str:
    if result.outcome == "timeout":
        return f"stopped after {result.seconds:.1f} s"
    if result.outcome == "killed":
        return f"ended by signal {-result.exit_code}"
    last = result.stderr.strip().splitlines()[-1:]
    return last[0][:200] if last else "ended before the call"


_REFUSED_TABLE = """
# The kernel's keyrings.
add_key 248 217, request_key 249 218, keyctl 250 219,
# Memory and messages of System V and POSIX, which no limit of a process counts.
shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, semget 64 190, semop 65 193,
semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187,
mq_open 240 180, mq_unlink 241 181, memfd_create 319 279, memfd_secret 447 447,
# Other processes.
ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
kcmp 312 272, pidfd_getfd 438 438,
# Large parts of the kernel that Python does not need.
io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427,
perf_event_open 298 241, bpf 321 280, userfaultfd 323 282, fanotify_init 300 262, vmsplice 278 75,
move_pages 279 239, migrate_pages 256 238, mbind 237 235, set_mempolicy 238 237,
lookup_dcookie 212 18, modify_ldt 154 -,
# Namespaces and file systems.
unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51,
open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432,
fspick 433 433, mount_setattr 442 442, name_to_handle_at 303 264, open_by_handle_at 304 265,
quotactl 179 60, quotactl_fd 443 443,
# The machine itself.
syslog 103 116, acct 163 89, swapon 167 224, swapoff 168 225, reboot 169 142, kexec_load 246 104,
kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
iopl 172 -, ioperm 173 -, sethostname 170 161, setdomainname 171 162, settimeofday 164 170,
clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, vhangup 153 58,
"""
"""Name, number on x86_64, and number on arm64 and riscv64; - if the call does not exist."""
REFUSED: dict[str, tuple[int | None, int | None]] = {
    name: (int(x86) if x86 != "-" else None, int(arm) if arm != "-" else None)
    for line in _REFUSED_TABLE.splitlines()
    if not line.startswith("#")
    for name, x86, arm in (entry.split() for entry in line.split(",") if entry.strip())
}
"""System calls refused for any arguments."""

ADDRESS_FAMILIES = (1, 2, 10)
"""Allowed sockets: AF_UNIX, AF_INET and AF_INET6. The network namespace is empty."""
_NAMESPACES = 0x7E020080
"""Flags of `clone` that create a namespace."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which inject terminal input."""
_JOIN_SESSION_KEYRING = 1

# Numbers of operations of the classic Berkeley packet filter.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the kernel's `seccomp_data`, whose arguments have 8 bytes each."""


class _Machine(NamedTuple):
    """A processor architecture: its kernel name, and its system call numbers."""

    architecture: int
    column: int
    clone: int
    socket: int
    socketpair: int
    ioctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, clone=56, socket=41, socketpair=53, ioctl=16),
    "aarch64": _Machine(0xC00000B7, 1, clone=220, socket=198, socketpair=199, ioctl=29),
    "riscv64": _Machine(0xC00000F3, 1, clone=220, socket=198, socketpair=199, ioctl=29),
}
_CLONE3 = 435
_X32 = 0x40000000
"""x86_64 numbers a second set of system calls from here, which no program needs."""


def filter_program(machine: str) -> bytes:
    """Return the filter for an architecture, for `bwrap --seccomp`; empty for unknown ones."""
    numbering = _MACHINES.get(machine)
    if numbering is None:
        return b""
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, numbering.architecture, then=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        program += [_step(_AT_LEAST, _X32, otherwise=1), _step(_RETURN, _KILL)]
    for numbers in REFUSED.values():
        if (number := numbers[numbering.column]) is not None:
            program += _if_called(number, [_fail(errno.EPERM)])
    # glibc makes threads with clone where the newer call, whose flags no filter sees, is unknown.
    program += _if_called(_CLONE3, [_fail(errno.ENOSYS)])
    flags = [_argument(0), _step(_ANY_BIT, _NAMESPACES, otherwise=1), _fail(errno.EPERM)]
    program += _if_called(numbering.clone, [*flags, _step(_RETURN, _ALLOW)])
    request = _argument(1)
    typing = [_step(_EQUAL, _TERMINAL_INPUT[0], then=1), _step(_EQUAL, _TERMINAL_INPUT[1], 0, 1)]
    program += _if_called(
        numbering.ioctl, [request, *typing, _fail(errno.EPERM), _step(_RETURN, _ALLOW)]
    )
    families = [
        step
        for family in ADDRESS_FAMILIES
        for step in (_step(_EQUAL, family, otherwise=1), _step(_RETURN, _ALLOW))
    ]
    for number in (numbering.socket, numbering.socketpair):
        program += _if_called(number, [_argument(0), *families, _fail(errno.EAFNOSUPPORT)])
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def join_new_keyring() -> bool:
    """Give the calling thread and its child processes an empty session keyring."""
    numbering = _MACHINES.get(platform.machine())
    if numbering is None:
        return False
    number = REFUSED["keyctl"][numbering.column]
    return int(ctypes.CDLL(None).syscall(number, _JOIN_SESSION_KEYRING, None)) > 0


def _step(operation: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode an instruction; `then` and `otherwise` are the steps skipped by a comparison."""
    return struct.pack("<HBBI", operation, then, otherwise, value)


def _if_called(number: int, steps: list[bytes]) -> list[bytes]:
    return [_step(_EQUAL, number, otherwise=len(steps)), *steps]


def _argument(index: int) -> bytes:
    """Load the lower half of an argument, a whole `int`."""
    return _step(_LOAD, _ARGUMENTS + 8 * index)


def _fail(code: int) -> bytes:
    return _step(_RETURN, _FAIL | code)
