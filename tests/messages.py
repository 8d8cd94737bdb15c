"""Compare messages by their key words, so that their wording stays free."""

from __future__ import annotations


def says(error: object, *words: object) -> bool:
    """Whether a message holds all words, in this order."""
    rest = str(error)
    for word in words:
        _, found, rest = rest.partition(str(word))
        if not found:
            return False
    return True
