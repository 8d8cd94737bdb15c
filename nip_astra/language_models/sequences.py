"""Generation requests, and answers that grow token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from nip_astra.language_models.sampling import SamplingOptions, find_special_ids
from nip_astra.language_models.structured import advance
from nip_astra.language_models.tree_engine.routed_weights import Adapter
from nip_astra.utils.seeding import SeedPart, derived_generator

FinishReason = Literal["stop", "length", "error"]
_NUMBERS = itertools.count()
_REPLACEMENT = "\ufffd"
"""Output of a tokenizer for an incomplete character."""


class TokenRecord(NamedTuple):
    """One token of an answer."""

    token: int
    logprob: float
    """Under the model's own distribution (temperature 1, no truncation), nats; NaN for the first
    token of a prompt and where none are requested."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log-probabilities, in descending order."""
    text: str = ""
    """The text that the token completes: the texts of all tokens join to that of the answer."""
    before: tuple[int, ...] = ()
    """The preceding tokens, on which the text of a token in its place may depend."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The additions of one step to one answer."""

    request: GenerationRequest
    index: int
    """Number of the answer within its request."""
    text: str
    """Text that is final; may lag behind the tokens."""
    tokens: tuple[TokenRecord, ...] = ()
    """If log-probabilities are requested, tokens whose text `text` completes. All tokens drawn,
    including the end of the turn, if the request `keeps_tokens` or `returns_token_ids`."""
    num_tokens: int = 0
    """Tokens generated so far, including the end of the turn."""
    finish_reason: FinishReason | None = None
    """None while the answer continues."""
    error: str | None = None
    """Set if the finish reason is "error"."""
    is_request_fault: bool = False
    """Whether the request caused the error, not the model."""


