"""Outputs of language models, and counts of their work.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.language_models.sampling import SamplingOptions


@dataclass(frozen=True)
class Generation:
    """Sampled continuations, right-padded."""

    ids_BT: Tensor
    """int64; the last token of a row is its end token, if it ended; padding is 0."""
    mask_BT: Tensor
    """bool; True on sampled tokens, including the end token."""
    logprobs_BT: Tensor
    """float32, nats, no gradient: log p of each sampled token under the unmodified distribution
    (temperature 1, no truncation); 0 on padding."""


TokenRows: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""`context_BC`, `context_mask_BC`, `ids_BT` and `mask_BT`, as in `TokenScorer.logprobs`."""


DrawnRows: TypeAlias = tuple[Sequence[Sequence[int]], int, Tensor, SamplingOptions]
"""`contexts`, `rows_per_context`, `uniforms_BT` and `options`, as in `TokenSampler.generate`."""


class Turns(NamedTuple):
    """Turns sampled by a session, and log-probabilities of spans of their contexts."""

    generation: Generation
    """Rows ordered by context."""
    span_logprobs_CT: Tensor | None
    """float32 `[C, T]`, nats, 0 on padding: log p of the tokens of each context's span; None unless
    requested."""


class TokenScores(NamedTuple):
    """Log-probabilities of continuation tokens, with entropies and hidden states if requested."""

    logprobs_BT: Tensor
    """float32, nats, 0 on padding."""
    entropy_BT: Tensor | None = None
    """Entropy of the distribution at the token; float32, nats, 0 on padding."""
    hidden_BTX: Tensor | None = None
    """Last hidden state of the position that predicts the token; float32, 0 on padding."""


@dataclass
class TokenCount:
    """Work of a backend so far."""

    forwarded: int = 0
    """Positions forwarded through the model, including padding."""
    generated: int = 0
    """Tokens sampled."""
    scored: int = 0
    """Distinct tokens in context that scoring had to read: the minimum to forward for it."""
    head_rows: int = 0
    """Positions for which the distribution over the vocabulary was computed."""
    rescored: int = 0
    """Positions forwarded only to score sampled tokens again; not part of the other counts."""

    def add(self, other: TokenCount) -> None:
        """Add another count."""
        for field in fields(TokenCount):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counted:
    """Base class of objects whose work is counted."""

    token_count: TokenCount

    @contextmanager
    def counting(self) -> Iterator[TokenCount]:
        """Yield the work done within the block, filled in when it ends."""
        before = replace(self.token_count)
        spent = TokenCount()
        try:
            yield spent
        finally:
            for field in fields(TokenCount):
                name = field.name
                setattr(spent, name, getattr(self.token_count, name) - getattr(before, name))

    @contextmanager
    def rescoring(self) -> Iterator[None]:
        """Count positions forwarded within the block as `rescored` only."""
        before = replace(self.token_count)
        try:
            yield
        finally:
            rescored = before.rescored + self.token_count.forwarded - before.forwarded
            # In place: a model and its scorer share one count.
            vars(self.token_count).update({**vars(before), "rescored": rescored})


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids `[B, C]` int64 and mask `[B, C]` bool, padded on the left with 0."""
    return _pad(rows, device, "left")


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids `[B, T]` int64 and mask `[B, T]` bool, padded on the right with 0."""
    return _pad(rows, device, "right")


def _pad(
    rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    masks = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded = pad_sequence(ids, batch_first=True, padding_side=side)
    mask = pad_sequence(masks, batch_first=True, padding_side=side)
    return padded.to(device), mask.to(device)
