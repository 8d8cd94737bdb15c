"""Ask chat models from code that is not asynchronous."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from nip_astra.language_models.services.chat import ChatModel, ChatOutcome, ChatRequest
from nip_astra.language_models.services.patience import gather_all

T = TypeVar("T")


class _ServiceLoop:
    """An event loop in a thread of its own, so that connections outlive a call."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="services", daemon=True)
        thread.start()


_lock = threading.Lock()
_running: list[_ServiceLoop] = []


def ask_all(model: ChatModel, requests: Sequence[ChatRequest]) -> list[ChatOutcome]:
    """Ask all at once, and wait for every answer.

    Raises
    ------
    ConfigurationError, BudgetExhaustedError
        As `ChatModel.answer`, after those under way have ended.
    """
    return wait_for(gather_all([model.answer(request) for request in requests]))


def close_all(models: Iterable[ChatModel]) -> None:
    """End the connections of models, and the services that they have started."""
    endings = [model.close() for model in models]
    if endings:
        wait_for(gather_all(endings))


def wait_for(task: Coroutine[Any, Any, T]) -> T:
    """The result of an asynchronous task; a signal that ends the waiting ends the task."""
    with _lock:
        if not _running or _running[0].process != os.getpid():
            # A forked process has none of its parent's threads.
            _running[:] = [_ServiceLoop()]
        loop = _running[0].loop
    future = asyncio.run_coroutine_threadsafe(task, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
