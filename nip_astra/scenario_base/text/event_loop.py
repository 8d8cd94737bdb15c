"""The event loop in which a run speaks to its services."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class EventLoop:
    """One loop for a whole run, so that connections stay open between its stages."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, work: Coroutine[object, object, Result]) -> Result:
        """Wait for what a coroutine gives."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(work)

    def close(self) -> None:
        """End the loop; a later `run` begins a new one."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
