"""Run asynchronous requests from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from nip_astra.language_models.services.chat import ChatModel, ChatOutcome, ChatRequest
from nip_astra.utils.background_loop import BackgroundLoop

T = TypeVar("T")


_LOOP = BackgroundLoop()


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
    return _LOOP.run(task)


async def gather_all(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all tasks; the error of a failed one is raised after the others end."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return cast("list[T]", results)
