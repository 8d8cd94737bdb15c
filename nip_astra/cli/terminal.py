"""Print to a terminal, or to what takes its place."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

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


def plain_table(title: str | None, *columns: str) -> Table:
    """A table without lines, whose cells wrap."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