Listener = Callable[[Sequence[Progress]], None]
"""Called after each step, in the engine's thread, with the progress of the listener's answers."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt to continue."""

    prompt: tuple[int, ...]
    """Tokens of the prompt, at least one."""
    max_tokens: int
    """Maximum answer length; prompt and answer must fit the window. 0 with `echo` only."""
    seed: int = 0
    """With the index of an answer it determines all of its draws, independently of the batch."""
    listener: Listener | None = None
    sample_seeds: tuple[int, ...] = ()
    """If given, one seed per answer: answer i is drawn as answer 0 of a request with that seed."""
    num_samples: int = 1
    """Number of independent answers."""
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
    """Return all tokens, including special ones and the end, instead of text."""
    keeps_tokens: bool = False
    """Return all tokens in addition to the text."""
    echo: bool = False
    """The answer begins with the prompt and, if log-probabilities are requested, its tokens."""
    prompt_tokens: list[TokenRecord] = field(default_factory=list)
    """For `echo`: the prompt's tokens with their log-probabilities, filled in by the engine."""
    grammar: str | None = None
    """Grammar of the answer, unless it is truncated; see `structured.Grammars`."""
    shown_ids: tuple[int, ...] = ()
    """Special tokens that may be drawn and that the text shows, such as marks of calls."""
    adapter: Adapter | None = None
    """Low-rank adapter for prompt and answer."""
    num_started: int = 0
    """Answers that have started, counted by the engine."""
    is_cancelled: bool = False
    number: int = field(default_factory=lambda: next(_NUMBERS))

    def seed_key(self, index: int) -> tuple[SeedPart, ...]:
        """Return the key from which the draws of an answer are derived."""
        if self.sample_seeds:
            return self.sample_seeds[index], "answer", 0
        return self.seed, "answer", index

    @property
    def options(self) -> SamplingOptions:
        """Return its sampling options."""
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
        matcher: Any = None,
    ) -> None:
        self.request = request
        self.index = index
        self.matcher = matcher
        self._device = device
        self.last = -1
        """The newest token; -1 before the first."""
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.is_request_fault = False
        self._end_ids = end_ids.union(request.end_ids)
        # A stop text in an echoed prompt ends nothing.
        self._detokenizer = IncrementalDetokenizer(tokenizer, (), request.shown_ids)
        self._returns_records = request.num_top is not None or request.keeps_tokens
        # Unless the text is needed on the way, it is decoded once, at the end.
        is_text_needed = request.is_streamed or request.stop or self._returns_records
        self._undecoded: list[int] | None = None if is_text_needed else []
        self._text = ""
        self._records: list[TokenRecord] = []
        self._held_back: list[TokenRecord] = []
        """Tokens whose text is not final yet, or not complete."""
        self._num_uncovered = 0
        """Characters of released text that no released token has."""
        if request.echo:
            unscored = [TokenRecord(token, math.nan) for token in request.prompt]
            for record in request.prompt_tokens or unscored:
                self._read_token(record)
            if request.max_tokens == 0:
                self._finish("length")
        self._detokenizer.stop = [text for text in request.stop if text]

    @cached_property
    def generator(self) -> torch.Generator:
        """The source of its draws."""
        return derived_generator(*self.request.seed_key(self.index), device=self._device)

    def append(self, record: TokenRecord) -> None:
        """Add the next token."""
        self.last = record.token
        self.num_tokens += 1
        fault = None if self.matcher is None else advance(self.matcher, record.token)
        if fault is not None:
            self.fail(f"no text of the requested form continues the answer: {fault}")
            self.is_request_fault = True
            return
        is_end = record.token in self._end_ids
        is_full = self.num_tokens == self.request.max_tokens
        if self.request.returns_token_ids:
            self._records.append(record)
            if is_end or is_full:
                self.finish_reason = "stop" if is_end else "length"
            return
        if is_end:
            self._finish("stop")
            if self.request.keeps_tokens:
                self._records.append(record)
            return
        self._read_token(record)
        if self._detokenizer.is_stopped:
            self._cut_tokens()
            self.finish_reason = "stop"
        elif self.matcher is not None and self.matcher.is_stopped():
            # Nothing can follow, not even where the model has no end of a turn.
            self._finish("stop")
        elif is_full:
            self._finish("length")

    def _read_token(self, record: TokenRecord) -> None:
        if self._undecoded is not None:
            self._undecoded.append(record.token)
            return
        before = self._detokenizer.last_ids
        text = self._detokenizer.push(record.token)
        if self._returns_records:
            self._held_back.append(record._replace(text=self._detokenizer.added, before=before))
        self._release(text)

    def fail(self, error: str) -> None:
        """End with an error."""
        self.finish_reason = "error"
        self.error = error

    def _finish(self, reason: FinishReason) -> None:
        """Release all text, and end for a reason, or for a stop text that it completes."""
        if self._undecoded is not None:
            self._text = self._detokenizer.decode_all(self._undecoded)
        else:
            text = self._detokenizer.finish()
            if self._held_back:
                # An incomplete character at the end belongs to the last token.
                last = self._held_back[-1]
                self._held_back[-1] = last._replace(text=last.text + self._detokenizer.added)
            self._release(text)
            self._cut_tokens()
        self.finish_reason = "stop" if self._detokenizer.is_stopped else reason

    def _release(self, text: str) -> None:
        """Report text, and the tokens up to the last one that it completes."""
        self._text += text
        self._num_uncovered += len(text)
        num_completed = 0
        num_covered = 0
        length = 0
        for number, record in enumerate(self._held_back, 1):
            length += len(record.text)
            if length > self._num_uncovered:
                break
            # A token without text waits for the one that completes its character.
            if record.text:
                num_completed = number
                num_covered = length
        self._records += self._held_back[:num_completed]
        self._held_back = self._held_back[num_completed:]
        self._num_uncovered -= num_covered

    def _cut_tokens(self) -> None:
        """Report the remaining tokens, with their text truncated before a stop text."""
        for record in self._held_back:
            text = record.text[: self._num_uncovered]
            self._num_uncovered -= len(text)
            if text or self.request.keeps_tokens or not self._detokenizer.is_stopped:
                self._records.append(record._replace(text=text))
        self._held_back = []

    def take_progress(self) -> Progress | None:
        """Return the progress to report now, if any."""
        if not self.request.is_streamed and self.finish_reason is None:
            return None
        if not (self._text or self._records or self.finish_reason):
            return None
        progress = Progress(
            request=self.request,
            index=self.index,
            text=self._text,
            tokens=tuple(self._records),
            num_tokens=self.num_tokens,
            finish_reason=self.finish_reason,
            error=self.error,
            is_request_fault=self.is_request_fault,
        )
        self._text = ""
        self._records = []
        return progress


