"""Which code computes: what was computed by other code is not taken from a cache."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_SUFFIXES = {".py", ".c", ".h"}


def digest_of_code(names: Iterable[str]) -> str:
    """The sha256 of the source of modules, of packages with all that is in them."""
    # Without the names of files: a plug-in's differs with its folder.
    digests = sorted({_digest_of(name) for name in names})
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


@lru_cache
def _digest_of(name: str) -> str:
    file = _file_of(name)
    if file is None:
        return name
    is_package = file.name == "__init__.py"
    files = sorted(file.parent.rglob("*")) if is_package else [file]
    digest = hashlib.sha256()
    for path in files:
        if path.suffix in _SUFFIXES:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _file_of(name: str) -> Path | None:
    module = sys.modules.get(name)
    if module is None:
        spec = find_spec(name)
        found = None if spec is None else spec.origin
    else:
        found = getattr(module, "__file__", None)
    return Path(found) if found and Path(found).is_file() else None
