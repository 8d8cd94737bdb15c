"""One process at a time writes to a run directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nip_astra.errors import RunDirectoryError

try:
    import fcntl
except ImportError:  # no POSIX system
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
"""File that the process at work on a run has locked, and in which it says who it is."""

_HELD_BY_ANOTHER = (errno.EAGAIN, errno.EACCES)

logger = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Have the run to oneself within the block.

    The lock is advisory and the system's own, so it ends with the process that holds it, however
    that ends. Where the file system has no locks, a warning says so and the block is entered.

    Raises
    ------
    RunDirectoryError
        When another process is at work on the run.
    """
    try:
        # Without a buffer, so that a full disk is met here and not when the file is closed.
        file = (directory / LOCK).open("ab+", buffering=0)
    except OSError as error:
        raise RunDirectoryError(
            f"the run {directory} was to be worked on, but {directory / LOCK} cannot be written: "
            f"{error.strerror or error}. Change the permissions of that folder."
        ) from error
    with file:
        if not _is_locked(file, directory):
            yield
            return
        _write_owner(file)
        try:
            yield
        finally:
            file.truncate(0)


def is_abandoned(directory: Path) -> bool:
    """Say whether no process is at work in a directory; False where that cannot be told."""
    try:
        with (directory / LOCK).open("rb") as file:
            if fcntl is None:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _is_locked(file: IO[bytes], directory: Path) -> bool:
    """Lock the file, and say whether that was possible at all."""
    if fcntl is None:
        _warn(directory, "this system has no locks of files")
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            raise RunDirectoryError(_refusal(file, directory)) from error
        _warn(directory, f"its file system gives no lock ({error.strerror or error})")
        return False
    return True


def _warn(directory: Path, reason: str) -> None:
    logger.warning(
        "the run %s is not protected from a second process: %s. Take care yourself that it is "
        "resumed once at a time",
        directory,
        reason,
    )


def _refusal(file: IO[bytes], directory: Path) -> str:
    asked = f"the run {directory.resolve().name!r} was to be worked on, but"
    owner = _owner_in(file)
    if owner is None:
        return f"{asked} another process is at work on it. Wait until it ends, or stop it."
    pid, host = owner
    if host == socket.gethostname():
        stop = f"stop it by `kill {pid}`, which saves its work first"
        return f"{asked} process {pid} is at work on it. Wait until it ends, or {stop}."
    return (
        f"{asked} process {pid} on {host} is at work on it. Wait until it ends, or stop it there."
    )


def _owner_in(file: IO[bytes]) -> tuple[int, str] | None:
    """Process id and host; None where the owner has not written them yet."""
    file.seek(0)
    try:
        said = json.loads(file.read())
        return int(said["pid"]), str(said["host"])
    except (ValueError, KeyError, TypeError):
        return None


def _write_owner(file: IO[bytes]) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    file.truncate(0)
    with suppress(OSError):  # a full disk: the lock holds all the same
        file.write(json.dumps(owner).encode())
