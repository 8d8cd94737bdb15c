"""OpenEnv servers that misbehave, and a stand-in for its client where it is not installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.kit.misbehaving import HEAD, PAUSE, Send, raw, reply, reset, silence

SCHEMA: dict[str, Any] = {
    "action": {"title": "Say", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    "observation": {"properties": {"hint": {"type": "string"}, "done": {"type": "boolean"}}},
}
"""A server's valid answer to /schema."""
WRONG, LOST = "ConfigurationError", "ServiceUnreachableError"


def _schema(**parts: Any) -> Send:
    return reply(json.dumps(SCHEMA | parts))


SCHEMAS: dict[str, tuple[Send, str]] = {
    "status 404": (reply("no", 404), WRONG),
    "status 500": (reply("no", 500), WRONG),
    "status 204": (reply("", 204), WRONG),
    "a redirect without end": (reply("", 302, headers={"Location": "/schema"}), WRONG),
    "a redirect to a file": (reply("", 302, headers={"Location": "file:///etc/hosts"}), WRONG),
    "nothing": (reply(""), WRONG),
    "html": (reply("<html>"), WRONG),
    "half": (reply(json.dumps(SCHEMA)[:-9]), WRONG),
    "no text": (reply(b"\xff\xfe\x00" * 9), WRONG),
    "null": (reply("null"), WRONG),
    "a list": (reply("[1]"), WRONG),
    "very deep": (reply("[" * 100_000), WRONG),
    "no observation": (reply(json.dumps({"action": SCHEMA["action"]})), WRONG),
    "action null": (_schema(action=None), WRONG),
    "action a text": (_schema(action="Say"), WRONG),
    "properties a list": (_schema(action={"properties": ["text"]}), WRONG),
    "properties of texts": (_schema(action={"properties": {"text": "string"}}), WRONG),
    "properties null": (_schema(observation={"properties": None}), WRONG),
    "anyOf a number": (_schema(observation={"properties": {"hint": {"anyOf": 3}}}), WRONG),
    "anyOf of texts": (_schema(observation={"properties": {"hint": {"anyOf": ["a"]}}}), WRONG),
    "required a number": (_schema(action=SCHEMA["action"] | {"required": 3}), WRONG),
    "required of lists": (_schema(action=SCHEMA["action"] | {"required": [[]]}), WRONG),
    "an action without texts": (_schema(action={"properties": {}}), WRONG),
    "endless": (raw(HEAD + b"\r\n", b" " * 2**16, is_endless=True), WRONG),
    "announces 3 GB": (raw(HEAD + b"Content-Length: 3221225472\r\n\r\n"), WRONG),
    "not HTTP": (raw(bytes(range(256)) * 9), LOST),
    "ends at once": (raw(b""), LOST),
    "ends in the body": (raw(HEAD + b"Content-Length: 99\r\n\r\n{"), LOST),
    "a reset": (reset, LOST),
    "silence": (silence, LOST),
    "drips": (raw(HEAD + b"Content-Length: 999\r\n\r\n", b" ", drips=True, is_endless=True), LOST),
}
"""Answers to /schema, each with the error that ends the start of the run."""


def _frame(data: Any, kind: str = "observation") -> str:
    return json.dumps({"type": kind, "data": data})


