"""What chat models do with texts: end them where asked, and guess their tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from nip_astra.language_models.services.chat import ChatMessage, ChatUsage

CHARACTERS_PER_TOKEN = 4.0
"""Of English text under the usual vocabularies; only for guesses."""
TOKENS_PER_MESSAGE = 4
"""What a chat template puts around a message, about."""


def cut_at_stop(text: str, stop: Sequence[str]) -> str | None:
    """The text before the first of the stop texts; None where it holds none of them."""
    places = [place for one in stop if (place := text.find(one)) >= 0]
    return text[: min(places)] if places else None


def guess_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def guess_usage(messages: Iterable[ChatMessage], answers: Iterable[str]) -> ChatUsage:
    """About how many tokens a request and its answers have."""
    prompt = sum(TOKENS_PER_MESSAGE + guess_tokens(message["content"]) for message in messages)
    return ChatUsage(prompt, sum(guess_tokens(answer) for answer in answers))
