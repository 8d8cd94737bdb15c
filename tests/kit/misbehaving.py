"""Servers that misbehave in more than 100 ways, with the valid outcomes of a request to each."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PAUSE = 0.02
"""Seconds between the pieces of an answer that drips."""
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
Send = Callable[[socket.socket], None]


@dataclass(frozen=True)
class Misbehaviour:
    """A server's behaviour on every request, and the client's possible outcomes."""

    send: Send
    outcomes: tuple[str, ...]
    """Each the text of an answer after "says ", a `FailureReason`, or the name of an error."""


def reply(
    body: bytes | str = b"", status: int = 200, *, headers: dict[str, str] | None = None
) -> Send:
    """A complete answer with any content.

    It closes its connection: a client that sent its next attempt over one that is being closed
    would see a lost connection instead of this answer.
    """
    content = body.encode() if isinstance(body, str) else body
    given = {"Content-Type": "application/json", "Content-Length": str(len(content))}
    given["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in (given | (headers or {})).items())
    whole = f"HTTP/1.1 {status} Reason\r\n{lines}\r\n".encode() + content
    return lambda connection: connection.sendall(whole)


def raw(*pieces: bytes, drips: bool = False, is_endless: bool = False) -> Send:
    """Raw bytes, at once or one by one, then again from the last piece."""

    def send(connection: socket.socket) -> None:
        for piece in pieces:
            for part in [bytes([one]) for one in piece] if drips else [piece]:
                connection.sendall(part)
                if drips:
                    time.sleep(PAUSE)
        while is_endless:
            connection.sendall(pieces[-1])
            if drips:
                time.sleep(PAUSE)

    return send


def reset(connection: socket.socket) -> None:
    """End the connection with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def silence(connection: socket.socket) -> None:
    """Send nothing, and keep the connection for as long as the client does."""
    connection.settimeout(10)
    connection.recv(1)


def choice(message: Any, **more: Any) -> Send:
    """A completion with one choice."""
    return reply(json.dumps({"choices": [{"index": 0, "message": message, **more}]}))


def with_content(content: Any, **more: Any) -> Send:
    """A completion with one message of some content."""
    return choice({"role": "assistant", "content": content, **more})


def completion(**fields: Any) -> Send:
    """A correct completion with other fields."""
    message = {"role": "assistant", "content": "hi"}
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    return reply(json.dumps(whole | fields))


def compressed(encoding: str, content: bytes) -> Send:
    return reply(content, headers={"Content-Encoding": encoding})


RIGHT = json.dumps({"choices": [{"message": {"role": "assistant", "content": "hi"}}]}).encode()
_PACKER = zlib.compressobj(1, wbits=31)
# In parts, since tests measure the peak memory of the process.
BOMB = b"".join([_PACKER.compress(b" " * 2**20) for _ in range(128)]) + _PACKER.flush()
"""128 MiB in 600 KB."""
SAYS_HI, EMPTY = ("says hi",), ("says ",)
LOST, WRONG, LATE, LONG = ("unavailable",), ("malformed",), ("timeout",), ("too_long",)
NO, REFUSED, POOR = ("ConfigurationError",), ("refused",), ("BudgetExhaustedError",)
BUSY, SLOW = ("rate_limited",), (*LONG, *LATE)


