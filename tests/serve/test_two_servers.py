"""The same tests of the client side against our service and other servers of OpenAI's protocol."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services import chat
from nip_astra.language_models.services.chat import ChatAnswer, FinishReason
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from tests.kit.tiny import make_language_model
from tests.language_models.services.requests import ask, failure, saying, texts
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
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=60)
        # Including its workers.
        with suppress(ProcessLookupError):
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


Greedy = tuple[list[str], list[float]]
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KNOWN if kind != "ours"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM does not support heads smaller than 32 on a CPU.
    place = tmp_path_factory.mktemp("served") / "model"
    # With this seed no two words are almost equally likely in a greedy answer.
    folder = make_language_model(place, head_size=32, seed=4)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    specials = AutoTokenizer.from_pretrained(folder).all_special_ids
    with torch.no_grad():
        # Our service generates no special token except the end. Here this holds for every server:
        # the first hidden unit has the same value everywhere, and lowers their logits.
        module.model.embed_tokens.weight[:, 0] = 5.0
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        module.lm_head.weight[:, 0] = 0.0
        specials.remove(module.config.eos_token_id)
        module.lm_head.weight[specials, 0] = -100.0
    module.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["ours", *OTHERS])
def server(request: Any, model_dir: Path, tmp_path_factory: Any) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log.txt"
    with server_of(request.param, model_dir, log) as server:
        yield server


@pytest.fixture(autouse=True)
def _known_differences(request: pytest.FixtureRequest) -> None:
    reason = request.getfixturevalue("server").differences.get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))


def client(server: Server, **fields: Any) -> OpenAIChatModel:
    values = {"base_url": server.base_url, "model": server.model} | fields
    return OpenAIChatModel(OpenAIChatModel.Parameters(**values))


@pytest.fixture(scope="module")
def greedy(model_dir: Path) -> Greedy:
    """The likeliest words and their log-probabilities, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    hello = [{"role": "user", "content": "hello you"}]
    prompt = tokenizer.apply_chat_template(hello, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    words, logprobs = [], []
    for _ in range(8):
        with torch.no_grad():
            logprobs_V = module(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(logprobs_V.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
        words.append(tokenizer.decode([ids[-1]]))
        logprobs.append(float(logprobs_V[ids[-1]]))
    return words, logprobs


def test_an_answer_has_text_end_and_usage(server: Server) -> None:
    (outcome,) = ask(client(server), saying("hello you", max_tokens=5, seed=1))
    (answer,) = outcome.samples
    assert isinstance(answer, ChatAnswer)
    assert answer.text
    assert not outcome.is_usage_estimated
    assert outcome.usage.prompt_tokens == 6
    assert 0 < outcome.usage.completion_tokens <= 5
    is_cut = outcome.usage.completion_tokens == 5 and len(answer.text.split()) == 5
    assert answer.finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)


def words_of(server: Server, **options: Any) -> set[tuple[str, ...]]:
    """The answers with several seeds."""
    requests = [saying("hello you", seed=n, max_tokens=8, **options) for n in range(8)]
    return {tuple(texts(outcome)[0].split()) for outcome in ask(client(server), *requests)}


def test_greedy_answers_are_the_likeliest(server: Server, greedy: Greedy) -> None:
    for options in ({"temperature": 0.0}, {"top_p": 0.01}):
        assert words_of(server, **options) == {tuple(greedy[0])}


def test_answers_follow_seeds_and_temperature(server: Server, greedy: Greedy) -> None:
    assert words_of(server) == words_of(server)
    assert words_of(server, temperature=0.01) == {tuple(greedy[0])}
    assert len(words_of(server, temperature=1.8)) > 4
    request = saying("hello you", num_samples=6, seed=2, max_tokens=8)
    (outcome,) = ask(client(server, samples_per_request=6), request)
    assert len(set(texts(outcome))) > 2
    assert "<malformed>" not in texts(outcome)


def test_log_probabilities_are_those_of_the_model(server: Server, greedy: Greedy) -> None:
    request = saying("hello you", temperature=0.0, max_tokens=8, needs_logprobs=True)
    (outcome,) = ask(client(server), request)
    (answer,) = outcome.samples
    assert isinstance(answer, ChatAnswer)
    assert answer.token_logprobs is not None
    assert list(answer.token_logprobs)[: len(greedy[1])] == pytest.approx(greedy[1], abs=1e-3)


def test_a_stop_text_ends_an_answer_before_it(server: Server, greedy: Greedy) -> None:
    word = greedy[0][3]
    stopping = saying("hello you", temperature=0.0, max_tokens=8, stop=(word,))
    (outcome,) = ask(client(server), stopping)
    (answer,) = outcome.samples
    assert isinstance(answer, ChatAnswer)
    assert answer.text.split() == greedy[0][: greedy[0].index(word)]
    assert answer.finish_reason is FinishReason.STOP


def test_a_model_that_is_not_there_ends_a_run(server: Server) -> None:
    with pytest.raises(ConfigurationError, match="status 404"):
        ask(client(server, model="another"), saying("hello"))


def test_what_is_too_long_is_refused_as_data(server: Server) -> None:
    long = failure(ask(client(server), saying("hello " * 500, max_tokens=4))[0])
    assert long.reason is chat.FailureReason.CONTEXT_LENGTH
