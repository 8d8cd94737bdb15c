"""Opening prompts with the other columns of their data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RECORD_KEY = "prompt_columns"
"""Key of the columns beside a prompt in a record of a conversation."""
Columns = tuple[tuple[str, str | int | float | bool | None], ...]
"""Names and values beside a prompt, in the order of the data set."""


class Prompt(str):
    """The text of an opening prompt, with the other columns of its row.

    Attributes
    ----------
    columns : Columns
        The other columns of its row, for scorers and records; lists and groups are JSON.
    row : Mapping[str, Any]
        The same columns as the dataset holds them, for reward functions.
    messages : tuple of (role, text)
        The messages of a conversational prompt; empty for a plain text.
    """

    columns: Columns
    row: Mapping[str, Any]
    messages: tuple[tuple[str, str], ...]

    def __new__(
        cls,
        text: str,
        columns: Columns = (),
        row: Mapping[str, Any] | None = None,
        messages: tuple[tuple[str, str], ...] = (),
    ) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.columns, prompt.messages = columns, messages
        prompt.row = dict(columns) if row is None else row
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.columns, self.row, self.messages)


def columns_of(prompt: str) -> Columns:
    """The columns beside a prompt; none for a plain text."""
    return prompt.columns if isinstance(prompt, Prompt) else ()


def columns_of_record(record: Mapping[str, Any]) -> Columns:
    """The columns beside the prompt in a record of a conversation."""
    return tuple((record.get(RECORD_KEY) or {}).items())
