"""Ask chat models from code that is not asynchronous."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from nip_astra.language_models.services.chat import ChatModel, ChatOutcome, ChatRequest
from nip_astra.language_models.services.patience import gather_all
from nip_astra.utils.background_loop import BackgroundLoop

T = TypeVar("T")
_LOOP = BackgroundLoop()


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
    """The result of a coroutine that asks services, in the one loop of this process."""
    return _LOOP.run(task)
