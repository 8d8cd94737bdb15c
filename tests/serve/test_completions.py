"""Requests are logged, and a repeated request under the same name receives the same answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.serve import completions
from nip_astra.serve.completions import CompletionStore
from tests.language_models.services.requests import ask as ask_model
from tests.language_models.services.requests import saying, texts
from tests.serve.running import Running, running

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


def ask(service: Running, key: str | None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    url = f"{service.base_url}/{more.pop('route', 'chat/completions')}"
    return httpx.post(url, json=BODY | more, headers=headers, timeout=60)


def outcomes(service: Running, key: str | None) -> list[str]:
    return [entry.outcome for entry in service.completions.log() if entry.key == key]


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "hello", "messages": None, "route": "completions"}]
)
def test_the_same_name_is_given_the_same_answer(service: Running, body: dict[str, Any]) -> None:
    # Without a seed, each answer would differ.
    key = f"one of {len(body)}"
    first, again = (ask(service, key, **body) for _ in range(2))
    assert first.content == again.content
    replayed = [one.headers.get("idempotent-replayed") for one in (first, again)]
    assert replayed == [None, "true"]
    assert outcomes(service, key) == ["answered", "again"]
    other = ask(service, f"{key}, another", **body)
    assert other.json()["id"] != first.json()["id"]


def test_a_name_belongs_to_one_request_that_was_not_refused(service: Running) -> None:
    assert [ask(service, "mine", max_tokens=n).status_code for n in (0, 6, 5)] == [400, 200, 400]
    error = ask(service, "mine", max_tokens=5).json()["error"]
    assert error["code"] == "idempotency_key_reused"


def test_simultaneous_requests_under_one_name_wait_for_one_answer(service: Running) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(service, "at once").content, range(4)))
    assert len(set(answers)) == 1
    assert sorted(outcomes(service, "at once")) == ["again"] * 3 + ["answered"]


def test_requests_without_a_name_are_logged_and_forgotten(service: Running) -> None:
    before = len(outcomes(service, None))
    answers = [ask(service, None).json()["id"] for _ in range(2)]
    assert answers[0] != answers[1]
    assert outcomes(service, None)[before:] == ["answered", "answered"]
    assert len({entry.digest for entry in service.completions.log()[-2:]}) == 1


def test_a_chat_model_names_its_requests(service: Running) -> None:
    values = {"model": "tiny", "base_url": service.base_url, "samples_per_request": 2}
    model = RetryingChatModel.load(
        OpenAIChatModel.Parameters(**values, limits={"concurrency": 1}), scenario_dir=None
    )
    num_before = len(service.completions.log())
    first, again = (ask_model(model, saying("hi", num_samples=3, key="run/1")) for _ in range(2))
    assert texts(first[0]) == texts(again[0])
    new = service.completions.log()[num_before:]
    assert [entry.outcome for entry in new] == ["answered"] * 2 + ["again"] * 2
    assert len({entry.key for entry in new}) == 2


def test_answers_survive_a_restart(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"state_dir": str(tmp_path)}
    with running({"tiny": str(tiny_model_dir)}, **state) as service:
        first = ask(service, "before").content
    with running({"tiny": str(tiny_model_dir)}, **state) as service:
        assert ask(service, "before").content == first
        monkeypatch.setattr(completions, "NUM_KEPT", 1)
        ask(service, "after")
    store = CompletionStore(tmp_path)
    assert [entry.key for entry in store.log()] == ["after"]
    store.close()
