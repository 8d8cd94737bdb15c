"""Whose code runs, and who gets one's keys, where parameters come from a stored run.

A run that was made on this machine by this user carries a signature: the HMAC of its parameter file
under a key that only this user can read. Such a run is the user's own, and what it names is loaded
as when it was started. Any other run is a document: it is read, and its code is not run, unless the
user says so.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from nip_astra.errors import UntrustedRunError

SIGNATURE = "signature"
"""Name of a run's signature in its `environment.json`."""
_KEY_BYTES = 32


@dataclass(frozen=True)
class StoredSource:
    """A stored run from which parameters come.

    Attributes
    ----------
    place : str
        What it is called in messages.
    is_trusted : bool
        Whether it is the user's own, or the user vouches for it.
    given : tuple[str, ...]
        Plug-ins that the user gave; one of the same file name stands in for the run's.
    """

    place: str
    is_trusted: bool
    given: tuple[str, ...] = ()

    def check(self, what: str, verb: str) -> None:
        """Refuse what a run of others asks for.

        Raises
        ------
        UntrustedRunError
            When the run is not trusted.
        """
        if not self.is_trusted:
            raise UntrustedRunError(
                f"{what} was to be {verb}, because {self.place} names it, but this run is not "
                "known to be yours: its parameters carry no signature of this user on this "
                "machine. Code of a run of others runs only when you say so. Read it, then give "
                "your copy with --plugin FILE (the file name must be the same), or vouch for all "
                "that the run names with --trust."
            )


_ACTIVE: ContextVar[StoredSource | None] = ContextVar("stored_source", default=None)


@contextmanager
def on_behalf_of(source: StoredSource | None) -> Iterator[None]:
    """Load what a stored run names within the block; None for what the user names."""
    token = _ACTIVE.set(source)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_source() -> StoredSource | None:
    """Return the stored run for which code is being loaded; None where the user asked for it."""
    return _ACTIVE.get()


def check_variable(name: str) -> None:
    """Refuse to read a variable of the environment for a run of others, which might send it away.

    Raises
    ------
    UntrustedRunError
        When the run that is being loaded is not trusted.
    """
    source = active_source()
    if source is not None:
        source.check(f"the environment variable {name!r}", "read")


def sign(content: bytes) -> str | None:
    """Return the signature of a parameter file; None where this user's key cannot be kept."""
    key = _read_key() or _make_key()
    return None if key is None else _hmac(key, content)


def is_own(parameter_file: Path) -> bool:
    """Say whether the run of a parameter file was made by this user on this machine.

    The file must be as the run wrote it, and beside the run's `environment.json`.
    """
    key = _read_key()
    try:
        environment = json.loads(parameter_file.with_name("environment.json").read_bytes())
        content = parameter_file.read_bytes()
    except (OSError, ValueError, RecursionError):
        return False
    found = environment.get(SIGNATURE) if isinstance(environment, dict) else None
    if key is None or not isinstance(found, str) or not found.isascii():
        return False
    return hmac.compare_digest(found, _hmac(key, content))


def _hmac(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _key_path() -> Path | None:
    try:
        base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return None  # nobody's home
    return base / "nip_astra" / "run_key" if base.is_absolute() else None


def _read_key() -> bytes | None:
    """Return the key, unless others could have written or read it."""
    path = _key_path()
    if path is None:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        key = file.read(_KEY_BYTES + 1)
    is_private = found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return key if is_private and len(key) == _KEY_BYTES else None


def _make_key() -> bytes | None:
    """Make the key where there is none; of two processes at once, both use the first one's."""
    path = _key_path()
    if path is None:
        return None
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError:
        return None
    return _read_key()
