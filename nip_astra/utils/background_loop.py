"""An event loop in a background thread, for synchronous code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines in one event loop, so that connections stay open between calls.

    It starts on first use, also in a notebook, which runs another loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel pending coroutines and stop the loop; a later `run` starts another."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None or self._thread is None or self._process != os.getpid():
                return
            loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            # A forked process has none of its parent's threads.
            if self._loop is None or self._process != os.getpid():
                started: Future[asyncio.AbstractEventLoop] = Future()
                self._process, self._stop = os.getpid(), asyncio.Event()
                self._thread = threading.Thread(
                    target=asyncio.run, args=(self._serve(started),), name="event loop", daemon=True
                )
                self._thread.start()
                self._loop = started.result()
            return self._loop

    async def _serve(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()