class IncrementalDetokenizer:
    """Converts tokens to text that is final.

    Text is held back while it may be the beginning of a stop text, or part of an incomplete
    character.
    """

    def __init__(
        self, tokenizer: Any, stop: Sequence[str], shown_ids: Collection[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._shown_ids = frozenset(shown_ids)
        self._hidden_ids: frozenset[int] = frozenset()
        if shown_ids:
            self._hidden_ids = find_special_ids(tokenizer) - self._shown_ids
        self.stop = [text for text in stop if text]
        self.is_stopped = False
        self.added = ""
        """The text that the last call read, whether or not it may be shown already."""
        self._ids: list[int] = []
        # The tokens from `_first` to `_read` are context: their text is read already.
        self._first = 0
        self._read = 0
        self._pending = ""

    def push(self, token: int) -> str:
        """Return the text completed by a token."""
        self._ids.append(token)
        # A token's text may depend on the token before it (spaces), and on no earlier one.
        old_text = self.decode(self._ids[self._first : self._read])
        new_text = self.decode(self._ids[self._first :])
        self.added = ""
        if new_text.endswith(_REPLACEMENT) or len(new_text) <= len(old_text):
            return ""
        self._first = self._read
        self._read = len(self._ids)
        self.added = new_text[len(old_text) :]
        return self._release(self.added)

    @property
    def last_ids(self) -> tuple[int, ...]:
        """Return the tokens that the text of the next one depends on."""
        return tuple(self._ids[self._first :])

    def finish(self) -> str:
        """Return the text still held back, if the answer ends without a stop text."""
        old_text = self.decode(self._ids[self._first : self._read])
        new_text = self.decode(self._ids[self._first :])
        self.added = new_text[len(old_text) :]
        text = self._release(self.added)
        if not self.is_stopped:
            text += self._pending
        self._pending = ""
        return text

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of a whole answer, as it is in parts."""
        text = self.decode(ids)
        if _REPLACEMENT in text:
            # Tokenizers of bytes give up all characters beside an incomplete one.
            text = "".join(map(self.push, ids)) + self.finish()
        return text

    def decode(self, ids: list[int]) -> str:
        """Return the text of tokens, with those special ones that are shown."""
        if self._shown_ids.isdisjoint(ids):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        # In one call: a tokenizer may drop a space where a text begins.
        visible_ids = [token for token in ids if token not in self._hidden_ids]
        return str(self.tokenizer.decode(visible_ids, skip_special_tokens=False))

    def _release(self, added: str) -> str:
        """Return the text that is final: up to a stop text, or to what may begin one."""
        text = self._pending + added
        positions = [text.find(stop) for stop in self.stop]
        stop_positions = [position for position in positions if position >= 0]
        if stop_positions:
            self.is_stopped = True
            self._pending = ""
            return text[: min(stop_positions)]
        num_held = max((overlap(text, stop) for stop in self.stop), default=0)
        end = len(text) - num_held
        self._pending = text[end:]
        return text[:end]


def overlap(text: str, stop: str) -> int:
    """Return the number of final characters of a text that may begin a stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
