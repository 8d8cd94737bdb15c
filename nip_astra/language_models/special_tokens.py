"""Which tokens end a turn, and which are never said."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


def find_end_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a turn: the checkpoint's and the tokenizer's own."""
    configured = getattr(generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    found = [i for i in [*ids, tokenizer.eos_token_id] if i is not None]
    return tuple(sorted(set(found)))


def find_banned_ids(tokenizer: Any, end_ids: Collection[int], vocab_size: int) -> list[int]:
    """Special tokens other than the end: a model that said a role marker could forge a turn.

    Rows of the vocabulary that stand for no token are among them.
    """
    special = set(tokenizer.all_special_ids)
    special.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    special.update(range(len(tokenizer), vocab_size))
    return sorted(i for i in special - set(end_ids) if i < vocab_size)
