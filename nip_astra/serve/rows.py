"""One answer while it is being said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nip_astra.serve.generation import FinishReason, GenerationRequest, Progress, TokenRecord
from nip_astra.utils.seeding import derived_generator

_UNFINISHED = "\ufffd"


class Row:
    """An answer of a request.

    Attributes
    ----------
    index : int
        Which answer of its request.
    generator : torch.Generator
        Nothing else decides its draws.
    last : int
        The newest token, which has not been read yet.
    finish_reason : FinishReason or None
        None while it goes on.
    error : str or None
        Why it was given up.
    """

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
        self.generator = derived_generator(request.seed, "answer", index, device=device)
        self.last = -1
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._end_ids = end_ids
        self._texts = TextAssembler(tokenizer, request.stop)
        # Without anybody who reads along the text is made once, at the end.
        is_read = request.is_streamed or request.stop or request.num_top is not None
        self._unread: list[int] | None = None if is_read else []
        self._tokenizer = tokenizer
        self._text = ""
        self._told: list[TokenRecord] = []
        self._waiting: list[TokenRecord] = []

    def say(self, record: TokenRecord) -> None:
        """Take the next token."""
        self.last = record.token
        self.num_tokens += 1
        is_end = record.token in self._end_ids or record.token in self.request.end_ids
        if self.request.tells_ids:
            self._told.append(record)
            if is_end or self.num_tokens == self.request.max_tokens:
                self.finish_reason = "stop" if is_end else "length"
            return
        if is_end:
            self._end("stop")
            return
        if self._unread is not None:
            self._unread.append(record.token)
        else:
            certain = self._texts.push(record.token)
            if self.request.num_top is not None:
                self._waiting.append(record)
            self._tell(certain)
        if self._texts.is_stopped:
            self._waiting = []
            self.finish_reason = "stop"
        elif self.num_tokens == self.request.max_tokens:
            self._end("length")

    def fail(self, error: str) -> None:
        """Give up."""
        self.finish_reason, self.error = "error", error

    def _end(self, reason: FinishReason) -> None:
        if self._unread is not None:
            self._text = self._tokenizer.decode(self._unread, skip_special_tokens=True)
        else:
            self._tell(self._texts.finish(), is_last=True)
        self.finish_reason = "stop" if self._texts.is_stopped else reason

    def _tell(self, text: str, *, is_last: bool = False) -> None:
        self._text += text
        if text or is_last:
            self._told += self._waiting
            self._waiting = []

    def take_progress(self) -> Progress | None:
        """What is to be told now, if anything."""
        if not self.request.is_streamed and self.finish_reason is None:
            return None
        if not (self._text or self._told or self.finish_reason):
            return None
        told = Progress(
            self.request,
            self.index,
            self._text,
            tuple(self._told),
            self.num_tokens,
            self.finish_reason,
            self.error,
        )
        self._text, self._told = "", []
        return told


class TextAssembler:
    """Turns tokens into text that will not change any more.

    Text is kept back while it may be the beginning of a stop text, or part of a character whose
    other bytes are yet to come.

    Attributes
    ----------
    is_stopped : bool
        Whether a stop text was said; nothing after it is told.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = [text for text in stop if text]
        self.is_stopped = False
        self._ids: list[int] = []
        self._first, self._read = 0, 0
        self._pending = ""

    def push(self, token: int) -> str:
        """The text that became certain with a token."""
        self._ids.append(token)
        # What a token adds may depend on the one before it (spaces), and on no earlier one.
        before = self._decode(self._ids[self._first : self._read])
        now = self._decode(self._ids[self._first :])
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return ""
        self._first, self._read = self._read, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """What was still kept back, where the answer ends without a stop text."""
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
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if places:
            self.is_stopped, self._pending = True, ""
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self.stop), default=0)
        self._pending = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop text."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
