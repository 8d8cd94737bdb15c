"""C that is compiled for the machine at hand when it is first needed, where there is a compiler.

Nothing depends on it: whoever calls it has the same in torch, for machines without a compiler. What
was compiled is kept in the user's cache, by its text, the compiler and the processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

SWITCH = "NIP_ASTRA_NATIVE_CODE"
"""Environment variable; 0 leaves everything to torch."""
CACHE = "XDG_CACHE_HOME"

HEADERS = Path(__file__).parent
"""Where `native_numbers.h` lies, which a file may include."""

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# The second is how it is said for some processors that are not x86.
_PROCESSORS = (("-march=native",), ("-mcpu=native",), ())
_COMPILE_SECONDS = 120.0


Argument = int | Tensor | Sequence[Tensor] | None


class NativeCode:
    """The functions of one C file.

    Parameters
    ----------
    source : Path
        The file. Each of its functions takes integers (`intptr_t`), pointers to numbers, and
        arrays of such pointers, and gives 0, or another number where it ran out of memory.
    """

    def __init__(self, source: Path) -> None:
        self.source = source

    def library(self) -> ctypes.CDLL | None:
        """Give the compiled file, or None where it cannot be had; the log says why, once."""
        return None if _is_off() else _library(self.source)[0]

    def why_absent(self) -> str | None:
        """Say why the compiled file cannot be had, or None where it can."""
        return f"{SWITCH} is 0" if _is_off() else _library(self.source)[1]

    def call(self, function: str, *arguments: Argument) -> None:
        """Call a function with integers, contiguous tensors on the CPU, and sequences of those.

        None is a tensor that there is none of.

        Raises
        ------
        MemoryError
            Where there was not enough memory.
        """
        library = self.library()
        assert library is not None, "the caller asks whether it can be had"
        if getattr(library, function)(*map(_as_c, arguments)):
            raise MemoryError(f"{function} of {self.source.name} had not enough memory")


def _as_c(argument: Argument) -> Any:
    if isinstance(argument, int):
        return ctypes.c_ssize_t(argument)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(None)
    return (ctypes.c_void_p * len(argument))(*(tensor.data_ptr() for tensor in argument))


def can_read(*tensors: Tensor) -> bool:
    """Say whether native code finds the numbers of these tensors where they lie."""
    return all(x.device.type == "cpu" and x.layout == torch.strided for x in tensors)


def _is_off() -> bool:
    return os.environ.get(SWITCH) == "0"


@lru_cache
def _library(source: Path) -> tuple[ctypes.CDLL | None, str | None]:
    """Give the library, or why there is none."""
    started = time.perf_counter()
    try:
        path = _compiled(source)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        # RuntimeError: there is no home to keep anything in.
        reason = _reason(error)
        logger.info("%s is left to torch: %s", source.name, reason)
        return None, reason
    seconds = time.perf_counter() - started
    logger.info("%s runs as compiled for this processor (%.1f s): %s", source.name, seconds, path)
    return library, None


def _reason(error: Exception) -> str:
    """Give one line; of a compiler that fails, the first that it says."""
    said = (getattr(error, "stderr", None) or "").strip()
    return f"the compiler fails: {said.splitlines()[0]}" if said else str(error)


def _compiled(source: Path) -> Path:
    """Give the shared library of a source file, compiled now or before."""
    headers = sorted(path for folder in (HEADERS, source.parent) for path in folder.glob("*.h"))
    text = b"".join(path.read_bytes() for path in (source, *headers))
    compiler = _compiler()
    traits = "\n".join([*compiler, _run(*compiler, "--version"), *_FLAGS, _processor()])
    key = hashlib.sha256(text + traits.encode()).hexdigest()[:24]
    folder = _cache_folder()
    for path in folder.glob(f"{source.stem}-{key}-*.so"):
        # Its name has its size: one that was cut short, by a full disk say, may end the process.
        if path.stat().st_size == int(path.stem.rpartition("-")[2]):
            return path
        path.unlink()
    # Beside it and then renamed: another process may compile the same at the same time.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "made.so"
        _compile(compiler, source, made)
        return made.rename(folder / f"{source.stem}-{key}-{made.stat().st_size}.so")


def _compiler() -> list[str]:
    """Give the command of a C compiler: that of `CC`, or one of the usual."""
    candidates = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    found = (command for command in candidates if command and shutil.which(command[0]))
    compiler = next(found, None)
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc, gcc or clang)")
    return compiler


def _compile(compiler: Sequence[str], source: Path, to: Path) -> None:
    for attempt, processor in enumerate(_PROCESSORS):
        try:
            _run(*compiler, *_FLAGS, *processor, f"-I{HEADERS}", str(source), "-o", str(to), "-lm")
        except subprocess.CalledProcessError:
            if attempt + 1 == len(_PROCESSORS):
                raise
        else:
            return


def _run(*command: str) -> str:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        # Messages may be in any language's letters.
        errors="replace",
        check=True,
        timeout=_COMPILE_SECONDS,
    ).stdout


def _processor() -> str:
    """Tell processors apart: a home may be shared by machines of several kinds."""
    lines = [platform.machine(), platform.processor()]
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "\n".join(lines)
    told = ("model name", "flags", "Features", "CPU part")
    lines += sorted({line for line in info.splitlines() if line.startswith(told)})
    return "\n".join(lines)


def _cache_folder() -> Path:
    """Give a folder of this user alone, since what lies there is run."""
    base = os.environ.get(CACHE) or Path.home() / ".cache"
    folder = Path(base) / "nip_astra" / "native"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    about = folder.stat()
    if hasattr(os, "getuid") and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        raise PermissionError(f"others may write to {folder}")
    return folder
