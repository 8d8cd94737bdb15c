"""Run asynchronous requests from synchronous code."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from nip_astra.language_models.services.chat import ChatModel, ChatOutcome, ChatRequest

T = TypeVar("T")


class _ServiceLoop:
    """An event loop in its own thread, so that connections outlive a call."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="services", daemon=True)
        thread.start()


_lock = threading.Lock()
_running: list[_ServiceLoop] = []


def complete_all(model: ChatModel, requests: Sequence[ChatRequest]) -> list[ChatOutcome]:
    """Send all requests at once, and wait for all answers.

    Raises
    ------
    ConfigurationError, BudgetExhaustedError
        As `ChatModel.answer`, after the open requests have ended.
    """
    return run_sync(gather_all([model.answer(request) for request in requests]))


def close_all(models: Iterable[ChatModel]) -> None:
    """Close the connections of models, and stop the services that they started."""
    endings = [model.close() for model in models]
    if endings:
        run_sync(gather_all(endings))


def run_sync(task: Coroutine[Any, Any, T]) -> T:
    """The result of an asynchronous task; a signal that ends the wait cancels the task."""
    with _lock:
        if not _running or _running[0].process != os.getpid():
            # A forked process has no thread of its parent.
            _running[:] = [_ServiceLoop()]
        loop = _running[0].loop
    future = asyncio.run_coroutine_threadsafe(task, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def gather_all(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all tasks; the error of a failed one is raised after the others end."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)
