"""A proxy between the client side and the service injects faults in both directions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.kit.chat_stub import ChatStub, Reply, chat_stub
from tests.kit.tiny import write_scenario
from tests.serve.running import Running

KEY = "key-that-nobody-writes"
Fault = Callable[[str], Reply]
"""What becomes of the service's right answer on its way."""


def changed(**values: Any) -> Fault:
    """The correct answer with other fields."""
    return lambda body: Reply(body=json.dumps(json.loads(body) | values))


FAULTS: dict[str, Fault] = {
    "429": lambda _: Reply(429, body="busy"),
    "429 with Retry-After": lambda _: Reply(429, body="busy", headers={"Retry-After": "0.01"}),
    "500": lambda _: Reply(500, body="oops"),
    "cut connection": lambda body: Reply(body=body, cut_at=0),
    "half an answer": lambda body: Reply(body=body, cut_at=40),
    "half a stream": lambda body: Reply(body=body, cut_at=40, is_chunked=True),
    "malformed JSON": lambda body: Reply(body=body[:-9]),
    "empty choices": changed(choices=[]),
    "empty choice": changed(choices=[{}]),
}
"""Faults that another attempt survives."""


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


@pytest.mark.slow
def test_a_run_through_a_faulty_proxy_ends_like_an_undisturbed_run_and_writes_no_key(
    service: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    faults = list(FAULTS.values())
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
            assert {headers["Authorization"] for headers in stub.headers} == {"Bearer " + KEY}
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
