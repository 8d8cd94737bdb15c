"""Opening prompts with the other columns of their dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nip_astra.rollouts.messages import Turn

RECORD_KEY = "prompt_columns"
"""Key of a prompt's other columns in the record of a conversation."""
Columns = tuple[tuple[str, str | int | float | bool | None], ...]
"""Names and values of a prompt's other columns, in the order of the dataset."""


class Prompt(str):
    """The text of an opening prompt, with the other columns of its row.

    Attributes
    ----------
    columns : Columns
        The other columns of its row, for scorers and records; lists and groups are JSON.
    row : Mapping[str, Any]
        The same columns as the dataset holds them, for reward functions.
    messages : tuple of Turn
        The messages of a conversational prompt; empty for a plain text.
    """

    columns: Columns
    row: Mapping[str, Any]
    messages: tuple[Turn, ...]

    def __new__(
        cls,
        text: str,
        columns: Columns = (),
        row: Mapping[str, Any] | None = None,
        messages: tuple[Turn, ...] = (),
    ) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.columns, prompt.messages = columns, messages
        prompt.row = dict(columns) if row is None else row
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.columns, self.row, self.messages)


def columns_of(prompt: str) -> Columns:
    """Return a prompt's other columns; none for a plain text."""
    return prompt.columns if isinstance(prompt, Prompt) else ()


def columns_of_record(record: Mapping[str, Any]) -> Columns:
    """Return the prompt's other columns in the record of a conversation."""
    return tuple((record.get(RECORD_KEY) or {}).items())