def _statuses() -> Iterator[tuple[str, Misbehaviour]]:
    by_outcome = {
        NO: (300, 301, 302, 303, 307, 308, 401, 403, 404, 405),
        REFUSED: (400, 406, 410, 411, 412, 413, 414, 415, 417, 418, 421, 422, 423, 424, 426, 428),
        POOR: (402,),
        LOST: (408, 409, 425, 500, 501, 502, 503, 504, 505, 507, 508, 511, 520, 529, 599),
        BUSY: (429,),
    }
    for outcomes, statuses in by_outcome.items():
        for status in statuses:
            yield f"status {status}", Misbehaviour(reply("no", status), outcomes)
    for status in (204, 205, 206, 299):
        yield f"status {status}", Misbehaviour(reply("", status), (*WRONG, *LOST))
    yield "status 999", Misbehaviour(reply("no", 999), (*LOST, *WRONG))
    yield "status that is not a number", Misbehaviour(raw(b"HTTP/1.1 abc Reason\r\n\r\n"), LOST)
    for wait in ("100000", "1e9", "inf", "nan", "-5", "", "soon", "9" * 400, "1e309"):
        name = f"retry-after {wait[:9]}"
        yield name, Misbehaviour(reply("no", 429, headers={"Retry-After": wait}), BUSY)
        yield f"503 {name}", Misbehaviour(reply("no", 503, headers={"Retry-After": wait}), LOST)
    date = {"Retry-After": "Fri, 31 Dec 2100 23:59:59 GMT"}
    yield "retry-after a date", Misbehaviour(reply("no", 429, headers=date), BUSY)
    quota = json.dumps({"error": {"code": "insufficient_quota", "message": "pay"}})
    for name, message in {
        "OpenAI": "This model's maximum context length is 9 tokens. Reduce the length.",
        "llama.cpp": "the request exceeds the available context size, try increasing it",
        "Anthropic": "prompt is too long: 9 tokens > 8 maximum",
    }.items():
        error = json.dumps({"error": {"message": message}})
        yield f"no room: {name}", Misbehaviour(reply(error, 400), ("context_length",))
    filtered = json.dumps({"error": {"code": "content_filter", "message": "no"}})
    yield "a filter refuses the prompt", Misbehaviour(reply(filtered, 400), EMPTY)
    field = json.dumps({"error": {"message": "max_tokens is unsupported; max_completion_tokens"}})
    yield "neither name of the limit", Misbehaviour(reply(field, 400), REFUSED)
    yield "nothing left to spend", Misbehaviour(reply(quota, 429), POOR)
    yield "a redirect to itself", Misbehaviour(reply("", 302, headers={"Location": "/"}), NO)


