"""Sandboxed code reaches nothing, and its results are checked outside."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils import sandbox
from nip_astra.utils.sandbox import (
    REFUSED,
    CallResult,
    SandboxLimits,
    call_in_sandbox,
    join_new_keyring,
    run_beside_in_sandbox,
    run_in_sandbox,
)
from tests.utils.sandbox_attacks import ALONE, ATTACKS, FORGERIES

LIMITS = SandboxLimits(seconds=8, cpu_seconds=2, memory_mib=256, file_mib=1, folder_mib=4)
PROJECT = Path(__file__).resolve().parents[2]
CALLS = {
    name: numbers[platform.machine() != "x86_64"] or 0 for name, numbers in REFUSED.items()
} | {"clone": 56 if platform.machine() == "x86_64" else 220}

USERS = ("root", "ordinary user")

# Runs each program in a child, and writes its output and error.
BATCH = """
import io, json, os, shutil, sys, traceback
outputs = {}
for name, code in PROGRAMS.items():
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        sys.stdout, error = io.StringIO(), ""
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException as caught:
            error = traceback.format_exception_only(caught)[-1].strip()
        os.write(writing, json.dumps([sys.stdout.getvalue(), error]).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        data = answer.read()
    status = os.waitpid(child, 0)[1]
    outputs[name] = json.loads(data) if data else ["", f"ended by signal {status & 127}"]
    for left in os.listdir("."):
        os.remove(left)
print(json.dumps(outputs))
"""


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, object]]:
    """Targets of attacks on the host: open sockets, a home with a secret, a process."""
    abstract = f"nip-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as home,
        socket.socket() as listening,
        socket.socket(socket.AF_UNIX) as local,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("SECRET_KEY", "do-not-tell")
        Path(home).chmod(0o755)
        Path(home, "secret").write_text("do-not-tell", encoding="utf-8")
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        local.bind(f"\0{abstract}")
        local.listen()
        yield {
            "port": listening.getsockname()[1],
            "abstract": abstract,
            "project": PROJECT,
            "home": home,
            "terces": "llet-ton-od",
            # Not the number of a process in the sandbox, where numbers begin at 1.
            "pid": os.getpid(),
            "calls": CALLS,
        }


@pytest.fixture(scope="module", params=USERS)
def user(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts the sandbox as root, or as an ordinary user who sees the whole file system."""
    is_root = os.getuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("only root can start it as root")
    if request.param == "root" or not is_root:
        yield request.param
        return
    with tempfile.TemporaryDirectory() as seen, pytest.MonkeyPatch.context() as patch:
        # Root's own Python may be where other users cannot reach it.
        Path(seen).chmod(0o755)
        prefix, build = os.path.realpath(sys.base_prefix), sandbox._command
        become = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", prefix, seen, "--"]
        become += ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "--"]

        def command(limits: SandboxLimits, *descriptors: int) -> list[str]:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(os, "getuid", lambda: 1000)
                inner.setattr(sys, "base_prefix", seen)
                built = build(limits, *descriptors)
            assert "CAP_SETUID" not in built
            return [*become, *built]

        patch.setattr(sandbox, "_command", command)
        if run_in_sandbox("print(1)", limits=LIMITS).stdout != "1\n":
            pytest.skip("sandbox: an ordinary user of this machine cannot start one")
        yield request.param


@pytest.fixture(scope="module")
def outputs(user: str, host: dict[str, object]) -> dict[str, list[str]]:
    """Output and last line of the error of each attack that can share a sandbox with others."""
    programs = {name: attack.program(host) for name, attack in ATTACKS.items() if name not in ALONE}
    limits = SandboxLimits(seconds=60, cpu_seconds=20, memory_mib=256, file_mib=1, folder_mib=4)
    result = run_in_sandbox(f"PROGRAMS = {programs!r}\n{BATCH}", limits=limits)
    assert result.outcome == "finished", result.stderr
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.needs_sandbox
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_with_its_reason(
    name: str, host: dict[str, object], outputs: dict[str, list[str]]
) -> None:
    attack = ATTACKS[name]
    if name in ALONE:
        result = run_in_sandbox(attack.program(host), limits=LIMITS)
        assert result.outcome == "failed"
        output, error = result.stdout, result.stderr.strip().splitlines()[-1]
    else:
        output, error = outputs[name]
    assert "BREACH" not in output
    assert re.search(attack.why, error), output
    assert not (PROJECT / "x").exists()


