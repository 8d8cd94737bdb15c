"""Permissions of stored runs and sweeps: running code, reading the environment, leaving their
folder.

A run or sweep that this user made on this machine is signed: the HMAC of its parameters under a key
that only this user can read. It is loaded without restrictions. Any other one is only read, and
whatever it names outside of its own folder needs the user's approval.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from nip_astra.errors import UntrustedRunError

SIGNATURE = "signature"
"""Key of a run's signature in its `environment.json`."""
SETTINGS_SIGNATURE = "settings_signature"
"""Key of the signature of a run's settings in its `environment.json`."""
_KEY_BYTES = 32
_OWN_VARIABLES = frozenset(
    {
        "CC",
        "GLOO_SOCKET_IFNAME",
        "HF_HUB_OFFLINE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NIP_ASTRA_NATIVE_CODE",
        "PYTHONPATH",
        "RANK",
        "RAY_ADDRESS",
        "TINKER_BASE_URL",
        "TOKENIZERS_PARALLELISM",
        "WANDB_CACHE_DIR",
        "WANDB_CONFIG_DIR",
        "WANDB_DATA_DIR",
        "WANDB_DIR",
        "WANDB_MODE",
        "WANDB_PROJECT",
        "WANDB_SILENT",
        "WORLD_SIZE",
        "XDG_CACHE_HOME",
        "XDG_STATE_HOME",
    }
)
"""Variables that the package itself reads; none holds a secret."""


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
        The user's plug-ins; one with the same file name replaces the run's.
    outside : Mapping[str, str]
        Its parameters and settings that reach outside of its folder: files, addresses, variables.
    """

    place: str
    is_trusted: bool
    given: tuple[str, ...] = ()

    outside: Mapping[str, str] = field(default_factory=dict)

    def check(self, what: str, verb: str) -> None:
        """Refuse something that an untrusted run names.

        Raises
        ------
        UntrustedRunError
            When the run is not trusted.
        """
        if not self.is_trusted:
            raise UntrustedRunError(
                f"{what} would be {verb} because {self.place} names it, but this run is not known "
                "to be yours. Read it; then give your copy of the code with --plugin FILE (same "
                "file name), or approve everything that the run names with --trust."
            )

    def check_outside(self, section: str = "") -> None:
        """Refuse parameters and settings of an untrusted run that reach outside its folder.

        Parameters
        ----------
        section : str
            Dotted path of the parameters that are about to be used; all by default.

        Raises
        ------
        UntrustedRunError
            When the run is not trusted; names each parameter and its value.
        """
        found = {
            path: value
            for path, value in self.outside.items()
            if not section or path == section or path.startswith(f"{section}.")
        }
        if found and not self.is_trusted:
            listed = ", ".join(f"{path}={value!r}" for path, value in found.items())
            raise UntrustedRunError(
                f"{self.place} is not known to be yours, and names {listed}. Approve single values "
                "by giving them yourself (--set PATH=VALUE, --settings NAME=VALUE), or everything "
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
    """Return the stored run for which code is being loaded; None if the user requested it."""
    return _ACTIVE.get()


def read_variable(name: str) -> str | None:
    """Read an environment variable; None if it is not set.

    The only access to the environment in this package. Another user's run, which might send the
    value away, can read only the variables that the package itself uses.

    Raises
    ------
    UntrustedRunError
        When the run that is being loaded is not trusted.
    """
    source = active_source()
    if source is not None and name not in _OWN_VARIABLES:
        source.check(f"the environment variable {name!r}", "read")
    return os.environ.get(name)


def sign(content: bytes) -> str | None:
    """Return the signature of a parameter file; None where this user's key cannot be kept."""
    key = _read_key() or _make_key()
    return None if key is None else _hmac(key, content)


def is_own(parameter_file: Path, signature: str = SIGNATURE) -> bool:
    """Return whether this user made the run of a parameter file on this machine.

    The file must be unchanged, and beside the run's `environment.json`.

    Parameters
    ----------
    signature : str
        Name of the file's signature in `environment.json`.
    """
    try:
        environment = json.loads(parameter_file.with_name("environment.json").read_bytes())
        content = parameter_file.read_bytes()
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(environment, dict) and is_signed(content, environment.get(signature))


def is_signed(content: bytes, signature: object) -> bool:
    """Return whether the content was signed with this user's key."""
    key = _read_key()
    if key is None or not isinstance(signature, str) or not signature.isascii():
        return False
    return hmac.compare_digest(signature, _hmac(key, content))


def refuse_links_outside(folder: Path) -> None:
    """Refuse an untrusted folder with a symbolic link that leads outside of it.

    Raises
    ------
    UntrustedRunError
        Naming the link; following it would read or overwrite a file elsewhere.
    """
    top = folder.resolve()
    for parent, folders, names in os.walk(top):
        for path in (Path(parent, name) for name in (*folders, *names)):
            if path.is_symlink() and not path.resolve().is_relative_to(top):
                raise UntrustedRunError(
                    f"{folder} is not known to be yours, and {path.relative_to(top)} in it is a "
                    f"link to {path.resolve()}. Remove the link, or put a copy in its place."
                )


def _hmac(key: bytes, content: bytes) -> str:
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _key_path() -> Path | None:
    try:
        base = Path(read_variable("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:
        return None  # no home folder
    return base / "nip_astra" / "run_key" if base.is_absolute() else None


def _read_key() -> bytes | None:
    """Return the key, unless other users could have written or read it."""
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
    """Create the key if there is none; of two concurrent processes, both use the first one's."""
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
