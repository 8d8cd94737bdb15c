"""Reading of text that arrives in pieces: each character is looked at once, however small they are.

A reader is a generator: it yields where it needs more text, and returns its result. The same reader
serves a whole message and a stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple, TypeAlias, TypeVar, cast

from nip_astra.language_models.sequences import overlap

Result = TypeVar("Result")
Reader: TypeAlias = Generator[None, None, Result]
"""Yields where more text is needed, and returns its result."""


class MalformedTextError(ValueError):
    """The text is not of the expected form; a reader of the form raises it."""


class Notation(NamedTuple):
    """How values are written, as far as needed to find their end.

    Attributes
    ----------
    quotes : tuple of str
        Texts that begin a string; the same text ends it.
    has_escapes : bool
        Whether a backslash takes the next character into the string.
    ends_before : str
        Characters of which one follows the end of a string, so that a quote within it does not end
        it; empty if the first quote does.
    foreign : str
        Pattern of a character that no value has outside of strings.
    breaks : tuple of str
        Texts that no value has outside of strings.
    """

    quotes: tuple[str, ...]
    has_escapes: bool = True
    ends_before: str = ""
    foreign: str = "(?!)"
    breaks: tuple[str, ...] = ()


JSON = Notation(('"',), foreign=r"[^\s\d.,:+\-eEtrufalsn]")


class TextCursor:
    """A text that arrives in pieces, and the position up to which it is read."""

    def __init__(self, text: str = "", *, is_whole: bool = False) -> None:
        self._text = text
        self._position = 0
        self._is_whole = is_whole
        self._record: list[str] | None = None

    def feed(self, piece: str) -> None:
        """Add a piece of text."""
        # What is read is dropped, or a long message would be copied at each piece.
        self._text = self._text[self._position :] + piece
        self._position = 0

    def close(self) -> None:
        """Declare that no further text follows."""
        self._is_whole = True

    @property
    def is_at_end(self) -> bool:
        """Whether everything is read, and nothing follows."""
        return self._is_whole and self._position == len(self._text)

    def start_record(self) -> None:
        """Record what is read from here."""
        self._record = []

    def stop_record(self) -> str:
        """Return the text that was read since `start_record`."""
        recorded = "".join(self._record or ())
        self._record = None
        return recorded

    def put_back(self, text: str) -> None:
        """Read a text again that was read last."""
        self.feed("")
        self._text = text + self._text

    def _take(self, end: int) -> str:
        """Read up to a position."""
        text = self._text[self._position : end]
        self._position = end
        if self._record is not None:
            self._record.append(text)
        return text

    def scan(self, marks: tuple[str, ...], sink: Callable[[str], object]) -> Reader[str]:
        """Send the text before the first of some marks to `sink`, in pieces.

        Returns the mark, which is read too, or the empty text at the end.
        """
        pattern = _compile_alternatives(marks)
        longest = max(map(len, marks), default=0)
        while True:
            match = pattern.search(self._text, self._position) if marks else None
            if match is not None:
                sink(self._take(match.start()))
                return self._take(match.end())
            if self._is_whole:
                sink(self._take(len(self._text)))
                return ""
            # A mark may begin in the last characters and end in the next piece.
            tail_start = max(self._position, len(self._text) - longest)
            tail = self._text[tail_start:]
            num_held = max((overlap(tail, mark) for mark in marks), default=0)
            sink(self._take(len(self._text) - num_held))
            yield

    def take_until(self, *marks: str, max_length: int | None = None) -> Reader[str]:
        """Read up to the first of some marks, and the mark; return the text before it.

        Raises `MalformedTextError` if the text ends, or is longer than `max_length`, before a mark.
        """
        parts: list[str] = []
        length = 0

        def collect(part: str) -> None:
            nonlocal length
            parts.append(part)
            length += len(part)
            if max_length is not None and length > max_length:
                raise MalformedTextError(f"no {' or '.join(marks)} within {max_length} characters")

        mark = yield from self.scan(marks, collect)
        if not mark:
            raise MalformedTextError(f"no {' or '.join(marks)} before the end")
        return "".join(parts)

    def take_rest(self) -> Reader[str]:
        """Read everything up to the end."""
        parts: list[str] = []
        yield from self.scan((), parts.append)
        return "".join(parts)

    def skip_space(self) -> Reader[str]:
        """Read whitespace, and return it."""
        parts: list[str] = []
        while True:
            match = SPACE.match(self._text, self._position)
            assert match is not None
            parts.append(self._take(match.end()))
            if self._position < len(self._text) or self._is_whole:
                return "".join(parts)
            yield

    def peek(self, num_characters: int) -> Reader[str]:
        """Return the next characters without reading them; fewer at the end."""
        while len(self._text) - self._position < num_characters and not self._is_whole:
            yield
        return self._text[self._position : self._position + num_characters]

    def take_word(self) -> Reader[str]:
        """Read a name; raise `MalformedTextError` if none comes next."""
        word = ""
        while True:
            match = _NAME_PART.match(self._text, self._position)
            assert match is not None
            word += self._take(match.end())
            has_ended = self._position < len(self._text) or self._is_whole
            if has_ended or len(word) > _MAX_NAME_LENGTH:
                break
            yield
        if not 0 < len(word) <= _MAX_NAME_LENGTH:
            raise MalformedTextError(f"{word[:80]!r} is no name")
        return word

    def accept(self, mark: str) -> Reader[bool]:
        """Read a mark if it comes next; return whether it did."""
        while True:
            available = self._text[self._position : self._position + len(mark)]
            if available == mark:
                self._take(self._position + len(mark))
                return True
            if self._is_whole or not mark.startswith(available):
                return False
            yield

    def expect(self, mark: str) -> Reader[None]:
        """Read a mark; raise `MalformedTextError` if something else comes next."""
        is_next = yield from self.accept(mark)
        if not is_next:
            raise MalformedTextError(f"{mark!r} is missing")

    def take_balanced(self, notation: Notation = JSON) -> Reader[str]:
        """Read a bracket up to its partner, past brackets within strings; return all of it.

        Raises `MalformedTextError` if the text ends before, or has outside of strings what the
        notation does not have there. That is not read.
        """
        parts: list[str] = []
        num_open = 0
        # The mark that ends the current string; empty outside of strings.
        quote = ""
        while True:
            if quote:
                pattern = end_of_string(quote, notation)
            else:
                pattern = _pattern_outside_strings(notation)
            match = pattern.search(self._text, self._position)
            if match is None:
                end = len(self._text) - self._count_undecided(quote, notation)
                parts.append(self._take(end))
                if self._is_whole:
                    self._take(len(self._text))
                    raise MalformedTextError("it is not complete")
                yield
                continue
            symbol = match[0]
            if quote:
                parts.append(self._take(match.end()))
                is_escape = symbol.startswith("\\")
                if not is_escape:
                    quote = ""
            elif symbol in notation.quotes:
                parts.append(self._take(match.end()))
                quote = symbol
            elif symbol in tuple(_BRACKETS):
                parts.append(self._take(match.end()))
                num_open += 1 if symbol in "([{" else -1
                if num_open <= 0:
                    return "".join(parts)
            else:
                self._take(match.start())
                raise MalformedTextError(f"{symbol!r} is outside of a string")

    def _count_undecided(self, quote: str, notation: Notation) -> int:
        """Return the number of last characters whose meaning depends on what follows."""
        tail = self._text[self._position :]
        if not quote:
            return max(overlap(tail, mark) for mark in (*notation.quotes, *notation.breaks))
        if notation.ends_before:
            # Only the character after a quote and spaces shows whether the string ends there.
            quote_at_end = re.search(re.escape(quote) + r"\s*\Z", tail)
            if quote_at_end is not None:
                return len(tail) - quote_at_end.start()
        num_backslashes = len(tail) - len(tail.rstrip("\\"))
        if notation.has_escapes and num_backslashes % 2:
            # The last one escapes the next character.
            return 1
        return overlap(tail, quote)


_NAME_PART = re.compile(r"[\w./-]*")
_MAX_NAME_LENGTH = 200
_BRACKETS = "()[]{}"
SPACE = re.compile(r"\s*")


@cache
def _compile_alternatives(marks: tuple[str, ...]) -> re.Pattern[str]:
    # The longest first, since a mark may begin with another.
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


@cache
def _pattern_outside_strings(notation: Notation) -> re.Pattern[str]:
    """Return the pattern of what has a meaning outside of strings, or may not be there."""
    marks = [re.escape(mark) for mark in (*notation.quotes, *notation.breaks, *_BRACKETS)]
    return re.compile("|".join([*marks, notation.foreign]))


@cache
def end_of_string(quote: str, notation: Notation) -> re.Pattern[str]:
    """Return the pattern of a string's end, or of an escape within it (a backslash first)."""
    end = re.escape(quote)
    if notation.ends_before:
        end += rf"(?=\s*[{re.escape(notation.ends_before)}])"
    return re.compile(rf"\\.|{end}" if notation.has_escapes else end, re.DOTALL)


def read_whole(reader: Reader[Result]) -> Result:
    """Return the result of a reader of a text that is whole."""
    try:
        next(reader)
    except StopIteration as end:
        return cast("Result", end.value)
    raise AssertionError("a reader of a whole text waits for more")
