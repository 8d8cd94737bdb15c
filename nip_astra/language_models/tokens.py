"""What goes into and comes out of language models: tokens, how they are drawn, what they weigh.

Shape suffixes: `B` row, `C` context position, `T` continuation position, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.drawn import KeptTokens


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn from the model's distribution."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn besides the model's own."""

    def __post_init__(self) -> None:
        is_right = {
            "max_new_tokens": self.max_new_tokens >= 1,
            "min_new_tokens": self.min_new_tokens >= 0,
            # Float32 logits divided by less are infinite.
            "temperature": self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
        }
        for name, is_fine in is_right.items():
            if not is_fine:
                raise ConfigurationError(
                    f"{name} is {getattr(self, name)}. Give max_new_tokens and top_k from 1, "
                    "min_new_tokens from 0, temperature 0 or from 1e-6 to 1e6, and top_p above 0 "
                    "and up to 1."
                )

    @property
    def cuts(self) -> bool:
        """Whether `top_k` or `top_p` keeps unlikely tokens from being drawn."""
        return self.top_k is not None or self.top_p < 1.0


@dataclass(frozen=True)
class Drawn:
    """Says that tokens are to be scored under the distribution that they were drawn from.

    That is the model's at `temperature`, over the tokens that may be drawn: no special ones, no end
    before `min_new_tokens`, and of the others those that `top_k` and `top_p` left.

    Attributes
    ----------
    options : SamplingOptions
        With which they were drawn; temperature 0 draws from no distribution.
    kept : KeptTokens or None
        Of each token in turn; needed where the options cut. `TokenScorer.kept_tokens` finds them.
    """

    options: SamplingOptions
    kept: KeptTokens | None = None


Draw = Callable[[Tensor, Tensor, int, SamplingOptions], tuple[Tensor, Tensor]]
"""`(logits_BV, uniforms_B, position, options) -> (tokens_B, logprobs_B)`; may use up the logits."""


@dataclass(frozen=True)
class Generation:
    """Sampled continuations, right-padded.

    Attributes
    ----------
    ids_BT : Tensor
        int64; the end token, where the model said it, is the last one of a row; padding is 0.
    mask_BT : Tensor
        bool; True on sampled tokens, the end token included.
    logprobs_BT : Tensor
        float32, nats, no gradient: log p of each sampled token under the unmodified distribution
        (temperature 1, nothing cut off); 0 on padding.
    """

    ids_BT: Tensor
    mask_BT: Tensor
    logprobs_BT: Tensor


class Turns(NamedTuple):
    """What a session said, and how likely it found parts of what it read.

    Attributes
    ----------
    generation : Generation
        Rows ordered by context.
    span_logprobs_CT : Tensor or None
        float32 `[C, T]`, nats, 0 on padding: log p of the tokens of each context's span; None
        where none was asked for.
    """

    generation: Generation
    span_logprobs_CT: Tensor | None


class TokenScores(NamedTuple):
    """What a model thinks of each token of continuations.

    Attributes
    ----------
    logprobs_BT : Tensor
        float32, nats, 0 on padding.
    entropy_BT : Tensor or None
        Entropy of the distribution that the token was one of; float32, nats, 0 on padding.
    hidden_BTX : Tensor or None
        Last hidden state of the position that predicts the token, which is what was read before
        it; float32, 0 on padding.
    """

    logprobs_BT: Tensor
    entropy_BT: Tensor | None = None
    hidden_BTX: Tensor | None = None


@dataclass
class TokenCount:
    """What a backend has computed so far; the measure of waste.

    Attributes
    ----------
    forwarded : int
        Positions that went through the model, padding included.
    generated : int
        Tokens sampled.
    scored : int
        Distinct tokens, each in its place, that scoring had to read; the fewest that could have
        been forwarded for it.
    head_rows : int
        Positions for which the distribution over the vocabulary was computed.
    rescored : int
        Positions that went through the model only to score again what it had sampled; they are in
        none of the others.
    """

    forwarded: int = 0
    generated: int = 0
    scored: int = 0
    head_rows: int = 0
    rescored: int = 0

    def add(self, other: TokenCount) -> None:
        """Count what another count counted too."""
        for counted in fields(TokenCount):
            name = counted.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counted:
    """Something whose work is counted.

    Attributes
    ----------
    token_count : TokenCount
        Running count of work done.
    """

    token_count: TokenCount

    @contextmanager
    def counting(self) -> Iterator[TokenCount]:
        """A count of the work done within the block, filled in when it ends."""
        before = replace(self.token_count)
        spent = TokenCount()
        try:
            yield spent
        finally:
            for counted in fields(TokenCount):
                name = counted.name
                setattr(spent, name, getattr(self.token_count, name) - getattr(before, name))

    @contextmanager
    def rescoring(self) -> Iterator[None]:
        """Count what is forwarded within the block as `rescored`, and nothing else of it."""
        before = replace(self.token_count)
        try:
            yield
        finally:
            rescored = before.rescored + self.token_count.forwarded - before.forwarded
            # In place: a model and its scorer share one count.
            vars(self.token_count).update({**vars(before), "rescored": rescored})


def pad_left(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, C]` int64 and mask `[B, C]` bool, padded on the left with 0."""
    return _pad(rows, device, "left")


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids `[B, T]` int64 and mask `[B, T]` bool, padded on the right with 0."""
    return _pad(rows, device, "right")


def _pad(
    rows: Sequence[Sequence[int]], device: torch.device, side: Literal["left", "right"]
) -> tuple[Tensor, Tensor]:
    if not rows:
        return torch.zeros(0, 0, dtype=torch.long), torch.zeros(0, 0, dtype=torch.bool)
    ids = [torch.tensor(row, dtype=torch.long) for row in rows]
    ones = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    padded = pad_sequence(ids, batch_first=True, padding_side=side)
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return padded.to(device), mask.to(device)
