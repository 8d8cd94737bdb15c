"""Opening prompts, and what a data set says of each beside its text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Columns = tuple[tuple[str, str | int | float | bool | None], ...]
"""Names and values beside a prompt, in the order of the data set."""


class Prompt(str):
    """The text of an opening prompt; all that takes texts takes it.

    Attributes
    ----------
    columns : Columns
        The other columns of its row, for scorers and records.
    """

    columns: Columns

    def __new__(cls, text: str, columns: Columns = ()) -> Prompt:
        prompt = super().__new__(cls, text)
        prompt.columns = columns
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.columns)


def columns_of(prompt: str) -> Columns:
    """What stands beside a prompt; nothing for a plain text."""
    return prompt.columns if isinstance(prompt, Prompt) else ()


def columns_of_record(record: Mapping[str, Any]) -> Columns:
    """What a record of a conversation holds of the columns beside its prompt."""
    return tuple((record.get(RECORD_KEY) or {}).items())


RECORD_KEY = "prompt_columns"
"""Under which a record of a conversation holds them, where there are any."""
