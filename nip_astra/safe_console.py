"""Print with Rich what others wrote: no markup in it, and no character that a terminal obeys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from nip_astra.safe_text import has_unsafe, safe_text


class SafeConsole(Console):
    """A console that shows every text as it is; colours and lines of its own stay.

    Square brackets are no markup and `:smile:` is no picture, wherever a text stands: in a title,
    a heading, a cell or a line.
    """

    def __init__(self, *, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, markup=False, emoji=False)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render what Rich asks for, down to single cells; each text is made safe first."""
        if isinstance(renderable, str):
            renderable = safe_text(renderable)
        elif isinstance(renderable, Text) and has_unsafe(renderable.plain):
            renderable = renderable.copy()
            renderable.plain = safe_text(renderable.plain)
        return super().render(renderable, options)
