"""Render a conversation through a guard model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.scorers.base import Message

_MARKS = ("nipastraquestionmark", "nipastraanswermark")


class GuardPrompts:
    """Renders conversations through a guard's chat template.

    Guards' templates require alternating turns that begin with the user. Some take a turn's content
    as text, others as a list of parts; this class detects which.

    Parameters
    ----------
    model : str
        Name of the guard, for messages.
    preamble : str
        User turn inserted if a conversation begins with the assistant.
    options : Mapping
        Further variables of the template.

    Raises
    ------
    ConfigurationError
        If the template rejects a conversation, or omits its turns.
    """

    def __init__(
        self, tokenizer: Any, *, model: str, preamble: str, options: Mapping[str, object]
    ) -> None:
        self._tokenizer = tokenizer
        self._preamble = preamble
        self._options = dict(options)
        self._special = [
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
        ]
        self._uses_parts = self._find_form(model)

    def _find_form(self, model: str) -> bool:
        """Whether turns hold lists of parts: a test conversation must appear in the prompt."""
        problems = []
        for uses_parts in (False, True):
            self._uses_parts = uses_parts
            turns = [Message("user", _MARKS[0]), Message("assistant", _MARKS[1])]
            try:
                shown = self._render(turns, tokenize=False)
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}".rstrip("."))
                continue
            if all(mark in shown for mark in _MARKS):
                return uses_parts
        reason = problems[0] if problems else "its prompt omits the turns"
        raise ConfigurationError(
            f"the chat template of the guard model {model!r} cannot render a conversation: "
            f"{reason}. Give a model of the Llama Guard type."
        )

    def fit(self, conversation: Sequence[Message], max_tokens: int) -> list[int] | None:
        """The prompt's tokens, without the oldest turns if needed; None if none fits."""
        for start in range(len(conversation)):
            ids: list[int] = self._render(self._alternating(conversation[start:]), tokenize=True)
            if len(ids) <= max_tokens:
                return ids
        return None

    def _alternating(self, conversation: Sequence[Message]) -> list[Message]:
        """Turns beginning with the user; consecutive turns of one role are joined."""
        turns: list[Message] = []
        if conversation[0].role == "assistant":
            turns.append(Message("user", self._preamble))
        for message in conversation:
            if turns and turns[-1].role == message.role:
                message = Message(message.role, f"{turns.pop().text}\n{message.text}")
            turns.append(message)
        return turns

    def _harmless(self, text: str) -> str:
        """The text with the guard's special tokens broken up, so that it cannot steer the guard."""
        for token in self._special:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def _render(self, turns: Sequence[Message], *, tokenize: bool) -> Any:
        messages = [
            {
                "role": turn.role,
                "content": [{"type": "text", "text": text}] if self._uses_parts else text,
            }
            for turn in turns
            for text in [self._harmless(turn.text)]
        ]
        shown = self._tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=tokenize,
            return_dict=tokenize,
            **self._options,
        )
        return shown["input_ids"] if tokenize else shown
