"""HTTP clients that limit the size of responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from nip_astra.errors import AnswerTooLargeError, ConfigurationError

if TYPE_CHECKING:
    import httpx

MIB = 2**20
ENCODINGS = ("gzip", "deflate")
"""Accepted compressions, which expand by at most a factor of 1,000; nested or other ones may expand
without limit."""


def check_address(address: str, what: str) -> SplitResult:
    """The parts of an HTTP address.

    Raises
    ------
    ConfigurationError
        If it is invalid.
    """
    try:
        parts = urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not address.isascii() or not address.isprintable() or " " in address:
        raise ConfigurationError(
            f"{address!r} is not an HTTP address of {what}. Example: http://127.0.0.1:8000."
        )
    return parts


def bounded(base: type[httpx.AsyncClient], max_bytes: int) -> type[httpx.AsyncClient]:
    """A subclass of an HTTP client that raises if a response is longer than `max_bytes`.

    Without streaming: `send` returns the complete response.
    """
    import httpx

    class Bounded(base):  # type: ignore[valid-type, misc]  # a base that is known here alone
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.headers["Accept-Encoding"] = ", ".join(ENCODINGS)

        async def send(
            self, request: httpx.Request, *, stream: bool = False, **options: Any
        ) -> httpx.Response:
            answer = await super().send(request, stream=True, **options)
            try:
                content = await _read(answer, max_bytes)
            finally:
                await answer.aclose()
            kept = [
                (name, value)
                for name, value in answer.headers.multi_items()
                if name not in ("content-encoding", "content-length", "transfer-encoding")
            ]
            return httpx.Response(
                answer.status_code, headers=kept, content=content, request=request
            )

    return Bounded


async def _read(answer: httpx.Response, max_bytes: int) -> bytes:
    """The body, uncompressed.

    Raises
    ------
    AnswerTooLargeError
        As soon as the limit is exceeded.
    """
    encoding = answer.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", *ENCODINGS):
        raise AnswerTooLargeError(
            f"the answer is compressed as {encoding[:40]!r}; supported: {', '.join(ENCODINGS)}"
        )
    announced = answer.headers.get("content-length", "0")
    size = int(announced[:18]) if announced.isascii() and announced.isdigit() else 0
    pieces: list[bytes] = []
    if size <= max_bytes:
        size = 0
        async for piece in answer.aiter_bytes():
            size += len(piece)
            if size > max_bytes:
                break
            pieces.append(piece)
    if size > max_bytes:
        raise AnswerTooLargeError(f"the answer is longer than {max_bytes / MIB:g} MiB")
    return b"".join(pieces)
