"""Requests to a language model, and the answers that grow token by token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from nip_astra.language_models.sampling import SamplingOptions
from nip_astra.language_models.tree_engine.routed_weights import Adapter
from nip_astra.utils.seeding import SeedPart, derived_generator

FinishReason = Literal["stop", "length", "error"]
_NUMBERS = itertools.count()
_REPLACEMENT = "\ufffd"
"""What a tokenizer writes for an incomplete character."""


class TokenRecord(NamedTuple):
    """One token of an answer."""

    token: int
    logprob: float
    """Under the model's own distribution (temperature 1, nothing cut off), nats."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, in falling order."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step added to one answer."""

    request: GenerationRequest
    index: int
    """Number of the answer within its request."""
    text: str
    """Text that will not change; may lag behind the tokens."""
    tokens: tuple[TokenRecord, ...] = ()
    """Tokens whose text begins in `text`, without the end of the turn, if log-probabilities are
    requested; all tokens if the request `returns_token_ids`."""
    num_tokens: int = 0
    """Tokens generated so far, including the end of the turn."""
    finish_reason: FinishReason | None = None
    """None while the answer continues."""
    error: str | None = None
    """Set if the finish reason is "error"."""


Listener = Callable[[Sequence[Progress]], None]
"""Called after each step, in the engine's thread, with the progress of the listener's answers."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """At least one token."""
    max_tokens: int
    """Longest answer, at least 1; prompt and answer must fit into the model's window."""
    seed: int = 0
    """With the index of an answer it determines all its draws, whatever else is in the batch."""
    listener: Listener | None = None
    sample_seeds: tuple[int, ...] = ()
    """If given, one seed per answer: answer i is drawn as answer 0 of a request with that seed."""
    num_samples: int = 1
    """Answers, drawn independently."""
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    num_top: int | None = None
    """Number of most likely tokens to report per token; None without log-probabilities."""
    is_streamed: bool = False
    """Whether progress is reported at each step or only at the end."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end an answer, in addition to the model's."""
    returns_token_ids: bool = False
    """Return all tokens, special ones and the end included, in place of text."""
    adapter: Adapter | None = None
    """Low-rank adapter that prompt and answer go through."""
    is_cancelled: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))

    def seed_key(self, index: int) -> tuple[SeedPart, ...]:
        """What the draws of an answer are derived from."""
        if self.sample_seeds:
            return self.sample_seeds[index], "answer", 0
        return self.seed, "answer", index

    @property
    def options(self) -> SamplingOptions:
        """How its tokens are drawn."""
        return SamplingOptions(
            self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            end_ids=self.end_ids,
        )


class RunningSequence:
    """An answer that is being generated."""

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        tokenizer: Any,
        end_ids: frozenset[int],
        *,
        device: torch.device,
    ) -> None:
        self.request, self.index = request, index
        self.generator = derived_generator(*request.seed_key(index), device=device)
        self.last = -1
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._end_ids = end_ids.union(request.end_ids)
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.stop)
        # Unless somebody needs the text on the way, it is decoded once, at the end.
        is_read = request.is_streamed or request.stop or request.num_top is not None
        self._undecoded: list[int] | None = None if is_read else []
        self._tokenizer = tokenizer
        self._text = ""
        self._records: list[TokenRecord] = []
        self._held_back: list[TokenRecord] = []

    def append(self, record: TokenRecord) -> None:
        """Add the next token."""
        self.last = record.token
        self.num_tokens += 1
        is_end = record.token in self._end_ids
        is_full = self.num_tokens == self.request.max_tokens
        if self.request.returns_token_ids:
            self._records.append(record)
            if is_end or is_full:
                self.finish_reason = "stop" if is_end else "length"
            return
        if is_end:
            self._finish("stop")
            return
        if self._undecoded is not None:
            self._undecoded.append(record.token)
        else:
            text = self._detokenizer.push(record.token)
            if self.request.num_top is not None:
                self._held_back.append(record)
            self._release(text)
        if self._detokenizer.is_stopped:
            self._held_back = []
            self.finish_reason = "stop"
        elif is_full:
            self._finish("length")

    def fail(self, error: str) -> None:
        """Give up."""
        self.finish_reason, self.error = "error", error

    def _finish(self, reason: FinishReason) -> None:
        if self._undecoded is not None:
            self._text = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
        else:
            self._release(self._detokenizer.finish(), is_last=True)
        self.finish_reason = "stop" if self._detokenizer.is_stopped else reason

    def _release(self, text: str, *, is_last: bool = False) -> None:
        self._text += text
        if text or is_last:
            self._records += self._held_back
            self._held_back = []

    def take_progress(self) -> Progress | None:
        """The item to report now, if any."""
        if not self.request.is_streamed and self.finish_reason is None:
            return None
        if not (self._text or self._records or self.finish_reason):
            return None
        progress = Progress(
            self.request,
            self.index,
            self._text,
            tuple(self._records),
            self.num_tokens,
            self.finish_reason,
            self.error,
        )
        self._text, self._records = "", []
        return progress


class IncrementalDetokenizer:
    """Turns tokens into text that will not change any more.

    Text is held back while it may be the beginning of a stop text, or part of a character whose
    other bytes are missing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = [text for text in stop if text]
        self.is_stopped = False
        self._ids: list[int] = []
        self._first, self._read = 0, 0
        self._pending = ""

    def push(self, token: int) -> str:
        """The text that a token completes."""
        self._ids.append(token)
        # A token's text may depend on the token before it (spaces), and on no earlier one.
        before = self._decode(self._ids[self._first : self._read])
        now = self._decode(self._ids[self._first :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._first, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """The text still held back, if the answer ends without a stop text."""
        before = self._decode(self._ids[self._first : self._read])
        rest = self._decode(self._ids[self._first :])[len(before) :]
        text = self._release(rest) + ("" if self.is_stopped else self._pending)
        self._pending = ""
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _release(self, added: str) -> str:
        text = self._pending + added
        starts = [start for start in (text.find(stop) for stop in self.stop) if start >= 0]
        if starts:
            self.is_stopped, self._pending = True, ""
            return text[: min(starts)]
        kept = max((overlap(text, stop) for stop in self.stop), default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]


def overlap(text: str, stop: str) -> int:
    """The number of characters at the end of a text that may begin a stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
