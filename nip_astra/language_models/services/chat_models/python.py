"""A user's function as a chat model."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from nip_astra.errors import ConfigurationError, NipAstraError
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    CPU,
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
    FailureReason,
    estimate_usage,
    register_chat_model,
)
from nip_astra.language_models.services.chat_models.openai import read_choice
from nip_astra.parameters.parameters_base import CheckedName
from nip_astra.parameters.types import ChatModelType
from nip_astra.scorers.python import UserFunction

ARGUMENTS = ("messages", "max_tokens", "temperature", "top_p", "stop", "seed")
"""Arguments that a function may declare."""


@register_chat_model(ChatModelType.PYTHON)
class PythonChatModel(ChatModel):
    """Answers from a function `f(messages, **options) -> str | dict | ChatAnswer`.

    `messages` are those of the conversation, as `{"role", "content"}`. The function receives the
    arguments that it declares, or all with `**options`: `max_tokens`, `temperature`, `top_p`,
    `stop` and `seed`, each None where the service's default is requested. A dict is a message in
    OpenAI's form, for instance with `tool_calls`, and may have a `finish_reason`. An `async`
    function runs in the event loop, another one in a thread of its own, so that several requests
    are answered at once (`limits.concurrency`). An exception is a failed attempt, which is retried.
    """

    class Parameters(ChatModel.Parameters):
        """The function."""

        function: CheckedName = Field(pattern=r"^.+:[^:/]+$")
        """`package.module:function`, `path/to/file.py:function` or
        `scenario://file.py:function`. The module is imported, which executes it."""

    samples_at_once = 1

    def __init__(
        self,
        reference: str,
        scenario_dir: Path | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.name = reference
        self._function = UserFunction(reference, scenario_dir, function)
        unknown = [name for name in self._function.required if name not in ARGUMENTS]
        if unknown or not self._function.takes("messages"):
            fault = f"unknown: {', '.join(unknown)}" if unknown else "missing: messages"
            raise ConfigurationError(
                f"arguments of the chat function {reference!r}: {fault}. It must take messages and "
                f"may take {', '.join(ARGUMENTS[1:])}; other arguments need defaults."
            )
        digest = _source_digest(self._function.function)
        # Answers of other code are not those of this function.
        self.place = f"code {digest}"
        self.can_be_remembered = digest is not None

    @classmethod
    def load(
        cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
    ) -> PythonChatModel:
        return cls(parameters.function, scenario_dir)

    async def answer(self, request: ChatRequest) -> ChatOutcome:
        (number,) = request.sample_numbers
        options = {
            "messages": [dict(message) for message in request.messages],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": list(request.stop),
            "seed": request.seed_from(number),
        }
        try:
            sample = _read_answer(await self._call(options))
        except NipAstraError:
            raise
        except Exception as error:
            # The user's code may raise anything.
            message = f"{self.name} raised {type(error).__name__}: {_read_message(error)}"
            sample = ChatFailure(FailureReason.UNAVAILABLE, message)
        answers = [sample.text] if isinstance(sample, ChatAnswer) else []
        usage = estimate_usage(request.messages, answers)
        return ChatOutcome((sample,), usage, is_usage_estimated=True)

    async def _call(self, options: Mapping[str, Any]) -> Any:
        call = self._function.call
        if inspect.iscoroutinefunction(self._function.function):
            return await call(options)
        answer = await _run_in_thread(lambda: call(options))
        # A function without `async` may return a coroutine, as a decorated one does.
        return await answer if inspect.isawaitable(answer) else answer


def register_function(name: str, function: Callable[..., Any]) -> None:
    """Register a function that cannot be imported as a chat model; it replaces an earlier one."""

    class FunctionChatModel(PythonChatModel):
        """A function of a script or notebook."""

        class Parameters(ChatModel.Parameters):
            """No parameters of its own."""

        @classmethod
        def load(
            cls, parameters: Any, *, scenario_dir: Path | None, device: torch.device = CPU
        ) -> PythonChatModel:
            return cls(name, scenario_dir, function)

    if name in CHAT_MODELS.names():
        CHAT_MODELS.forget(name)
    register_chat_model(name)(FunctionChatModel)


def _read_answer(returned: object) -> ChatAnswer | ChatFailure:
    """Return the answer that a function returned."""
    if isinstance(returned, ChatAnswer | ChatFailure):
        return returned
    if isinstance(returned, str):
        return ChatAnswer(returned)
    if isinstance(returned, Mapping):
        message = dict(returned)
        finish_reason = message.pop("finish_reason", None)
        return read_choice({"message": message, "finish_reason": finish_reason})
    return ChatFailure(
        FailureReason.MALFORMED,
        f"the function returned {type(returned).__name__}, not a text, a message or a ChatAnswer",
    )


async def _run_in_thread(work: Callable[[], Any]) -> Any:
    """Return the result of some work in a thread that does not hold the process at its end.

    `asyncio.to_thread` has a pool of few threads, whose end the interpreter waits for.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(returned: object, error: BaseException | None) -> None:
        # After a time limit nobody waits for it.
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(returned)

    def run() -> None:
        returned: object = None
        error: BaseException | None = None
        try:
            returned = work()
        except StopIteration:
            # A future cannot have it, as it would end the coroutine that awaits.
            error = RuntimeError("StopIteration")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            # `sys.exit`, for instance, would end the event loop.
            error = RuntimeError(f"{type(raised).__name__}: {_read_message(raised)}")
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, returned, error)

    threading.Thread(target=run, name="chat function", daemon=True).start()
    return await future


def _read_message(error: BaseException) -> str:
    """Return an error's text, also of one whose `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return "without a message"


def _source_digest(function: Callable[..., Any]) -> str | None:
    """Return a digest of the file that defines a function, or of its source; None without one."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = Path(getattr(module, "__file__", None) or "")
    if file.is_file():
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
