"""Cut lists of texts into parts that a model of a problem's own can hold at once.

Such a model gives a number for every token of its vocabulary at every place of every text, so what
a call takes is known about from the lengths of its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.astra.core.system import System, TokenValues

VOCABULARY = 50_257
"""Tokens of a vocabulary that is not known: those of GPT-2."""
BYTES_PER_TOKEN = 3
"""Letters of a text in UTF-8 that are counted as a token; plain English has more, so that the
estimate is on the safe side."""
BYTES_PER_NUMBER = 8
"""A logit and its log-probability, in float32."""


def in_parts(
    system: System[Any, Any],
    *texts: Sequence[Any],
    spoken: int = 0,
    max_bytes: int | None = None,
) -> Iterator[slice]:
    """The slices of lists of texts, of which each row is read together.

    Parameters
    ----------
    texts : Sequence
        Lists of equal length, for instance contexts and probes.
    spoken : int
        Tokens that are still to be said to each row.
    max_bytes : int, optional
        A bound of its own; else that of the system.
    """
    count, limit = len(texts[0]), max_bytes or system.max_batch_bytes
    if limit is None:
        yield slice(0, count)
        return
    tokenizer: Any = getattr(system, "tokenizer", None)
    vocabulary = len(tokenizer) if hasattr(tokenizer, "__len__") else VOCABULARY
    max_tokens = limit // (vocabulary * BYTES_PER_NUMBER)
    start = longest = 0
    for row, parts in enumerate(zip(*texts, strict=True)):
        num_bytes = sum(len(str(text).encode(errors="replace")) for text in parts)
        longest = max(longest, num_bytes // BYTES_PER_TOKEN + 1 + spoken)
        if row > start and (row + 1 - start) * longest > max_tokens:
            yield slice(start, row)
            start, longest = row, num_bytes // BYTES_PER_TOKEN + 1 + spoken
    yield slice(start, count)


def values_in_parts(
    system: System[Any, Any],
    contexts: Sequence[Any],
    probes: Sequence[Any],
    ask: Callable[[Sequence[Any], Sequence[Any]], TokenValues],
) -> TokenValues:
    """Ask for values of many probes part by part, and give them as if they were asked at once."""
    parts = in_parts(system, contexts, probes)
    found = [ask(contexts[part], probes[part]) for part in parts]
    return TokenValues(*(_joined(rows) for rows in zip(*found, strict=True)))  # type: ignore[arg-type]


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Put rows below one another, padded at the end to one width."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    width = max(row.shape[1] for row in known)
    return torch.cat([pad(row, (0, width - row.shape[1])) for row in known])