def test_the_sandbox_starts_where_bubblewrap_does() -> None:
    """Otherwise all tests that need it would skip, and none would fail."""
    inner = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc"]
    command = ["bwrap", "--ro-bind", "/", "/", "--bind", "/proc", "/proc", *inner, "true"]
    if shutil.which("bwrap") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("sandbox: bubblewrap does not work here")
    assert sandbox.why_no_bubblewrap() == ""


@pytest.mark.needs_sandbox
def test_every_refused_system_call_is_refused(user: str) -> None:
    numbers = [number for name, number in CALLS.items() if number and name != "clone"]
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print([libc.syscall(n, 0, 0, 0, 0) == -1 and ctypes.get_errno() for n in {numbers}])"
    )
    result = run_in_sandbox(code, limits=LIMITS)
    assert json.loads(result.stdout) == [errno.EPERM] * len(numbers)


@pytest.mark.needs_sandbox
@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_fakes_the_check_does_not_know_what_is_expected(forgery: str, user: str) -> None:
    """It may patch all callers and write results itself; the right results are kept outside."""
    result = call_in_sandbox(FORGERIES[forgery], "f", [[2], [3]], LIMITS)
    assert len(result) == 2
    for item, right in zip(result, [4, 9], strict=True):
        assert item != CallResult(right)
        assert item.error or type(item.value) in (bool, int, str)


@pytest.mark.needs_sandbox
def test_code_runs_as_nobody_in_an_empty_folder(user: str) -> None:
    code = (
        "import glob, os\n"
        "print(os.getuid() != 0, os.listdir('.'), sorted(os.environ), os.getpid())\n"
        "print(sorted(fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')))\n"
        "print(os.listdir('/proc/1'), len(glob.glob('/proc/[0-9]*')))\nopen('x', 'w').write('x')"
    )
    for _ in range(2):
        lines = run_in_sandbox(code, limits=LIMITS).stdout.splitlines()
        names = ["LC_CTYPE", "LD_LIBRARY_PATH", "PWD"]
        assert lines == [f"True [] {names} 2", "[0, 1, 2]", "[] 2"]


CLINGING = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None)
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
    libc.prctl(1, 0)
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', MARK])
    time.sleep(60)
libc.prctl(1, 0)
time.sleep(0.2)
for pid in (1, os.getppid(), -1):
    try: os.kill(pid, signal.SIGSTOP if pid > 0 else signal.SIGCONT)
    except OSError: pass
