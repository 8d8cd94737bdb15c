"""Notes of the library, for who uses the program."""

from __future__ import annotations

import logging
import sys

from nip_astra.safe_text import safe_text


class NoteHandler(logging.Handler):
    """Writes what the library has to say about the user's files to standard error, once each."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._told:
            self._told.add(text)
            sys.stderr.write(safe_text(f"note: {text}\n"))
