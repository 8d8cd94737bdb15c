"""Thousands of malformed requests: each ends in a JSON error, and the service lives on."""

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

from tests.serve.running import Running, running

MESSAGES = [{"role": "user", "content": "hello you"}]
RIGHT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "hello", "max_tokens": 2},
    "/v1/fine_tuning/jobs": {"model": "tiny", "training_file": "file-1"},
}
WRONG: list[Any] = [
    *(None, True, -1, 0, 10**40, 1e308, -0.5, "", "x", "\x00", "\ud800", "../../etc/passwd"),
    *([], [[]], {}, {"a": 1}, [None], [1, "a"], [{}], [MESSAGES], [{"role": "user"}], "9" * 5000),
    *([{"role": [], "content": {}}], [-5], [10**9], [[3, 10**9]], {"type": "dpo"}),
]
NAMES = [
    *("model", "messages", "prompt", "max_tokens", "n", "seed", "stop", "top_p", "temperature"),
    *("logprobs", "top_logprobs", "stream", "stream_options", "logit_bias", "metadata", "suffix"),
    *("method", "hyperparameters", "training_file", "tools", "__class__", "", "\u202e", "a" * 999),
]
PATHS = [
    *("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/files/%00", "/v1/files/../service.db"),
    *("/v1/fine_tuning/jobs/'--", "/v1/fine_tuning/jobs/x/events?limit=-1", "/v1/nothing", "//"),
    *("/v1/fine_tuning/jobs?limit=9999999999999", "/v1/files?after=%f0%9f", "/health/x"),
    *("/v1/fine_tuning/jobs/x/cancel", "/v1/files/x/content", "/v1/models/%ff"),
]
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "TRACE")


def damaged(content: bytes, chance: random.Random) -> bytes:
    """A body with bytes cut out, changed or doubled."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(4):
            case 0:
                del data[place : place + chance.randint(1, 9)]
            case 1:
                data[place:place] = bytes([chance.randrange(256)])
            case 2:
                data[place:place] = data[: chance.randint(0, 40)]
            case _:
                data = data[:place]
    return bytes(data)


def malformed(chance: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers of a request that is wrong in some way."""
    path = chance.choice(list(RIGHT))
    headers = {"Content-Type": "application/json"}
    kind = chance.randrange(6)
    if kind == 0:
        return chance.choice(METHODS), chance.choice(PATHS), b"{}", headers
    if kind == 1:
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="../a"\r\n\r\n{}\r\n'
        end = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--x--\r\n'
        return "POST", "/v1/files", damaged(part + end, chance), form
    body = dict(RIGHT[path])
    if kind == 2:
        return "POST", path, damaged(json.dumps(body).encode(), chance), headers
    for _ in range(chance.randint(1, 3)):
        body[chance.choice(NAMES)] = chance.choice(WRONG)
    if kind == 3:
        body.pop(chance.choice(list(body)))
    return "POST", path, json.dumps(body).encode(), headers


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[Running]:
    with running({"tiny": str(tiny_model_dir)}, max_answers=8, max_body_bytes=20_000) as service:
        yield service


def fuzz(service: Running, count: int, seed: int) -> None:
    chance = random.Random(seed)
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=service.root, timeout=60) as client:
        for _ in range(count):
            method, path, body, headers = malformed(chance)
            reply = client.request(method, path, content=body, headers=headers)
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            about = (method, path, body, reply.status_code, reply.text)
            # A change may leave a request right: a seed of 0, or no stop texts.
            assert reply.status_code == 200 or 400 <= reply.status_code < 500, about
            if reply.status_code != 200 and method != "HEAD":
                error = reply.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, about
                assert error["message"], about
        assert client.get("/health").status_code == 200
        alive = client.post("/v1/chat/completions", json=RIGHT["/v1/chat/completions"])
        assert alive.status_code == 200
    assert statuses[400] > count / 2, statuses
    assert sorted(path.name for path in (service.store.folder / "files").iterdir()) == sorted(
        file["id"] for file in service.store.files()
    )


