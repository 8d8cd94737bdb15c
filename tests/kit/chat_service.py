"""A chat model behind an address on the loopback interface, for as long as a test needs one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatModel,
    ChatRequest,
    FailureReason,
)
from nip_astra.language_models.services.chat_models.local import LocalChatModel
from nip_astra.parameters.content import content_root
from tests.kit.tiny import load_backend
from tests.scorers.chat_stub import ChatStub, Reply, chat_stub


@contextmanager
def behind_an_address(model: ChatModel, *, port: int = 0) -> Iterator[ChatStub]:
    """Serve a chat model by the chat-completions protocol."""

    def answer(body: dict[str, Any], number: int) -> Reply:
        request = ChatRequest(
            tuple(body["messages"]),
            max_tokens=body.get("max_tokens"),
            temperature=body.get("temperature", 1.0),
            top_p=body.get("top_p", 1.0),
            seed=body.get("seed"),
        )
        outcome = asyncio.run(model.answer(request))
        (sample,) = outcome.samples
        if not isinstance(sample, ChatAnswer):
            status = 400 if sample.reason is FailureReason.REFUSED else 500
            return Reply(status, body=json.dumps({"error": {"message": sample.message}}))
        message = {"role": "assistant", "content": sample.text}
        choice = {"index": 0, "message": message, "finish_reason": str(sample.finish_reason)}
        return Reply(body=json.dumps({"choices": [choice], "usage": outcome.usage._asdict()}))

    with chat_stub(answer, port=port) as stub:
        yield stub


def pocket_target() -> LocalChatModel:
    """The target of pocket_chat in this process."""
    folder = content_root() / "scenarios" / "pocket_chat" / "models" / "target"
    return LocalChatModel(load_backend(folder, trainable=False), name="pocket")
