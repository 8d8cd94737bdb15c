"""Warnings of the library, for who uses the program."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from nip_astra.safe_text import safe_text

MOST_ALIKE = 3
"""Warnings of one kind that are shown; a run's log has all of them."""


@contextmanager
def showing_notes() -> Iterator[None]:
    """Write the library's warnings to standard error within the block."""
    logger, handler = logging.getLogger("nip_astra"), NoteHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class NoteHandler(logging.Handler):
    """Writes warnings to standard error, each once and above a progress bar.

    What the end of a run tells anyway, marked by `told_at_the_end`, is left to it. Where standard
    error is closed, nothing is written and the run goes on.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told: set[str] = set()
        self._alike: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        is_error = record.levelno > logging.WARNING
        if is_error or text in self._told or getattr(record, "told_at_the_end", False):
            return
        self._told.add(text)
        self._alike[record.msg] += 1
        if self._alike[record.msg] <= MOST_ALIKE:
            # A closed pipe is an OSError, a closed file a ValueError.
            with suppress(OSError, ValueError):
                _write(safe_text(f"warning: {text}\n"))


def _write(line: str) -> None:
    if sys.stderr is None:  # as Python sets it where the process began without one
        return
    if "tqdm" not in sys.modules:
        sys.stderr.write(line)
        return
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stderr):
        sys.stderr.write(line)
