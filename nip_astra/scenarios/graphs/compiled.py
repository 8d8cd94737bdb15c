"""C code, compiled for this machine on first use if there is a compiler; else torch computes.

Libraries are kept in the user's cache, named by source, compiler, processor and their own bytes.
They are executed, so nobody else may be able to replace them: if others can write to the cache or a
folder above it, each process compiles for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nip_astra.trust import read_variable

logger = logging.getLogger(__name__)

SWITCH = "NIP_ASTRA_NATIVE_CODE"
"""Environment variable; 0 turns native code off."""
CACHE = "XDG_CACHE_HOME"

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# The second is for some processors that are not x86.
_PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
_COMPILE_SECONDS = 120.0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


Argument = int | Tensor | Sequence[Tensor] | None


class NativeCode:
    """The functions of one C file.

    Each takes integers (`intptr_t`), pointers to numbers and arrays of such pointers, and returns
    0, or another number if memory is exhausted.
    """

    def __init__(self, source: Path) -> None:
        self.source = source

    def library(self) -> ctypes.CDLL | None:
        """Return the compiled file, or None; the log gives the reason once."""
        return None if is_switched_off() else _library(self.source).library

    def why_absent(self) -> str | None:
        """Return why there is no compiled file, or None."""
        return f"{SWITCH} is 0" if is_switched_off() else _library(self.source).reason

    def described(self) -> str:
        """Return the name of the source and the first digits of the compiled file's sha256."""
        return f"{self.source.name} {_library(self.source).digest[:12]}"

    def call(self, function: str, *arguments: Argument) -> None:
        """Call a function with integers, contiguous CPU tensors, and sequences of those.

        None is an absent tensor.
        """
        library = self.library()
        assert library is not None, "the caller checks library()"
        if getattr(library, function)(*map(_as_c, arguments)):
            raise MemoryError(f"{function} of {self.source.name}: not enough memory")


def _as_c(argument: Argument) -> Any:
    if isinstance(argument, int):
        return ctypes.c_ssize_t(argument)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return (ctypes.c_void_p * len(argument))(*(tensor.data_ptr() for tensor in argument))


@lru_cache
def is_switched_off() -> bool:
    """Return whether the environment turns native code off; read once in a process."""
    return read_variable(SWITCH) == "0"


class _LoadedLibrary(NamedTuple):
    """A library with the sha256 of its file, or the reason for its absence."""

    library: ctypes.CDLL | None = None
    digest: str = ""
    reason: str | None = None


