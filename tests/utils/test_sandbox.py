"""Code in the sandbox reaches nothing, and what it gives back is checked outside."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nip_astra.errors import SandboxUnavailableError
from nip_astra.utils import sandbox
from nip_astra.utils.sandbox import (
    CallResult,
    SandboxLimits,
    call_in_sandbox,
    check_sandbox,
    run_in_sandbox,
)
from tests.utils.sandbox_attacks import ATTACKS, FORGERIES


def _why_absent() -> str:
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_why_absent()), reason=_why_absent() or "there is one")
LIMITS = SandboxLimits(seconds=8, cpu_seconds=2, memory_mib=256, file_mib=1, folder_mib=4)
PROJECT = Path(__file__).resolve().parents[2]

USERS = ("root", "ordinary user")


@pytest.fixture(scope="module")
def host() -> Iterator[dict[str, object]]:
    """Things of the host that attacks are after: open sockets, a home with a secret, a process."""
    abstract = f"nip-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as home,
        socket.socket() as listening,
        socket.socket(socket.AF_UNIX) as local,
    ):
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
            # Not the number of a process in the sandbox, which begin at 1.
            "pid": os.getpid(),
        }


@pytest.fixture
def as_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Starts the sandbox as root, or as an ordinary user who sees the whole file system."""
    is_root = os.getuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("only root can start it as root")
    if request.param == "root" or not is_root:
        yield
        return
    with tempfile.TemporaryDirectory() as seen:
        # Root's own Python may stand where others do not reach it.
        Path(seen).chmod(0o755)
        prefix, build = os.path.realpath(sys.base_prefix), sandbox._command
        become = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", prefix, seen, "--"]
        become += ["setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups", "--"]

        def command(limits: SandboxLimits) -> list[str]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "getuid", lambda: 1000)
                patch.setattr(sys, "base_prefix", seen)
                inner = build(limits)
            assert "CAP_SETUID" not in inner
            return [*become, *inner]

        monkeypatch.setattr(sandbox, "_command", command)
        if run_in_sandbox("print(1)", limits=LIMITS).stdout != "1\n":
            pytest.skip("an ordinary user of this machine cannot start a sandbox")
        yield


@needs_sandbox
@pytest.mark.parametrize("as_user", USERS, indirect=True)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.usefixtures("as_user")
def test_an_attack_fails_and_says_why(
    attack: str, host: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "do-not-tell")
    code = ATTACKS[attack].code.format(**host)
    result = run_in_sandbox(code, limits=LIMITS)
    assert "BREACH" not in result.stdout
    assert result.outcome == "failed"
    assert re.search(ATTACKS[attack].why, result.stderr.strip().splitlines()[-1]), result.stderr
    assert not (PROJECT / "x").exists()


@needs_sandbox
@pytest.mark.parametrize("as_user", USERS, indirect=True)
@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.usefixtures("as_user")
def test_what_fakes_the_check_does_not_know_what_is_expected(forgery: str) -> None:
    """It may patch all that calls it and write results itself; the right ones stand outside."""
    found = call_in_sandbox(FORGERIES[forgery], "f", [[2], [3]], LIMITS)
    assert len(found) == 2
    for one, right in zip(found, [4, 9], strict=True):
        assert one != CallResult(right)
        assert one.error or type(one.value) in (bool, int, str)


@needs_sandbox
@pytest.mark.parametrize("as_user", USERS, indirect=True)
@pytest.mark.usefixtures("as_user")
def test_code_runs_as_nobody_in_an_empty_folder() -> None:
    code = (
        "import glob, os\n"
        "print(os.getuid() != 0, os.listdir('.'), sorted(os.environ), os.getpid())\n"
        "print(sorted(fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')))\n"
        "print(len(glob.glob('/proc/[0-9]*')))\nopen('x', 'w').write('x')"
    )
    for _ in range(2):
        told = run_in_sandbox(code, limits=LIMITS).stdout.splitlines()
        assert told == ["True [] ['LC_CTYPE', 'PWD'] 1", "[0, 1, 2]", "1"]


@needs_sandbox
def test_signals_and_orphans_end_with_the_sandbox() -> None:
    mark = f"orphan-{os.getpid()}"
    result = run_in_sandbox(
        "import os, sys, time\n"
        "sleep = 'import time; time.sleep(60)'\n"
        f"if os.fork() == 0: os.execv(sys.executable, ['{mark}', '-c', sleep])\n"
        "time.sleep(0.3)\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)",
        limits=LIMITS,
    )
    assert result.seconds < LIMITS.seconds
    deadline = time.monotonic() + 5
    while _is_running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(mark)


def _is_running(mark: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(mark.encode()):
                return True
        except OSError:
            continue
    return False


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "outcome"),
    [("import time; time.sleep(60)", "timeout"), ("while True: pass", "killed")],
)
def test_code_that_does_not_end_is_ended(code: str, outcome: str) -> None:
    limits = SandboxLimits(seconds=2 if outcome == "timeout" else 20, cpu_seconds=1)
    result = run_in_sandbox(code, limits=limits)
    assert result.outcome == outcome
    assert result.seconds < 15


@needs_sandbox
def test_a_flood_of_output_is_cut_off() -> None:
    result = run_in_sandbox("while True: print('x' * 1000)", limits=LIMITS)
    assert result.outcome != "finished"
    assert len(result.stdout) <= 2**20


@needs_sandbox
def test_a_program_reads_its_input_and_writes_its_output() -> None:
    result = run_in_sandbox("print(sum(map(int, input().split())), 'ü')", "1 2 3\n", LIMITS)
    assert (result.outcome, result.exit_code, result.stdout) == ("finished", 0, "6 ü\n")


@needs_sandbox
def test_calls_give_values_or_errors_in_order() -> None:
    code = "def f(a, b):\n    print('noise')\n    return {'q': [a / b, None]}"
    found = call_in_sandbox(code, "f", [[1, 2], [1, 0], [3, 2]], LIMITS)
    assert [one.value for one in found] == [{"q": [0.5, None]}, None, {"q": [1.5, None]}]
    assert "ZeroDivisionError" in found[1].error


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def f(x): return object()", "TypeError"),
        ("def f(x):\n    import os; os._exit(3)", "ended"),
        ("def f(x", "SyntaxError"),
        ("g = 1", "KeyError"),
        ("def f(x):\n    while True: pass", "signal"),
    ],
)
def test_what_calls_cannot_give_is_an_error(code: str, why: str) -> None:
    (found,) = call_in_sandbox(code, "f", [[1]], SandboxLimits(cpu_seconds=1))
    assert found.value is None
    assert why in found.error


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
def test_without_an_interpreter_either_no_function_is_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sandbox, "why_no_interpreter", lambda: "the package p is not installed")
    code = f"open({str(tmp_path / 'x')!r}, 'w')\ndef f(): pass"
    with pytest.raises(SandboxUnavailableError, match=r"no `bwrap`.*p is not installed.*\[sandbox"):
        call_in_sandbox(code, "f", [[]])
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("_no_bubblewrap")
def test_without_bubblewrap_an_interpreter_calls_functions() -> None:
    pytest.importorskip("pydantic_monty")
    assert call_in_sandbox("def f(x): return x * 2", "f", [[2]]) == [CallResult(4)]
