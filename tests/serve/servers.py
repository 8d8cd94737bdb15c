"""Servers of OpenAI's protocol for tests of the client side: ours and others."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.running import running

SECONDS_TO_START = 600
VLLM = "NIP_ASTRA_TEST_VLLM"
"""Environment variable with the command `vllm` of an environment of its own."""


@dataclass(frozen=True)
class Server:
    """A running server, with known differences from ours by the test that shows them."""

    base_url: str
    model: str
    differences: Mapping[str, str]


KNOWN: dict[str, dict[str, str]] = {
    "ours": {},
    "transformers": {
        "test_log_probabilities_are_those_of_the_model": "gives none",
        "test_answers_follow_seeds_and_temperature": "always gives one answer, the likeliest",
        "test_a_stop_text_ends_an_answer_before_it": "fails with status 500",
        "test_a_model_that_is_not_there_ends_a_run": "answers for any name",
        "test_what_is_too_long_is_refused_as_data": "answers beyond the model's window",
    },
    "vllm": {},
}


@contextmanager
def server_of(kind: str, model: Path, log: Path) -> Iterator[Server]:
    """Serve a model by one of the kinds in `KNOWN` within the block."""
    if kind == "ours":
        with running({"model": str(model)}) as service:
            yield Server(service.base_url, "model", KNOWN[kind])
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    if kind == "transformers":
        command = [str(Path(sys.executable).with_name("transformers")), "serve", str(model)]
        command += ["--port", port, "--device", "cpu"]
        # It reads the hub's cache, which must exist.
        (log.parent / "hub").mkdir()
        name, more = str(model), {"HF_HUB_CACHE": str(log.parent / "hub")}
    else:
        program = os.environ.get(VLLM) or shutil.which("vllm")
        if program is None:
            pytest.skip(f"needs the command vllm of a CPU build, named by {VLLM}")
        command = [program, "serve", str(model), "--served-model-name", "model", "--port", port]
        command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"]
        name = "model"
        more = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        more |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": ""}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **more}
    options: Any = {"env": environment, "cwd": log.parent, "start_new_session": True}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **options)
    try:
        base_url = f"http://127.0.0.1:{port}/v1"
        _wait_until_there(process, base_url, log)
        yield Server(base_url, name, KNOWN[kind])
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:
            # Including its workers.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _wait_until_there(process: subprocess.Popen[bytes], base_url: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            httpx.get(f"{base_url}/models", timeout=5)
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])
