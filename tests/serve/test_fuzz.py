"""Thousands of malformed requests: each ends in a JSON error, and the service survives."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from nip_astra.serve import http_routes
from nip_astra.serve.settings import TrainingProtocol
from nip_astra.serve.tinker import routes as tinker_routes
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.serve.fuzzing import (
    CHATS,
    SECONDS,
    Fuzzed,
    FuzzedTexts,
    FuzzedTinker,
    FuzzedTraining,
    damaged,
)
from tests.serve.running import Running, running, training_server

RIGHT = {name: CHATS["plain"][name] for name in ("model", "messages", "max_tokens")}


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("bytes")
    make_language_model(folder, window=512, tokenizer=make_byte_tokenizer())
    models = {"tiny": str(tiny_model_dir), "bytes": str(folder)}
    with running(models, max_answers=8, max_body_bytes=20_000) as service:
        yield service


BODY = json.dumps(RIGHT).encode()
LINE, LENGTH = b"POST /v1/chat/completions HTTP/1.1", f"Content-Length: {len(BODY)}".encode()
HTTP = LINE + b"\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" + LENGTH + b"\r\n\r\n"
LINES = (b"", b"hello", b"POST", b"\x16\x03\x01\x02", b"GET / HTTP/9.9", b"GET  / HTTP/1.1")
LENGTHS = (b"-1", b"x", b"9" * 30, b"1, 2", b"")
HEADERS = (b"Content-Length: 3", b"no colon", b": x", b"\x00: y", b"X: " + b"a" * 200_000)
CHUNKS = (b"zz\r\n", b"5\r\nab", b"-1\r\n\r\n", BODY)
BROKEN = [
    *(HTTP.replace(LINE, line) + BODY for line in LINES),
    *(HTTP.replace(LENGTH, b"Content-Length: " + length) + BODY for length in LENGTHS),
    *(HTTP.replace(LENGTH, LENGTH + b"\r\n" + header) + BODY for header in HEADERS),
    *(HTTP.replace(LENGTH, b"Transfer-Encoding: chunked") + chunk for chunk in CHUNKS),
    *(HTTP.replace(LENGTH, b"Transfer-Encoding: " + kind) + BODY for kind in (b"gzip", b"x")),
]
"""Requests whose line, headers or framing are wrong."""


def exchange(service: Running, sent: bytes) -> bytes:
    """The service's complete response to some bytes."""
    host, _, port = service.root.removeprefix("http://").partition(":")
    response = b""
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(sent)
        with suppress(OSError):  # it may already have been refused and closed
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            response += part
    return response


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_broken_http_ends_in_json_errors(
    service: Running, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    chance = random.Random(count)
    requests = [*BROKEN, *(damaged(HTTP + BODY, chance) for _ in range(count))]
    num_refused = 0
    for request in requests:
        response = exchange(service, request)
        # Half a request is answered by closing the connection, and two requests by two answers.
        while response:
            head, _, response = response.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body, response = response[:length], response[length:]
            if int(head.split(b" ", 2)[1]) >= 400:
                error = json.loads(body)["error"]
                assert set(error) == {"message", "type", "param", "code"}, (request, body)
                num_refused += 1
    assert num_refused > len(requests) / 3
    faults = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not faults, "no fault of the service"
    alive = httpx.post(service.root + "/v1/chat/completions", json=RIGHT)
    assert alive.status_code == 200


COUNTS = pytest.mark.parametrize(
    ("count", "seed"), [(100, 0), pytest.param(3400, 1, marks=pytest.mark.slow)]
)


@pytest.mark.parametrize(("kind", "fuzzed"), [("http", FuzzedTraining), ("tinker", FuzzedTinker)])
@COUNTS
def test_malformed_requests_to_any_route_for_training_end_in_json_errors(
    kind: TrainingProtocol,
    fuzzed: type[Fuzzed],
    count: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("tinker")
    monkeypatch.setattr(http_routes, "SECONDS_TO_WAIT", 1.0)
    monkeypatch.setattr(tinker_routes, "SECONDS_TO_WAIT", 1.0)
    limits: dict[str, Any] = {"max_training_models": 10**6, "max_message_bytes": 50_000_000}
    with httpx.Client(timeout=SECONDS) as client, training_server([kind], **limits) as server:
        fuzzed(server.url, server.app, client).fuzz(count, seed)


@COUNTS
def test_malformed_requests_to_any_route_for_texts_end_in_json_errors(
    service: Running, count: int, seed: int
) -> None:
    with httpx.Client(timeout=SECONDS) as client:
        FuzzedTexts(service.root, service.app, client).fuzz(count, seed)
    stored = sorted(path.name for path in (service.store.folder / "files").iterdir())
    assert stored == sorted(file["id"] for file in service.store.files())


def test_a_model_that_overflows_is_reported_and_others_continue(
    service: Running, tiny_model_dir: Path, tmp_path: Path
) -> None:
    module = load_causal_lm(str(tiny_model_dir), None)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    module.save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path)
    service.served_models.add("broken", str(tmp_path))
    url = service.root + "/v1/chat/completions"
    for model, status in [("broken", 500), ("tiny", 200), ("broken", 500)]:
        reply = httpx.post(url, json=RIGHT | {"model": model})
        assert reply.status_code == status
    assert "logits are NaN" in reply.json()["error"]["message"]
    streamed = httpx.post(url, json=RIGHT | {"model": "broken", "stream": True})
    assert json.loads(streamed.text.splitlines()[-2].removeprefix("data: "))["error"]["message"]