RIGHT_FRAME = _frame({"observation": {"hint": "go on"}, "reward": 0.5, "done": False})
LAST_FRAME = _frame({"observation": {"hint": "well done"}, "reward": 1.0, "done": True})
MALFORMED, LOST_EPISODE, NO_END = "malformed", "lost", ""
FRAMES: dict[str, tuple[str | bytes | None, str]] = {
    "nothing": ("", MALFORMED),
    "html": ("<html>", MALFORMED),
    "half": (RIGHT_FRAME[:-9], MALFORMED),
    "very deep": ("[" * 100_000, MALFORMED),
    "null": ("null", MALFORMED),
    "a list": ("[1, 2]", MALFORMED),
    "a number": ("3", MALFORMED),
    "data null": (_frame(None), MALFORMED),
    "data a list": (_frame([1]), MALFORMED),
    "data a text": (_frame("go on"), MALFORMED),
    "no data": ('{"type": "observation"}', MALFORMED),
    "no observation": (_frame({"reward": 1.0, "done": False}), MALFORMED),
    "observation null": (_frame({"observation": None}), MALFORMED),
    "observation a text": (_frame({"observation": "go on"}), MALFORMED),
    "observation a list": (_frame({"observation": ["go on"]}), MALFORMED),
    "observation without the text": (_frame({"observation": {"other": "x"}}), MALFORMED),
    "observation with a number": (_frame({"observation": {"hint": 3}}), MALFORMED),
    "observation with null": (_frame({"observation": {"hint": None}}), MALFORMED),
    "reward a text": (_frame({"observation": {"hint": "x"}, "reward": "0.5"}), MALFORMED),
    "reward a list": (_frame({"observation": {"hint": "x"}, "reward": [0.5]}), MALFORMED),
    "reward an object": (_frame({"observation": {"hint": "x"}, "reward": {}}), MALFORMED),
    "reward NaN": ('{"data": {"observation": {"hint": "x"}, "reward": NaN}}', MALFORMED),
    "reward infinite": ('{"data": {"observation": {"hint": "x"}, "reward": 1e999}}', MALFORMED),
    "reward enormous": (
        '{"data": {"observation": {"hint": "x"}, "reward": 1' + "0" * 400 + "}}",
        MALFORMED,
    ),
    "done a text": (_frame({"observation": {"hint": "x"}, "done": "false"}), MALFORMED),
    "done a number": (_frame({"observation": {"hint": "x"}, "done": 2}), MALFORMED),
    "an error without data": ('{"type": "error", "data": null}', MALFORMED),
    "an error with a list": ('{"type": "error", "data": [1]}', MALFORMED),
    "bytes": (b"\xff\xfe", MALFORMED),
    "done null": (_frame({"observation": {"hint": "x"}, "done": None}), NO_END),
    "reward null": (_frame({"observation": {"hint": "x"}, "reward": None}), NO_END),
    "more fields": (_frame({"observation": {"hint": "x", "more": [1]}, "more": 1}), NO_END),
    "silence": (None, LOST_EPISODE),
}
"""Answers to a step (None for none), each with the figure that counts the end of its episode."""


LONG_FRAME = _frame({"observation": {"hint": "x" * 3_000_000}})


class StandInClient:
    """Reads frames as `openenv.GenericEnvClient` does, without a server."""

    frames: dict[str, str | bytes | None]

    def __init__(self, *, base_url: str, message_timeout_s: float, **options: Any) -> None:
        self.timeout = message_timeout_s

    async def reset(self, seed: int) -> Any:
        return self._result("reset")

    async def step(self, action: dict[str, Any]) -> Any:
        return self._result("step")

    async def close(self) -> None:
        """There is no connection."""

    def _result(self, kind: str) -> Any:
        frame = self.frames[kind]
        if frame is None:
            raise TimeoutError
        response = json.loads(frame)
        if response.get("type") == "error":
            raise RuntimeError(f"Server error: {response.get('data', {}).get('message')}")
        data = response.get("data", {})
        return SimpleNamespace(
            observation=data.get("observation", {}),
            reward=data.get("reward"),
            done=data.get("done", False),
        )


def install_stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandInClient]:
    """Put the stand-in in place of the packages openenv and websockets."""
    client = type("Client", (StandInClient,), {"frames": {"reset": RIGHT_FRAME}})
    openenv, websockets = ModuleType("openenv"), ModuleType("websockets")
    exceptions = ModuleType("websockets.exceptions")
    openenv.GenericEnvClient = client  # type: ignore[attr-defined]
    exceptions.WebSocketException = type("WebSocketException", (Exception,), {})  # type: ignore[attr-defined]
    for module in (openenv, websockets, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return client


@contextmanager
def serving_frames(frame: str | bytes | None) -> Iterator[str]:
    """Serve sessions that answer a reset correctly and each step with a frame; yield the address.

    Needs the package websockets.
    """
    import threading

    from websockets.http11 import Request, Response
    from websockets.sync.server import ServerConnection, serve

    ended = threading.Event()

    def answer(connection: ServerConnection) -> None:
        for message in connection:
            kind = json.loads(message)["type"]
            if kind == "reset":
                connection.send(RIGHT_FRAME)
            elif frame is None:
                ended.wait(10)
            elif kind == "step":
                connection.send(frame, text=isinstance(frame, str))

    def answer_http(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        return connection.respond(200, json.dumps(SCHEMA))

    with serve(answer, "127.0.0.1", 0, process_request=answer_http) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join(PAUSE)
