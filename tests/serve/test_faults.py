"""A proxy between the client side and the service injects faults in both directions."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nip_astra.language_models.services.chat import ChatAnswer, LimitParameters
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.retrying import ResponseCache, RetryingChatModel
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.kit.tiny import write_scenario
from tests.language_models.services.requests import ask, saying
from tests.scorers.chat_stub import ChatStub, Reply, chat_stub
from tests.serve.running import Running

NEVER = threading.Event()
KEY = "key-that-nobody-writes"
Fault = Callable[[str], Reply]
"""What becomes of the service's right answer on its way."""


def changed(**values: Any) -> Fault:
    """The correct answer with other fields."""
    return lambda body: Reply(body=json.dumps(json.loads(body) | values))


PASSING: dict[str, tuple[Fault, str]] = {
    "429": (lambda _: Reply(429, body="busy"), "rate_limited"),
    "429 with Retry-After": (
        lambda _: Reply(429, body="busy", headers={"Retry-After": "0.01"}),
        "rate_limited",
    ),
    "500": (lambda _: Reply(500, body="oops"), "unavailable"),
    "no answer": (lambda _: Reply(waits_for=NEVER), "timeout"),
    "cut connection": (lambda body: Reply(body=body, cut_at=0), "unavailable"),
    "half an answer": (lambda body: Reply(body=body, cut_at=40), "unavailable"),
    "half a stream": (lambda body: Reply(body=body, cut_at=40, is_chunked=True), "unavailable"),
    "malformed JSON": (lambda body: Reply(body=body[:-9]), "malformed"),
    "empty choices": (changed(choices=[]), "malformed"),
    "empty choice": (changed(choices=[{}]), "malformed"),
}
"""Faults that another attempt survives, and what the failed attempt is counted as."""


@contextmanager
def proxy(service: Running, fault_of: Callable[[int], Fault | None]) -> Iterator[ChatStub]:
    """Pass requests on; `fault_of` maps a request's number to the fault in its answer."""
    with httpx.Client(timeout=60) as onward:

        def answer(body: dict[str, Any], number: int) -> Reply:
            reply = onward.post(f"{service.base_url}/chat/completions", json=body)
            fault = fault_of(number)
            return Reply(reply.status_code, body=reply.text) if fault is None else fault(reply.text)

        with chat_stub(answer) as stub:
            yield stub


def model_at(base_url: str) -> OpenAIChatModel:
    return OpenAIChatModel(OpenAIChatModel.Parameters(base_url=base_url, model="tiny"))


@pytest.mark.parametrize("name", PASSING)
def test_a_transient_fault_is_survived_and_the_answer_is_unchanged(
    service: Running, tmp_path: Path, name: str
) -> None:
    fault, counted = PASSING[name]
    request = saying("hello you", seed=4, max_tokens=6)
    (undisturbed,) = ask(model_at(service.base_url), request)
    assert isinstance(undisturbed.samples[0], ChatAnswer)
    with proxy(service, lambda number: fault if number == 0 else None) as stub:
        late = 0.25 if counted == "timeout" else 60.0
        limits = LimitParameters(num_retries=3, backoff=0.0, attempt_timeout=late)
        cache = ResponseCache(tmp_path / "answers.sqlite")
        model = RetryingChatModel(model_at(stub.base_url), limits, cache=cache)
        found = [ask(model, request)[0] for _ in range(2)]
        assert [one.samples for one in found] == [undisturbed.samples] * 2
        assert [one.is_cached for one in found] == [False, True]
        assert model.use.failures == {counted: 1}
        assert len(stub.requests) == 2


@pytest.mark.slow
def test_a_run_through_a_faulty_proxy_ends_like_an_undisturbed_run_and_writes_no_key(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    faults = [one for name, (one, _) in PASSING.items() if name != "no answer"]
    paid: Counter[str] = Counter()

    def every_third(number: int) -> Fault | None:
        return faults[number // 3 % len(faults)] if number % 3 == 0 else None

    def run(name: str, fault_of: Callable[[int], Fault | None]) -> Any:
        with proxy(service, fault_of) as stub:
            limits = {"num_retries": 20, "backoff": 0.0, "concurrency": 4}
            chat = {"_type": "openai", "base_url": stub.base_url, "model": "tiny"}
            chat["api_key_variable"] = "MY_KEY"
            target = {"chat_model": chat | {"limits": limits}, "max_new_tokens": 4}
            scenario = write_scenario(tmp_path / name, target=target)
            resolved = resolve_experiment(
                trainer="ast_dpo", scenario=str(scenario), overrides=["training.num_iterations=1"]
            )
            result = run_experiment(
                resolved, runs_dir=str(tmp_path / "runs"), run_id=name, progress=False
            ).results
            assert {one["Authorization"] for one in stub.headers} == {"Bearer " + KEY}
            paid.update(json.dumps(body) for body in stub.requests)
            return result

    clean = run("clean", lambda _: None)
    once = sum(paid.values())
    assert max(paid.values()) == 1, "the cache repeats nothing"
    disturbed = run("disturbed", every_third)
    assert disturbed["after"] == clean["after"]
    use = disturbed["services"]["target"]
    num_failed = sum(use["failures"].values())
    assert set(use["failures"]) == {"rate_limited", "unavailable", "malformed"}
    assert use["num_requests"] - num_failed == once == clean["services"]["target"]["num_requests"]
    written = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(written) > 10
    assert not [path for path in written if KEY.encode() in path.read_bytes()]