"""
"""Ignores every signal, leaves its session, and does not want to end with its parent."""


@pytest.mark.needs_sandbox
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("pass", "finished"),
        ("time.sleep(60)", "timeout"),
        ("os._exit(3)", "failed"),
        ("os.abort()", "killed"),
    ],
)
def test_nothing_outlives_the_sandbox(end: str, outcome: str, user: str) -> None:
    mark = f"clinging-{os.getpid()}"
    is_late = "sleep" in end
    limits = SandboxLimits(seconds=1.5 if is_late else 20, cpu_seconds=1)
    result = run_in_sandbox(f"MARK = {mark!r}\n{CLINGING}\n{end}", limits=limits)
    assert result.outcome == outcome
    assert not is_late or result.seconds < 5
    assert not _is_running(mark)


@pytest.mark.needs_sandbox
def test_nothing_outlives_who_started_the_sandbox(tmp_path: Path) -> None:
    """Even if that process is killed, and so cannot end it."""
    mark = f"clinging-{os.getpid()}"
    code = f"MARK = {mark!r}\n{CLINGING}\nprint('up', flush=True)\ntime.sleep(60)"
    starter = f"from nip_astra.utils.sandbox import run_in_sandbox\nrun_in_sandbox({code!r})"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen([sys.executable, "-c", starter], env=environment) as process:
        assert _becomes(lambda: _is_running(mark), 20)
        process.kill()
    assert _becomes(lambda: not _is_running(mark), 5)
    # The control group left behind is removed by the next process that creates one.
    assert _becomes(lambda: not _groups_of(process.pid), 5)


def _groups_of(pid: int) -> list[Path]:
    sandbox.why_no_memory_group.cache_clear()
    sandbox.why_no_memory_group()
    parents = [parent for parent, *_ in sandbox._group_parents()]
    return [path for parent in parents for path in parent.glob(f"nip-astra-{pid}-*")]


def _becomes(is_so: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def _is_running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().endswith(f"{mark}\0".encode()):
                return True
        except OSError:
            continue
    return False


@pytest.fixture
def _no_filter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sandbox, "why_no_filter", lambda: "there is none")
    sandbox._filter.cache_clear()
    yield
    sandbox._filter.cache_clear()


@pytest.mark.needs_sandbox
@pytest.mark.usefixtures("_no_filter")
def test_without_a_filter_there_is_a_warning_and_still_no_keyring(
    caplog: pytest.LogCaptureFixture, user: str
) -> None:
    """The key is visible where the same keyring is searched outside."""
    search = "ctypes.CDLL(None, use_errno=True).syscall({}, 10, -3, b'user', b'canary', 0)"
    look = search.format(CALLS["keyctl"])

    def find() -> tuple[bool, list[str]]:
        if not join_new_keyring():
            pytest.skip("the kernel has no keyrings")
        add = ctypes.CDLL(None).syscall(CALLS["add_key"], b"user", b"canary", b"secret", 6, -3)
        assert eval(look, {"ctypes": ctypes}) == add
        code = (
            f"import ctypes\nprint({look}, ctypes.get_errno(), ctypes.CDLL(None).shmget(0, 9, 896))"
        )
        for _ in range(2):
            result = run_in_sandbox(code, limits=LIMITS).stdout.split()
        return add > 0, result

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        is_there, result = pool.submit(find).result()
    assert is_there
    assert result[:2] == ["-1", str(errno.ENOKEY)]
    # The warning is true: only the filter closes it.
    assert int(result[2]) >= 0
    (warning,) = [item.getMessage() for item in caplog.records if "filter" in item.getMessage()]
    assert "there is none" in warning
    assert "io_uring" in warning


@pytest.mark.needs_sandbox
def test_a_group_bounds_the_memory_of_all_processes_together() -> None:
    if why := sandbox.why_no_memory_group():
        pytest.skip(f"sandbox: {why}")
    code = (
        "import os, time\n"
        "for n in range(3):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(60 * 2**20); time.sleep(0.7); os._exit(0)\n"
        "print([os.wait()[1] for n in range(3)])"
    )
    limits = SandboxLimits(seconds=20, cpu_seconds=5, memory_mib=100, folder_mib=1)
    result = run_in_sandbox(code, limits=limits)
    assert 9 in json.loads(result.stdout or "[9]")
    with sandbox._memory_group(limits) as group:
        assert group is not None
        assert not list(group.parent.glob(f"nip-astra-{os.getpid()}-{int(group.name[-1]) - 1}"))
    assert not group.exists()


def test_a_group_is_made_beside_that_of_the_caller_in_cgroups_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "user" / "app"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory")
    (tmp_path / "groups").write_text("0::/user/app\n")
    monkeypatch.setattr(sandbox, "_GROUPS", str(tmp_path))
    monkeypatch.setattr(sandbox, "_OWN_GROUPS", tmp_path / "groups")
    with sandbox._memory_group(SandboxLimits(memory_mib=3, folder_mib=2)) as group:
        assert group is not None
        assert group.parent == own.parent
        limits = {file.name: file.read_text() for file in group.iterdir()}
        assert limits == {"memory.max": str(5 * 2**20), "memory.swap.max": "0"}
        assert f"{group}/cgroup.procs" in sandbox._enter(group, ["true"])
        for file in group.iterdir():
            file.unlink()
    assert not group.exists()
    (own.parent / "cgroup.subtree_control").write_text("cpu")
    with sandbox._memory_group(LIMITS) as group:
        assert group is None
    assert sandbox._enter(None, ["true"]) == ["true"]


@pytest.mark.needs_sandbox
def test_a_program_calls_code_in_another_sandbox_by_value() -> None:
    code = (
        "import sys\nprint('noise')\n"
        "def f(given):\n"
        "    if given == 'fail': raise KeyError(given)\n"
        "    names = 'check' in str(sys._getframe(1).f_globals)\n"
        "    return {'given': given, (1, 2): {3}, 'names': names}"
    )
    checker = (
        "given = [1.5, None, (True, 'ü'), frozenset('a'), {2: [float('inf')]}]\n"
        "check = f(given)\nprint(check == {'given': given, (1, 2): {3}, 'names': False})\n"
        "try: f('fail')\nexcept RuntimeError as error: print(error)"
    )
    result = run_beside_in_sandbox(code, "f", checker, LIMITS)
    assert result.stdout.splitlines() == ["True", "KeyError: 'fail'"], result.stderr


@pytest.mark.needs_sandbox
def test_a_program_reads_its_input_and_a_flood_of_output_is_cut_off() -> None:
    result = run_in_sandbox("print(sum(map(int, input().split())), 'ü')", "1 2 3\n", LIMITS)
    assert (result.outcome, result.exit_code, result.stdout) == ("finished", 0, "6 ü\n")
    result = run_in_sandbox("while True: print('x' * 1000)", limits=LIMITS)
    assert result.outcome != "finished"
    assert len(result.stdout) <= 2**20


@pytest.mark.needs_sandbox
def test_calls_give_values_or_errors_in_order() -> None:
    code = "def f(a, b):\n    print('noise')\n    return {'q': [a / b, None]}"
    result = call_in_sandbox(code, "f", [[1, 2], [1, 0], [3, 2]], LIMITS)
    assert [item.value for item in result] == [{"q": [0.5, None]}, None, {"q": [1.5, None]}]
    assert "ZeroDivisionError" in result[1].error


@pytest.mark.needs_sandbox
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(x): return object()", "TypeError"),
        ("def f(x):\n    print('\\n' + _MARK + '[' * 9999)\n    return 1", "JSON"),
        ("def f(x):\n    import os; os._exit(3)", "ended"),
        ("def f(x", "SyntaxError"),
        ("g = 1", "KeyError"),
        ("def f(x):\n    while True: pass", "signal"),
    ],
)
def test_what_calls_cannot_give_is_an_error(code: str, why: str) -> None:
    (result,) = call_in_sandbox(code, "f", [[1]], SandboxLimits(cpu_seconds=1))
    assert result.value is None
    assert why in result.error


@pytest.fixture
def _no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    sandbox.why_no_bubblewrap.cache_clear()
    yield
    sandbox.why_no_bubblewrap.cache_clear()


@pytest.mark.usefixtures("_no_bubblewrap")
def test_without_bubblewrap_no_program_is_run(tmp_path: Path) -> None:
    with pytest.raises(SandboxUnavailableError, match=r"no `bwrap`.*Install bubblewrap"):
        run_in_sandbox(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_bubblewrap")
def test_without_bubblewrap_an_interpreter_calls_functions_or_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"open({str(tmp_path / 'x')!r}, 'w')\ndef f(): pass"
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "why_no_interpreter", lambda: "the package p is not installed")
        with pytest.raises(SandboxUnavailableError, match=r"`bwrap`.*p is not .*\[sandbox"):
            call_in_sandbox(code, "f", [[]])
    assert not any(tmp_path.iterdir())
    pytest.importorskip("pydantic_monty")
    assert call_in_sandbox("def f(x): return x * 2", "f", [[2]]) == [CallResult(4)]
