"""Only one process at a time works on a run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nip_astra.errors import RunDirectoryError
from nip_astra.tracking import run_lock as module
from nip_astra.tracking.run_lock import LOCK, run_lock
from tests.kit.messages import says

HOLDER = """
import sys
from pathlib import Path
from nip_astra.tracking.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def refusal(directory: Path) -> str:
    with pytest.raises(RunDirectoryError) as caught, run_lock(directory):
        pass
    return str(caught.value)


def test_a_second_process_gets_the_owner_and_the_remedy(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert says(refusal(tmp_path), str(tmp_path), os.getpid(), f"`kill {os.getpid()}`")
    with run_lock(tmp_path):
        pass


def test_the_lock_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert f"process {holder.pid}" in refusal(tmp_path)
        holder.kill()
        holder.wait()
        with run_lock(tmp_path):
            assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_other_owners_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert says(refusal(tmp_path / "none"), ".lock", "No such file or directory")
    with run_lock(tmp_path):
        monkeypatch.setattr(module.socket, "gethostname", lambda: "elsewhere")
        message = refusal(tmp_path)
        assert ("kill" in message, str(os.getpid()) in message) == (False, True)
        # It has not written its identity yet.
        (tmp_path / LOCK).write_text("")
        assert "another process" in refusal(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_worked_on_with_a_warning(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    no_lock = OSError(number, os.strerror(number))
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=no_lock))
    with run_lock(tmp_path), run_lock(tmp_path):
        pass
    assert says(caplog.text, "lock", os.strerror(number))