def _contents() -> Iterator[tuple[str, Misbehaviour]]:
    for name, body in {
        "nothing": b"",
        "half": RIGHT[:-9],
        "html": b"<html><body>Welcome</body></html>",
        "events": b'data: {"choices": []}\n\ndata: [DONE]\n\n',
        "null": b"null",
        "a list": b"[1, 2]",
        "an empty object": b"{}",
        "an error in a 200": b'{"error": {"message": "no"}}',
        "deep and closed": b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "a large number": b'{"choices": ' + b"9" * 10_000 + b"}",
        "NaN": b'{"choices": NaN}',
        "no text at all": b"\xff\xfe\x00\x80" * 9,
        "choices null": b'{"choices": null}',
        "no choices": b'{"choices": []}',
        "a choice null": b'{"choices": [null]}',
        "a choice of another type": b'{"choices": [[[]]]}',
        "two bodies": RIGHT + RIGHT,
    }.items():
        yield f"body: {name}", Misbehaviour(reply(body), WRONG)
    yield "body: a BOM before it", Misbehaviour(reply(b"\xef\xbb\xbf" + RIGHT), (*WRONG, *SAYS_HI))
    wide = reply(RIGHT.decode().encode("utf-16"))
    yield "body: UTF-16", Misbehaviour(wide, (*WRONG, *SAYS_HI))
    for name, message in {"null": None, "a text": "hi", "a list": [], "empty": {}}.items():
        yield f"message: {name}", Misbehaviour(choice(message), WRONG)
    for name, content in {
        "null": None,
        "a number": 3,
        "true": True,
        "an object": {},
        "an empty list": [],
        "a list of texts": ["hi"],
        "a list of images": [{"type": "image_url", "image_url": {"url": "x"}}],
        "parts of no type": [{"text": "hi"}],
        "parts within parts": [{"type": "thinking", "thinking": [{"type": "thinking"}]}],
    }.items():
        yield f"content: {name}", Misbehaviour(with_content(content), WRONG)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    yield "content: parts", Misbehaviour(with_content(parts), SAYS_HI)
    odd = [{"type": "text", "text": ["hi"]}, {"type": "text", "text": "hi"}]
    yield "content: a part with a list", Misbehaviour(with_content(odd), SAYS_HI)
    for name, reasoning in {"null": None, "a list": [1], "a number": 3, "empty": ""}.items():
        strange = choice({"content": "hi", "reasoning_content": reasoning, "reasoning": reasoning})
        yield f"reasoning: {name}", Misbehaviour(strange, SAYS_HI)
    yield "30 MB of text", Misbehaviour(with_content("word " * 6_000_000), LONG)
    yield "400 KB of text", Misbehaviour(with_content("word " * 80_000), LONG)
    yield "30 MB of reasoning", Misbehaviour(choice({"reasoning": "so " * 10_000_000}), LONG)
    cut = choice({"content": None}, finish_reason="length")
    yield "cut before the first word", Misbehaviour(cut, EMPTY)
    yield "content: empty", Misbehaviour(with_content(""), EMPTY)
    calls = with_content(
        None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    )
    yield "only calls of tools", Misbehaviour(calls, EMPTY)
    for name, call in {
        "null": None,
        "an object": {},
        "of nulls": [None],
        "of nothing": [{"function": None}],
        "without a name": [{"function": {"arguments": "{}"}}],
        "of half an object": [{"function": {"name": "f", "arguments": '{"a": '}}],
        "with a list": [{"function": {"name": "f", "arguments": "[1]"}}],
        "very deep": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
    }.items():
        yield f"calls: {name}", Misbehaviour(with_content(None, tool_calls=call), WRONG)
    yield "a refusal", Misbehaviour(with_content(None, refusal="I cannot"), EMPTY)
    yield "a refusal of another type", Misbehaviour(with_content("hi", refusal=[1]), SAYS_HI)
    for name, finish in {"null": None, "new": "tired", "a number": 3, "a list": ["stop"]}.items():
        message = {"role": "assistant", "content": "hi"}
        yield f"finish: {name}", Misbehaviour(choice(message, finish_reason=finish), SAYS_HI)
    for name, usage in {
        "null": None,
        "a list": [],
        "negative": {"prompt_tokens": -1, "completion_tokens": -1},
        "enormous": {"prompt_tokens": 10**30, "completion_tokens": 10**30},
        "broken": {"prompt_tokens": 1.5, "completion_tokens": "many"},
        "true": {"prompt_tokens": True, "completion_tokens": True},
    }.items():
        yield f"usage: {name}", Misbehaviour(completion(usage=usage), SAYS_HI)
    for name, logprobs in {
        "a list": [],
        "of texts": {"content": [{"logprob": "low"}]},
        "infinite": {"content": [{"logprob": -1e400}]},
        "of nulls": {"content": [None]},
    }.items():
        message = {"role": "assistant", "content": "hi"}
        yield f"logprobs: {name}", Misbehaviour(choice(message, logprobs=logprobs), SAYS_HI)
    many = json.dumps({"choices": json.loads(RIGHT)["choices"] * 50})
    yield "more choices than samples", Misbehaviour(reply(many), SAYS_HI)


