"""Print to a terminal, or to what takes its place."""

from __future__ import annotations

import sys

from rich.console import Console

from nip_astra.safe_console import SafeConsole
from nip_astra.safe_text import safe_text

PIPE_WIDTH = 160
"""Columns of a table that goes to a file or pipe, which has no width of its own."""


def open_console() -> Console:
    """The console of standard output as it is now."""
    return SafeConsole() if sys.stdout.isatty() else SafeConsole(width=PIPE_WIDTH)


def say(text: str) -> None:
    """Write a line to standard output."""
    sys.stdout.write(f"{safe_text(text)}\n")


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{safe_text(text)}\n")


def quieten_libraries() -> None:
    """Keep progress bars and advice of transformers off the screen."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
