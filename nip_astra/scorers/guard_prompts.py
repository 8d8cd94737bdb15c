"""Put a conversation before a guard model, as its chat template wants it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.scorers.base import Message

_MARKS = ("nipastraquestionmark", "nipastraanswermark")


class GuardPrompts:
    """Renders conversations by the chat template of a guard.

    Templates of guards want turns that alternate and begin with the user's, and differ in how a
    turn holds its text: as text, or as a list of parts. Which of the two is found out here.

    Parameters
    ----------
    model : str
        Name of the guard, for messages.
    preamble : str
        Said by the user where a conversation begins with the assistant.
    options : Mapping
        Further variables of the template.

    Raises
    ------
    ConfigurationError
        When the template refuses a conversation, or shows nothing of it.
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
        """Say whether turns hold lists of parts, by a conversation that must show in the prompt."""
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
        reason = problems[0] if problems else "its prompt does not show what was said"
        raise ConfigurationError(
            f"the guard model {model!r} was asked for, but its chat template cannot take a "
            f"conversation: {reason}. Give a model of the Llama Guard type, whose template puts "
            "the turns into a question."
        )

    def fit(self, conversation: Sequence[Message], max_tokens: int) -> list[int] | None:
        """The prompt's tokens; None where not even the last turn fits.

        Turns are left out from the oldest on until the rest fits.
        """
        for start in range(len(conversation)):
            ids: list[int] = self._render(self._alternating(conversation[start:]), tokenize=True)
            if len(ids) <= max_tokens:
                return ids
        return None

    def _alternating(self, conversation: Sequence[Message]) -> list[Message]:
        """Turns that begin with the user's; what one side says twice in a row is one turn."""
        turns: list[Message] = []
        if conversation[0].role == "assistant":
            turns.append(Message("user", self._preamble))
        for message in conversation:
            if turns and turns[-1].role == message.role:
                message = Message(message.role, f"{turns.pop().text}\n{message.text}")
            turns.append(message)
        return turns

    def _harmless(self, text: str) -> str:
        """The text without the guard's special tokens: what is judged must not steer it."""
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