def _transfers() -> Iterator[tuple[str, Misbehaviour]]:
    length = b"Content-Length: %d\r\n\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    cut = (*LOST, *WRONG)
    for name, send, outcomes in (
        ("no answer", silence, LATE),
        ("connection ends at once", raw(b""), LOST),
        ("reset", reset, LOST),
        ("ends after the status", raw(b"HTTP/1.1 200 OK\r\n"), LOST),
        ("ends in the body", raw(HEAD + length % len(RIGHT) + RIGHT[:9]), LOST),
        ("ends in a chunk", raw(HEAD + chunked + b"50\r\n" + RIGHT[:9]), LOST),
        ("chunk of a wrong size", raw(HEAD + chunked + b"zz\r\nhi\r\n0\r\n\r\n"), LOST),
        ("chunk of an enormous size", raw(HEAD + chunked + b"f" * 40 + b"\r\nhi"), LOST),
        ("no length, and an end", raw(HEAD + b"Connection: close\r\n\r\n" + RIGHT), SAYS_HI),
        ("shorter than it says", raw(HEAD + length % 10**6 + RIGHT), (*LOST, *LONG)),
        ("longer than it says", raw(HEAD + length % 9 + RIGHT), cut),
        ("negative length", raw(HEAD + b"Content-Length: -5\r\n\r\n" + RIGHT), cut),
        ("two lengths", raw(HEAD + b"Content-Length: 5\r\n" + length % 9 + RIGHT), cut),
        ("announces 3 GB", raw(HEAD + length % (3 * 2**30), b" " * 2**16, is_endless=True), LONG),
        ("HTTP/0.9", raw(b"<html>hello</html>\r\n"), LOST),
        ("TLS", raw(b"\x15\x03\x01\x00\x02\x02\x46"), LOST),
        ("noise", raw(bytes(range(256)) * 40), LOST),
        ("a header with a NUL", raw(HEAD + b"X: a\x00b\r\n" + length % 2 + b"{}"), cut),
        ("a long header", raw(HEAD + b"X: " + b"x" * 300_000 + b"\r\n\r\n"), LOST),
        ("endless headers", raw(HEAD, b"X: y\r\n" * 999, is_endless=True), LOST),
        ("endless 100 Continue", raw(b"HTTP/1.1 100 Go\r\n\r\n" * 99, is_endless=True), LATE),
        ("endless body", raw(HEAD + b"\r\n", b" " * 2**16, is_endless=True), LONG),
        ("endless chunks", raw(HEAD + chunked, b"4\r\n    \r\n" * 9999, is_endless=True), SLOW),
        ("headers drip", raw(HEAD, b"X", drips=True, is_endless=True), LATE),
        ("body drips", raw(HEAD + length % 10**6, b" ", drips=True, is_endless=True), LONG),
        ("chunks drip", raw(HEAD + chunked, b"1\r\n \r\n", drips=True, is_endless=True), LATE),
        ("error drips", raw(b"HTTP/1.1 500 No\r\n\r\n", b" ", drips=True, is_endless=True), LATE),
        ("gzip", compressed("gzip", gzip.compress(RIGHT)), SAYS_HI),
        ("deflate", compressed("deflate", zlib.compress(RIGHT)), SAYS_HI),
        ("gzip that is none", compressed("gzip", RIGHT), cut),
        ("gzip that ends early", compressed("gzip", gzip.compress(RIGHT)[:-20]), cut),
        ("gzip bomb", compressed("gzip", BOMB), LONG),
        ("gzip in gzip", compressed("gzip, gzip", gzip.compress(BOMB)), LONG),
        ("brotli bomb", compressed("br", b"\x00" * 999), LONG),
        ("unknown encoding", compressed("odd", RIGHT), LONG),
    ):
        yield name, Misbehaviour(send, outcomes)


MISBEHAVIOURS: dict[str, Misbehaviour] = {
    name: one for group in (_statuses(), _contents(), _transfers()) for name, one in group
}


@dataclass
class Misbehaving:
    """A server that treats every request alike."""

    address: str
    num_requests: int = 0
    connections: list[socket.socket] = field(default_factory=list)


@contextmanager
def misbehaving(send: Send) -> Iterator[Misbehaving]:
    """Serve on the loopback interface within the block."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = Misbehaving(f"http://127.0.0.1:{listening.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        try:
            connection.settimeout(10)
            _read_request(connection)
            server.num_requests += 1
            send(connection)
            if send is not reset:
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(0.2)
                while connection.recv(2**16):
                    pass
        except (OSError, ValueError):
            # The client closed the connection.
            pass
        finally:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            server.connections.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        # Closing alone would not wake the accepting thread.
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in server.connections:
            connection.close()
        thread.join()


def _read_request(connection: socket.socket) -> None:
    """Read a whole request, so that an end is not a reset."""
    content = b""
    while b"\r\n\r\n" not in content:
        piece = connection.recv(2**16)
        if not piece:
            raise ValueError("the client sent no request")
        content += piece
    head, _, body = content.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = int(lengths[0].partition(b":")[2]) if lengths else 0
    while len(body) < size:
        body += connection.recv(2**16)
