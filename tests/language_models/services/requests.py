"""Shortcuts to query chat models in tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatModel,
    ChatOutcome,
    ChatRequest,
)
from tests.kit.chat_stub import Reply


def saying(text: str, **fields: Any) -> ChatRequest:
    """A request with a single user message."""
    return ChatRequest(({"role": "user", "content": text},), **fields)


def ask(model: ChatModel, *requests: ChatRequest) -> list[ChatOutcome]:
    """Send all at once, in their own event loop."""

    async def together() -> list[ChatOutcome]:
        try:
            return list(await asyncio.gather(*map(model.answer, requests)))
        finally:
            await model.close()

    return asyncio.run(together())


def texts(outcome: ChatOutcome) -> list[str]:
    """The texts of all samples; failures by their reason in brackets."""
    return [
        one.text if isinstance(one, ChatAnswer) else f"<{one.reason}>" for one in outcome.samples
    ]


def failure(outcome: ChatOutcome) -> ChatFailure:
    """The only sample, which is a failure."""
    (only,) = outcome.samples
    assert isinstance(only, ChatFailure)
    return only


def completion(*contents: str | None, usage: Any = (7, 3), **choice: Any) -> Reply:
    """A well-formed chat completion with some choices."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": content},
            "finish_reason": "stop",
            **choice,
        }
        for index, content in enumerate(contents)
    ]
    if isinstance(usage, Sequence) and not isinstance(usage, str):
        usage = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return Reply(body=json.dumps({"object": "chat.completion", "choices": choices, "usage": usage}))
