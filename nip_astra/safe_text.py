"""Escaping of untrusted text of models, services and files for display.

Untrusted text may contain characters that control a terminal, change the writing direction, or are
invisible. For display each becomes a picture or its number; in JSON and YAML, which must decode to
the same text, its escape.
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any

# Order: C0 but tab and line feed, DEL and C1; soft hyphen, fillers and zero widths that hide text
# (the two joiners stay: scripts and emoji need them); line and paragraph separators; embeddings,
# overrides and isolates of direction; invisible operators; byte order mark; interlinear marks;
# halves of surrogate pairs; tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
_LINE_ENDS = re.compile("\r\n|[\n\v\f\r\x85\u2028\u2029]")


def safe_text(text: object) -> str:
    """Return a text whose control characters are replaced by visible ones.

    Line feeds and tabs stay. Other C0 controls become their pictures (ESC is U+241B); the rest
    become their numbers, U+202E as backslash, u and 202e.
    """
    return _UNSAFE.sub(_picture, str(text))


def safe_line(text: object) -> str:
    """Return `safe_text` in one line: an end of line becomes the sign U+23CE."""
    return safe_text(_LINE_ENDS.sub("\N{RETURN SYMBOL}", str(text)).replace("\t", " "))


def to_json(value: Any, **options: Any) -> str:
    """Return JSON that is safe to show and decodes to the same texts."""
    return _UNSAFE.sub(_escape, json.dumps(value, ensure_ascii=False, **options))


def valid_text(text: str) -> str:
    """Return a text that can be encoded: half of a surrogate pair becomes U+FFFD, as in decoders.

    Tokenizers, arrays of strings and UTF-8 files refuse such halves.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def has_unsafe(text: str) -> bool:
    """Return whether `safe_text` would replace a character of the text."""
    return _UNSAFE.search(text) is not None


def escape_for_yaml(text: str) -> str:
    """Escape unsafe characters in YAML, which must be in double quotes."""
    return _UNSAFE.sub(lambda found: _number(found[0]), text)


class SafeFormatter(logging.Formatter):
    """Formats records so that a message cannot control the terminal or imitate further records."""

    def format(self, record: logging.LogRecord) -> str:
        first, *others = safe_text(super().format(record)).split("\n")
        return "\n".join([first, *(f"    {line}" for line in others)])


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return _number(found[0])


def _number(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _escape(found: re.Match[str]) -> str:
    # json.dumps knows which of them take two escapes.
    return json.dumps(found[0])[1:-1] if found[0] != "\x7f" else "\\u007f"
