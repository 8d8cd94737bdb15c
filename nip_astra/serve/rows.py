"""One answer while it is being said."""

from __future__ import annotations

from typing import Any

import torch

from nip_astra.serve.generation import FinishReason, GenerationRequest, Progress, TokenRecord
from nip_astra.serve.texts import TextAssembler
from nip_astra.utils.seeding import derived_generator


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
