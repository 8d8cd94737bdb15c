"""Code in the sandbox reaches nothing, and what it gives back is checked outside."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


def _why_absent() -> str:
    try:
        check_sandbox()
    except SandboxUnavailableError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_why_absent()), reason=_why_absent() or "there is one")
LIMITS = SandboxLimits(seconds=8, cpu_seconds=2, memory_mib=256, file_mib=1, folder_mib=4)
PROJECT = Path(__file__).resolve().parents[2]

# Each prints BREACH where it succeeds, and ends by an exception that says why where it does not.
ATTACKS = {
    "internet": "import socket; socket.create_connection(('192.0.2.1', 80), 2); print('BREACH')",
    "names": "import socket; socket.getaddrinfo('example.org', 80); print('BREACH')",
    "loopback of the host": (
        "import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('BREACH')"
    ),
    "abstract socket of the host": (
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')\n"
        "print('BREACH')"
    ),
    "raw packets": (
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('BREACH')"
    ),
    "fork bomb": (
        "import os, time\n"
        "for n in range(200):\n"
        "    if os.fork() == 0: time.sleep(5); os._exit(0)\n"
        "print('BREACH')"
    ),
    "thread bomb": (
        "import threading, time\n"
        "for n in range(200): threading.Thread(target=time.sleep, args=(5,), daemon=True).start()\n"
        "print('BREACH')"
    ),
    "memory": "x = bytearray(2**30); print('BREACH')",
    "mapped memory": "import mmap; m = mmap.mmap(-1, 2**30); m[0] = 1; print('BREACH')",
    "large file": (
        "f = open('x', 'wb', 0)\nfor n in range(64): f.write(b'x' * 2**20)\nprint('BREACH')"
    ),
    "many files": (
        "for n in range(64): open(f'{{n}}', 'wb', 0).write(b'x' * 2**19)\nprint('BREACH')"
    ),
    "shared memory": "open('/dev/shm/x', 'w').write('x'); print('BREACH')",
    "writing to the root": "open('/x', 'w').write('x'); print('BREACH')",
    "writing to Python": "open('/python/bin/x', 'w').write('x'); print('BREACH')",
    "writing to libraries": "open('/usr/lib/x', 'w').write('x'); print('BREACH')",
    "writing to the project": "open('{project}/x', 'w').write('x'); print('BREACH')",
    "writing to the kernel": (
        "open('/proc/sys/kernel/core_pattern', 'w').write('x'); print('BREACH')"
    ),
    "home": "import os; print('BREACH', os.listdir('{home}'))",
    "passwords": "print('BREACH', open('/etc/passwd').read())",
    "a symlink": "import os; os.symlink('/etc/passwd', 'x'); print('BREACH', open('x').read())",
    "the first process' root": "import os; print('BREACH', os.listdir('/proc/1/root/home'))",
    "a device": "import os; print('BREACH', os.open('/dev/mem', os.O_RDONLY))",
    "a new device": "import os; os.mknod('x', 0o60600, os.makedev(8, 0)); print('BREACH')",
    "the project's modules": "import nip_astra; print('BREACH')",
    "becoming root": "import os; os.setuid(0); print('BREACH')",
    "raising limits": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40)); print('BREACH')"
    ),
    "a mount by ctypes": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.mount(b'none', b'/work', b'tmpfs', 0, None): raise OSError(ctypes.get_errno())\n"
        "print('BREACH')"
    ),
    "a user namespace by ctypes": (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.unshare(0x10000000): raise OSError(ctypes.get_errno())\n"
        "print('BREACH')"
    ),
    "tracing the first process": (
        "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.ptrace(16, os.getppid() or 1, 0, 0): raise OSError(ctypes.get_errno())\n"
        "print('BREACH')"
    ),
    "a terminal": "open('/dev/tty', 'w').write('x'); print('BREACH')",
    "another program": "import subprocess; print('BREACH', subprocess.run(['sh', '-c', 'id']))",
}


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, sandbox.SandboxResult]]:
    """What became of each attack; two at a time, against sockets that listen on the host."""
    abstract = f"nip-{os.getpid()}"
    with socket.socket() as listening, socket.socket(socket.AF_UNIX) as local:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        local.bind(f"\0{abstract}")
        local.listen()
        words = {
            "port": listening.getsockname()[1],
            "abstract": abstract,
            "project": PROJECT,
            "home": Path.home(),
        }
        with ThreadPoolExecutor(2) as pool:
            codes = [code.format(**words) for code in ATTACKS.values()]
            found = pool.map(lambda code: run_in_sandbox(code, limits=LIMITS), codes)
            yield dict(zip(ATTACKS, found, strict=True))


@needs_sandbox
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_fails_and_says_why(
    attack: str, results: dict[str, sandbox.SandboxResult]
) -> None:
    result = results[attack]
    assert "BREACH" not in result.stdout
    assert result.outcome in ("failed", "killed")
    assert result.stderr.strip() or result.exit_code < 0
    assert not (PROJECT / "x").exists()


@needs_sandbox
def test_code_sees_no_environment_no_other_process_and_no_open_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_KEY", "do-not-tell")
    result = run_in_sandbox(
        "import glob, os\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass\n"
        "print(dict(os.environ))\n"
        "print('FDS', sorted(fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')))\n"
        "print('PIDS', len(glob.glob('/proc/[0-9]*')))",
        limits=LIMITS,
    )
    assert "do-not-tell" not in result.stdout
    assert "pytest" not in result.stdout
    assert "FDS [0, 1, 2]" in result.stdout
    assert int(result.stdout.rsplit("PIDS ", 1)[1]) <= 2


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


@needs_sandbox
def test_code_that_fakes_the_check_does_not_know_what_is_expected() -> None:
    """It may patch all that checks it and write results itself; the right ones stand outside."""
    code = (
        "import gc, json, sys, unittest\n"
        "unittest.TestCase.assertEqual = lambda *args: None\n"
        "json.dumps = lambda value: '{\"value\": true}'\n"
        "class Equal:\n    def __eq__(self, other): return True\n"
        "def f(x):\n"
        "    sys.__stdout__.write('\\n' + _MARK + '{\"value\": true}\\n')\n"
        "    return Equal()\n"
    )
    found = call_in_sandbox(code, "f", [[2], [3]], LIMITS)
    assert len(found) == 2
    assert all(one != CallResult(value) for one, value in zip(found, [4, 9], strict=True))


def test_without_bubblewrap_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    check_sandbox.cache_clear()
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        run_in_sandbox(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not any(tmp_path.iterdir())
    check_sandbox.cache_clear()
