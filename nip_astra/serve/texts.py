"""The text of an answer as its tokens come, up to the first of its stop texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"


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