def broken_http(chance: random.Random) -> bytes:
    """A request whose line, headers or framing are wrong."""
    body = json.dumps(RIGHT["/v1/chat/completions"]).encode()
    lines = [
        b"POST /v1/chat/completions HTTP/1.1",
        b"Host: 127.0.0.1",
        b"Content-Type: application/json",
        f"Content-Length: {len(body)}".encode(),
    ]
    match chance.randrange(6):
        case 0:
            lines[0] = chance.choice(
                (b"", b"hello", b"POST", b"\x16\x03\x01\x02", b"GET / HTTP/9.9", b"GET  / HTTP/1.1")
            )
        case 1:
            lines[3] = b"Content-Length: " + chance.choice((b"-1", b"x", b"9" * 30, b"1, 2", b""))
        case 2:
            lines.append(chance.choice((b"Content-Length: 3", b"no colon", b": x", b"\x00: y")))
        case 3:
            lines[3] = b"Transfer-Encoding: " + chance.choice((b"chunked", b"gzip", b"chunked, x"))
            body = chance.choice((b"zz\r\n", b"5\r\nab", b"-1\r\n\r\n", body))
        case 4:
            lines.append(b"X: " + b"a" * chance.choice((70_000, 200_000)))
        case _:
            return damaged(b"\r\n".join(lines) + b"\r\n\r\n" + body, chance)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def exchange(service: Running, sent: bytes) -> bytes:
    """All that the service says to some bytes."""
    host, _, port = service.root.removeprefix("http://").partition(":")
    said = b""
    with (
        socket.create_connection((host, int(port)), timeout=60) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(sent)
        with suppress(OSError):  # it may have been refused and closed already
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            said += part
    return said


def fuzz_http(service: Running, count: int, seed: int, log: pytest.LogCaptureFixture) -> None:
    chance = random.Random(seed)
    num_refused = 0
    for _ in range(count):
        sent = broken_http(chance)
        said = exchange(service, sent)
        # Half a request is answered by the end of the connection, and two by two answers.
        while said:
            head, _, said = said.partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            body, said = said[:length], said[length:]
            if b" 200 " not in head.split(b"\r\n")[0]:
                error = json.loads(body)["error"]
                assert set(error) == {"message", "type", "param", "code"}, (sent, body)
                num_refused += 1
    assert num_refused > count / 3
    assert not [one for one in log.records if one.levelname == "ERROR"], "no fault of the service"
    alive = httpx.post(service.root + "/v1/chat/completions", json=RIGHT["/v1/chat/completions"])
    assert alive.status_code == 200


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 0), pytest.param(2000, 1, marks=pytest.mark.slow)]
)
def test_what_is_no_http_ends_in_json_errors(
    service: Running, caplog: pytest.LogCaptureFixture, count: int, seed: int
) -> None:
    fuzz_http(service, count, seed, caplog)


@pytest.mark.parametrize(
    ("count", "seed"), [(120, 0), pytest.param(10_000, 1, marks=pytest.mark.slow)]
)
def test_malformed_requests_end_in_json_errors(service: Running, count: int, seed: int) -> None:
    fuzz(service, count, seed)


def test_a_model_that_overflows_tells_so_and_others_go_on(
    service: Running, tiny_model_dir: Path, tmp_path: Path
) -> None:
    import torch

    from nip_astra.language_models.sources import load_causal_lm, load_tokenizer

    module = load_causal_lm(str(tiny_model_dir), None)
    with torch.no_grad():
        module.model.norm.weight.fill_(float("nan"))
    module.save_pretrained(tmp_path)
    load_tokenizer(str(tiny_model_dir)).save_pretrained(tmp_path)
    service.shelf.add("broken", str(tmp_path))
    body = RIGHT["/v1/chat/completions"]
    for model, status in [("broken", 500), ("tiny", 200), ("broken", 500)]:
        reply = httpx.post(service.root + "/v1/chat/completions", json=body | {"model": model})
        assert reply.status_code == status
    assert (
        "logits are no numbers"
        in httpx.post(
            service.root + "/v1/chat/completions", json=body | {"model": "broken"}
        ).json()["error"]["message"]
    )
    streamed = httpx.post(
        service.root + "/v1/chat/completions", json=body | {"model": "broken", "stream": True}
    )
    assert json.loads(streamed.text.splitlines()[-2].removeprefix("data: "))["error"]["message"]
