"""Requests are logged, and a repeated request under the same name receives the same answer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from nip_astra.language_models.services.chat import ChatAnswer, ChatOutcome, ChatRequest
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.serve import completions
from nip_astra.serve.completions import CompletionStore
from tests.serve.running import Running, running

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


def ask(service: Running, key: str | None, **more: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    url = f"{service.base_url}/{more.pop('route', 'chat/completions')}"
    return httpx.post(url, json=BODY | more, headers=headers, timeout=60)


def outcomes(service: Running, key: str | None) -> list[str]:
    return [entry.outcome for entry in service.completions.log() if entry.key == key]


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": "hello", "messages": None, "route": "completions"}],
    ids=["chat", "completion"],
)
def test_the_same_name_is_given_the_same_answer(service: Running, body: dict[str, Any]) -> None:
    # Without a seed, each answer would differ.
    key = f"one of {len(body)}"
    first, again = (ask(service, key, **body) for _ in range(2))
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert outcomes(service, key) == ["answered", "again"]
    other = ask(service, f"{key}, another", **body)
    assert other.json()["id"] != first.json()["id"]


def test_a_name_belongs_to_one_request(service: Running) -> None:
    assert ask(service, "mine").status_code == 200
    refused = ask(service, "mine", max_tokens=5)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "idempotency_key_reused"


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


def test_a_refused_request_may_be_repeated(service: Running) -> None:
    assert ask(service, "wrong", max_tokens=0).status_code == 400
    assert ask(service, "wrong").status_code == 200


def test_a_chat_model_names_its_requests(service: Running) -> None:
    values = {"model": "tiny", "base_url": service.base_url, "samples_per_request": 2}
    model = OpenAIChatModel.load(
        OpenAIChatModel.Parameters.from_dict({"_type": "openai", **values}), scenario_dir=None
    )
    request = ChatRequest(({"role": "user", "content": "hi"},), 6, num_samples=3, key="run/1")
    num_before = len(service.completions.log())

    async def request_twice() -> list[ChatOutcome]:
        answers = [await model.answer(request) for _ in range(2)]
        await model.close()
        return answers

    first, again = asyncio.run(request_twice())
    assert first.samples == again.samples
    assert all(isinstance(sample, ChatAnswer) for sample in first.samples)
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
