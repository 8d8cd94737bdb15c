"""Turn messages and texts into the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.services.chat import render_chat
from nip_astra.serve.api_errors import wrong


def chat_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens before the next message of the assistant, by the tokenizer's template.

    Raises
    ------
    ApiError
        When there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise wrong(
            "this model's tokenizer has no chat template. Use /v1/completions, or serve a chat "
            "model.",
            "messages",
            "no_chat_template",
        )
    try:
        text = render_chat(tokenizer, messages, opens_answer=True)
    except ModelLoadError as error:
        raise wrong(str(error), "messages", "refused_by_template") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def completion_prompts(
    tokenizer: Any, prompt: str | Sequence[Any], vocab_size: int
) -> list[list[int]]:
    """The tokens of each prompt of /v1/completions.

    Raises
    ------
    ApiError
        When a token is none of the model's.
    """
    given: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(given[0], int):
        given = [given]
    found = [list(tokenizer.encode(one)) if isinstance(one, str) else list(one) for one in given]
    worst = max((max(ids, default=0) for ids in found), default=0)
    if worst >= vocab_size:
        raise wrong(
            f"the prompt holds the token {worst}, but the model has {vocab_size}. Give tokens of "
            "this model, or text.",
            "prompt",
            "invalid_value",
        )
    return found
