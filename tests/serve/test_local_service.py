"""A service in its own process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from nip_astra.errors import ConfigurationError, ServiceError
from nip_astra.serve import app
from nip_astra.serve.local_service import start_service
from nip_astra.serve.server import open_socket, serve
from nip_astra.serve.settings import ServiceSettings
from nip_astra.utils.children import process_start
from tests.kit.command_line import CommandLine, refused
from tests.kit.messages import says


def test_a_service_starts_answers_and_stops_twice(tiny_model_dir: Path) -> None:
    with start_service({"tiny": str(tiny_model_dir)}, num_threads=1) as service:
        body = {"model": "tiny", "prompt": "hello you", "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{service.base_url}/completions", json=body, timeout=60)
        assert reply.json()["choices"][0]["text"]
        pid = service.pid
        service.stop()
        assert not service.is_alive
    assert process_start(pid) is None
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{service.base_url}/models")


def test_parts_of_an_answer_do_not_wait_for_each_other() -> None:
    async def is_sent_at_once() -> bool:
        opened: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
        with open_socket(ServiceSettings(port=0)) as listening:
            server = await asyncio.start_server(lambda _, one: opened.put(one), sock=listening)
            async with server:
                _, client = await asyncio.open_connection(*listening.getsockname())
                accepted = await opened.get()
                connection = accepted.get_extra_info("socket")
                found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                client.close()
                accepted.close()
        return bool(found)

    assert asyncio.run(is_sent_at_once())


@pytest.mark.slow  # a process that imports torch
def test_a_missing_model_is_reported_by_the_starter(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"\(2\).*no_model"):
        start_service({"tiny": str(tmp_path / "no_model")})


@pytest.mark.slow  # two processes that import torch
def test_a_service_ends_with_the_process_that_started_it(tiny_model_dir: Path) -> None:
    code = (
        "import sys, time\n"
        "from nip_astra.serve.local_service import start_service\n"
        f"service = start_service({{'tiny': {str(tiny_model_dir)!r}}}, num_threads=1)\n"
        "print(service.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    deadline = time.monotonic() + 30
    while process_start(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process_start(pid) is None


def test_a_port_that_another_service_takes_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_socket(ServiceSettings(port=0)) as other:

        @contextmanager
        def open_app(*_: object) -> Iterator[None]:
            other.listen()
            yield

        monkeypatch.setattr(app, "open_app", open_app)
        settings = ServiceSettings(port=other.getsockname()[1])
        with pytest.raises(ConfigurationError, match="--port"):
            serve({"tiny": "folder"}, settings, on_start=print)


def test_beyond_loopback_a_token_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServiceSettings().token() is None
    assert ServiceSettings(host="::1").token() is None
    with pytest.raises(ConfigurationError, match=r"0\.0\.0\.0.*--token-variable"):
        ServiceSettings(host="0.0.0.0").token()
    open_to_all = ServiceSettings(host="0.0.0.0", token_variable="MY_TOKEN")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ConfigurationError, match="MY_TOKEN, which is not set"):
        open_to_all.token()
    # Clients send it without the white space around it.
    monkeypatch.setenv("MY_TOKEN", "secret\r\n")
    assert open_to_all.token() == "secret"
    assert "secret" not in str(open_to_all.to_dict())


def test_the_command_refuses_unservable_models(cli: CommandLine, tiny_model_dir: Path) -> None:
    model = f"tiny={tiny_model_dir}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, fact in (
            (("tiny",), "NAME=PATH"),
            (("tiny=nothing-there",), "nothing-there"),
            (("tiny=nothing-there", "--train"), "nothing-there"),
            ((model, "--model", model), "'tiny'"),
            ((f"a/b={tiny_model_dir}", "--port=0"), "'a/b'"),
            ((model, "--host", "0.0.0.0"), "--token-variable"),
            ((model, "--port", port), "0 for a free one"),
        ):
            assert fact in refused(cli("serve", "--model", *options))


def test_a_signal_ends_the_command(cli: CommandLine, tiny_model_dir: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    names: list[str] = []
    ended = threading.Event()

    def request_and_interrupt() -> None:
        while not names and not ended.wait(0.02):
            with suppress(httpx.TransportError):
                cards = httpx.get(f"{address}/models").json()["data"]
                names.extend(card["id"] for card in cards)
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=request_and_interrupt)
    thread.start()
    place = ("--port", address[17:-3], "--state-dir", str(tmp_path / "state"))
    result = cli("serve", "--model", f"tiny={tiny_model_dir}", *place)
    ended.set()
    thread.join()
    assert (result.code, names, f"{address} " in result.out) == (0, ["tiny"], True)


def test_a_missing_package_is_named_with_how_to_install_it(
    cli: CommandLine, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    message = refused(cli("serve", "--model", f"tiny={tiny_model_dir}"))
    assert says(message, "fastapi", "pip install 'nip_astra[serve]'")
