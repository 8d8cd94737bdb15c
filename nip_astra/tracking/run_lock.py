"""A lock that lets one process at a time write to a run directory."""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from nip_astra.errors import RunDirectoryError

LOCK = ".lock"
"""Lock file of the running process, with its id and host."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without locks."""

logger = logging.getLogger(__name__)


@contextmanager
def run_lock(directory: Path, *, waits: bool = False) -> Iterator[None]:
    """Hold the run's lock within the block; wait for another holder, or raise.

    The lock is advisory and released by the system when its process ends, also by a kill. On a file
    system without locks the block is entered with a warning.
    """
    lock = _lock_of(directory)
    try:
        (directory / LOCK).touch()  # locking would create the folder
        lock.acquire(timeout=-1 if waits else 0)
    except Timeout:
        raise RunDirectoryError(_refusal(directory)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise RunDirectoryError(
                f"{directory / LOCK} cannot be written: {error.strerror or error}. Change the "
                "permissions of that folder."
            ) from error
        logger.warning(
            "the run %s is not protected from a second process: its file system gives no lock "
            "(%s). Resume it once at a time",
            directory,
            error.strerror or error,
        )
        yield
        return
    try:
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        with suppress(OSError):  # a full disk: the lock is valid nevertheless
            (directory / LOCK).write_text(json.dumps(owner), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):
            os.truncate(directory / LOCK, 0)
        lock.release()


def is_abandoned(directory: Path) -> bool:
    """Return whether no process is using a directory; False if unknown."""
    if not (directory / LOCK).exists():
        return True
    try:
        with _lock_of(directory):
            return True
    except OSError:  # held by another process, or locks are unavailable
        return False


def _lock_of(directory: Path) -> FileLock:
    return FileLock(directory / LOCK, timeout=0, fallback_to_soft=False)


def _refusal(directory: Path) -> str:
    name = str(directory)
    owner = _owner_of(directory)
    if owner is None:
        return f"{name} is in use by another process. Wait until it ends, or stop it."
    pid, host = owner
    if host == socket.gethostname():
        stop = f"stop it by `kill {pid}`, which saves its work first"
        return f"{name} is in use by process {pid}. Wait until it ends, or {stop}."
    return f"{name} is in use by process {pid} on {host}. Wait until it ends, or stop it there."


def _owner_of(directory: Path) -> tuple[int, str] | None:
    """Return process id and host; None if the owner has not written them yet."""
    try:
        owner = json.loads((directory / LOCK).read_text(encoding="utf-8"))
        return int(owner["pid"]), str(owner["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
