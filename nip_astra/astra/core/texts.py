"""Texts that remember the tokens they were made of.

They are strings, and where an experiment treats them as strings it works as with any. Where they
come back to the problem that made them, their log-probabilities are those of the tokens that were
sampled, which encoding the text again need not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SEPARATOR = "\n"
"""Stands between the turns in the text of a conversation; models read the turns themselves."""


class Spoken(str):
    """A turn that a model said.

    Attributes
    ----------
    ids : tuple[int, ...]
        The tokens it sampled, its end token included; in the speaker's own vocabulary.
    speaker : str or None
        "attacker" or "target", where it is known.
    """

    ids: tuple[int, ...]
    speaker: str | None

    def __new__(cls, text: str, ids: Sequence[int] = (), speaker: str | None = None) -> Spoken:
        spoken = super().__new__(cls, text)
        spoken.ids = tuple(ids)
        spoken.speaker = speaker
        return spoken

    def __getnewargs__(self) -> Any:
        return str(self), self.ids, self.speaker

    def __radd__(self, before: str) -> str:
        # An opening prompt with what was said to it; a conversation adds its turns itself.
        return Conversation([before, self]) if before.strip() else self


class Conversation(str):
    """Turns in order: an opening by the target's side, then attacker and target in turn.

    Adding a text adds a turn: `conversation + probe + response`. What is blank and nobody said
    adds none, so that `conversation + " " + probe` is the same; models read the turns themselves.

    Attributes
    ----------
    turns : tuple[str, ...]
        The texts; those that are `Spoken` with their tokens.
    attacker_ids : tuple[int, ...] or None
        The tokens that the attacker read as its context, where they are known.
    """

    turns: tuple[str, ...]
    attacker_ids: tuple[int, ...] | None

    def __new__(
        cls, turns: Sequence[str], attacker_ids: Sequence[int] | None = None
    ) -> Conversation:
        conversation = super().__new__(cls, SEPARATOR.join(turns))
        conversation.turns = tuple(turns)
        conversation.attacker_ids = None if attacker_ids is None else tuple(attacker_ids)
        return conversation

    def __getnewargs__(self) -> Any:
        return self.turns, self.attacker_ids

    def __add__(self, turn: str) -> Conversation:
        if isinstance(turn, Conversation):
            return Conversation([*self.turns, *turn.turns])
        is_separator = not isinstance(turn, Spoken) and not turn.strip()
        return self if is_separator else Conversation([*self.turns, turn])


def turns_of(text: str) -> tuple[str, ...]:
    """The turns of a conversation; a plain text is one turn, the opening."""
    return text.turns if isinstance(text, Conversation) else (text,)
