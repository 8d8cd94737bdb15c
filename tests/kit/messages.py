"""Compare messages by the facts in them, so that their wording stays free."""

from __future__ import annotations


def says(error: object, *facts: object) -> bool:
    """Whether a message contains all facts, in any order."""
    return all(str(fact) in str(error) for fact in facts)