@lru_cache
def _library(source: Path) -> _LoadedLibrary:
    started = time.perf_counter()
    try:
        with _folder() as folder:
            path, descriptor = _compile_once(source, folder)
            # Through the descriptor, because the file at the path may have been replaced. It stays
            # open: the loader would take a reused number for the earlier file.
            open_file = Path(f"/proc/self/fd/{descriptor}")
            library = ctypes.CDLL(str(open_file if open_file.exists() else path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = _reason(error)
        logger.info("%s is not compiled, torch is used: %s", source.name, reason)
        return _LoadedLibrary(reason=reason)
    seconds = time.perf_counter() - started
    logger.info("%s runs as compiled for this processor (%.1f s): %s", source.name, seconds, path)
    return _LoadedLibrary(library, _digest_in_name(path))


def _reason(error: Exception) -> str:
    """Return one line; if the compiler fails, the first line of its output."""
    output = (getattr(error, "stderr", None) or "").strip()
    return f"the compiler fails: {output.splitlines()[0]}" if output else str(error)


def _compile_once(source: Path, folder: Path) -> tuple[Path, int]:
    """Return the shared library of a source file, compiled if needed, and its file descriptor."""
    headers = sorted(source.parent.glob("*.h"))
    text = b"".join(path.read_bytes() for path in (source, *headers))
    compiler = _compiler()
    # A library is reused only with the compiler, flags and processor that it was made for.
    traits = "\n".join([*compiler, _run(*compiler, "--version"), *_FLAGS, _processor()])
    key = hashlib.sha256(text + traits.encode()).hexdigest()[:24]
    for path in folder.glob(f"{source.stem}-{key}-*.so"):
        if (descriptor := _open_verified(path)) is not None:
            return path, descriptor
        logger.warning("%s was changed, so it is compiled again", path)
        path.unlink()
    # Renamed at the end, because another process may compile the same file.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / "compiled.so"
        _compile(compiler, source, output)
        output.chmod(0o500)
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
        path = output.rename(folder / f"{source.stem}-{key}-{digest}.so")
    descriptor = _open_verified(path)
    if descriptor is None:
        raise OSError(f"{path} changed right after it was written")
    return path, descriptor


def _open_verified(path: Path) -> int | None:
    """Return the descriptor of a file that only this user can write, with its sha256 as name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    status = os.fstat(descriptor)
    is_file = stat.S_ISREG(status.st_mode)
    is_owner_only = status.st_uid == os.getuid() and not status.st_mode & _OTHERS_WRITE
    if is_file and is_owner_only:
        with open(descriptor, "rb", closefd=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest == _digest_in_name(path):
            return descriptor
    os.close(descriptor)
    return None


def _digest_in_name(path: Path) -> str:
    """Return the sha256 in a file's name."""
    return path.stem.rpartition("-")[2]


def _compiler() -> list[str]:
    """Return the command of a C compiler: `CC`, or a common one."""
    for command in (shlex.split(read_variable("CC") or ""), ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    raise FileNotFoundError("there is no C compiler (cc, gcc or clang)")


def _compile(compiler: Sequence[str], source: Path, to: Path) -> None:
    for attempt, processor in enumerate(_PROCESSORS):
        try:
            options = (*_FLAGS, *processor, str(source), "-o", str(to), "-lm")
            _run(*compiler, *options, scratch=to.parent)
        except subprocess.CalledProcessError:
            if attempt + 1 == len(_PROCESSORS):
                raise
        else:
            return


def _run(*command: str, scratch: Path | None = None) -> str:
    """Run a command and return its output; its temporary files go to `scratch`."""
    environment = None if scratch is None else os.environ | {"TMPDIR": str(scratch)}
    completed = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        # Messages may be in any encoding.
        errors="replace",
        check=True,
        timeout=_COMPILE_SECONDS,
    )
    return completed.stdout


def _processor() -> str:
    """Describe the processor, because machines of several kinds may share a home."""
    lines = [platform.machine(), platform.processor()]
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "\n".join(lines)
    keys = ("model name", "flags", "Features", "CPU part")
    lines += sorted({line for line in info.splitlines() if line.startswith(keys)})
    return "\n".join(lines)


@contextmanager
def _folder() -> Iterator[Path]:
    """Yield the cache, or a folder for this process if the cache cannot be trusted."""
    try:
        folder = _cache_folder()
    except (OSError, RuntimeError) as error:
        # RuntimeError: there is no home.
        logger.info("compiled code is not cached: %s", error)
        with tempfile.TemporaryDirectory() as scratch:
            yield _check_private(Path(scratch))
    else:
        yield folder


def _cache_folder() -> Path:
    base = read_variable(CACHE) or Path.home() / ".cache"
    folder = Path(base) / "nip_astra" / "native"
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        # One by one: `mkdir` ignores the mode for parents.
        missing.mkdir(mode=0o700, exist_ok=True)
    return _check_private(folder)


def _check_private(folder: Path) -> Path:
    """Resolve links in a folder; raise if somebody else can add or replace files in or above it."""
    if not hasattr(os, "getuid"):
        raise PermissionError(f"the owner of {folder} is unknown on this system")
    resolved = folder.resolve(strict=True)
    user = os.getuid()
    for path in (resolved, *resolved.parents):
        status = path.stat()
        is_open = bool(status.st_mode & _OTHERS_WRITE)
        owners = {user}
        if path != resolved:
            # In a sticky folder such as /tmp, only its owner can replace a file.
            is_open = is_open and not status.st_mode & stat.S_ISVTX
            owners = {user, 0}
        if is_open or status.st_uid not in owners:
            raise PermissionError(f"others may write to {path}")
    return resolved
