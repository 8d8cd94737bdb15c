"""Splitting of text lists into parts that fit into memory.

A custom model returns a number for every vocabulary token at every position of every text, so the
memory of a call can be estimated from the lengths of its texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.astra.core.system import System, TokenValues

VOCABULARY = 50_257
"""Assumed vocabulary size if unknown: that of GPT-2."""
BYTES_PER_TOKEN = 3
"""UTF-8 bytes counted as a token; plain English has more, so the estimate is conservative."""
BYTES_PER_NUMBER = 8
"""A logit and its log-probability, in float32."""


def in_parts(
    system: System[Any, Any],
    *texts: Sequence[Any],
    spoken: int = 0,
    max_bytes: int | None = None,
) -> Iterator[slice]:
    """Yield slices of lists of texts that are processed together.

    Parameters
    ----------
    texts : Sequence
        Lists of equal length, for instance contexts and probes.
    spoken : int
        Tokens still to be generated for each row.
    max_bytes : int, optional
        Replaces the bound of the system.
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
    """Compute the values of many probes part by part, and join them."""
    parts = in_parts(system, contexts, probes)
    found = [ask(contexts[part], probes[part]) for part in parts]
    return TokenValues(*(_joined(rows) for rows in zip(*found, strict=True)))  # type: ignore[arg-type]


def _joined(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate rows, padded on the right to one width."""
    known = [row for row in rows if row is not None]
    if not known:
        return None
    width = max(row.shape[1] for row in known)
    return torch.cat([pad(row, (0, width - row.shape[1])) for row in known])
