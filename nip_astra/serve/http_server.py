"""uvicorn, ending by a signal as a program that has done its work."""

from __future__ import annotations

import signal
from types import FrameType

import uvicorn


class HttpServer(uvicorn.Server):
    """Ends by SIGINT or SIGTERM; the signal is not raised again afterwards, as uvicorn's would."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after the open requests, or at once where Ctrl-C comes a second time."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
