"""Child processes: how they ended, and how they are stopped."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nip_astra.errors import WorkerProcessError
from nip_astra.utils.children import Child, check_alive


def started(code: str) -> Child:
    command = [sys.executable, "-c", f"{code}; print(flush=True); import time; time.sleep(60)"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert program.stdout is not None
    program.stdout.readline()
    program.stdout.close()
    return Child("a test's program", program.pid, program)


def test_a_program_is_asked_to_end() -> None:
    child = started("pass")
    assert (child.code, child.wait(0.01)) == (None, False)
    check_alive([child])
    assert child.stop(20)
    assert child.ending == "was killed by SIGTERM"
    with pytest.raises(WorkerProcessError, match=rf"{child.pid}.*SIGTERM"):
        check_alive([child])


def test_a_program_that_does_not_listen_is_killed() -> None:
    child = started("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    assert not child.stop(0.1)
    assert child.ending == "was killed by SIGKILL"
