"""The log of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from nip_astra.safe_text import SafeFormatter
from nip_astra.tracking.run_directory import LOG, RunDirectory


@contextmanager
def log_file(directory: RunDirectory) -> Iterator[None]:
    """Write the package's log to log.txt within the block."""
    handler = logging.FileHandler(directory.path / LOG, encoding="utf-8")
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger("nip_astra")
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()
