"""Tokens for tokens by /inference/v1/generate, as training clients request them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.running import Running, running

PROMPT = [5, 9, 7]


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[Running]:
    with running({"tiny": str(tiny_model_dir)}, max_answer_tokens=64) as service:
        yield service


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()


def post(service: Running, sampling: dict[str, Any], **changes: Any) -> httpx.Response:
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": sampling, **changes}
    given = {name: value for name, value in body.items() if value is not None}
    return httpx.post(f"{service.root}/inference/v1/generate", json=given, timeout=60)


def answer(service: Running, **sampling: Any) -> list[dict[str, Any]]:
    response = post(service, {"seed": 3, "max_tokens": 12, "logprobs": 1, **sampling})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    return [one["logprob"] for one in choice["logprobs"]["content"]]


def test_tokens_come_with_the_log_probabilities_of_the_model(service: Running, model: Any) -> None:
    for choice in answer(service, n=3, temperature=0.7):
        ids = choice["token_ids"]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{token}" for token in ids]
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
        own = logits.log_softmax(-1)
        chosen = own[range(len(ids)), ids]
        assert logprobs_of(choice) == pytest.approx(chosen.tolist(), abs=1e-4)
        top = [one["top_logprobs"][0]["token"] for one in content]
        assert top == [f"token_id:{token}" for token in own.argmax(-1).tolist()]


def test_an_answer_ends_with_the_token_that_ends_it(service: Running) -> None:
    (free,) = answer(service)
    third = free["token_ids"][2]
    (ended,) = answer(service, stop_token_ids=[third])
    place = free["token_ids"].index(third)
    assert ended["token_ids"] == free["token_ids"][: place + 1]
    assert (ended["finish_reason"], len(ended["logprobs"]["content"])) == ("stop", place + 1)
    (short,) = answer(service, max_tokens=2)
    assert (short["finish_reason"], short["token_ids"]) == ("length", free["token_ids"][:2])


def test_every_token_may_be_generated(service: Running, model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path)
    choices = answer(service, n=100, temperature=2.0)
    drawn = {token for choice in choices for token in choice["token_ids"]}
    # The routes for text never generate special tokens except the end.
    assert len(drawn & set(tokenizer.all_special_ids)) > 1


def test_without_log_probabilities_only_tokens_are_returned(service: Running) -> None:
    response = post(service, {"max_tokens": 3, "n": 2}).json()
    assert [choice["logprobs"] for choice in response["choices"]] == [None, None]
    assert all(choice["token_ids"] for choice in response["choices"])
    assert response["usage"]["prompt_tokens"] == len(PROMPT)
    card = httpx.get(f"{service.base_url}/models/tiny").json()
    assert card["max_model_len"] == 96


@pytest.mark.parametrize(
    ("sampling", "changes", "fact"),
    [
        ({"top_k": -2}, {}, "'top_k' is -2"),
        ({"stop": ["x"]}, {}, "'stop' is not supported"),
        ({"max_tokens": 0}, {}, "'max_tokens' is 0"),
        ({"max_tokens": 9999}, {}, "this service allows 64"),
        ({}, {"token_ids": []}, "'token_ids' is []"),
        ({}, {"token_ids": None}, "'token_ids' is missing"),
        ({}, {"token_ids": [99999]}, "the token 99999"),
        ({}, {"token_ids": [5] * 9999}, "window"),
        ({}, {"model": "nowhere"}, "model 'nowhere'"),
        ({}, {"features": {}}, "'features' is not supported"),
    ],
)
def test_unanswerable_requests_are_refused(
    service: Running, sampling: dict[str, Any], changes: dict[str, Any], fact: str
) -> None:
    response = post(service, sampling, **changes)
    assert response.status_code == (404 if "model" in changes else 400)
    assert fact in response.json()["error"]["message"]


def test_options_without_effect_are_accepted(service: Running) -> None:
    nothing = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
    # A prompt that is kept rounds differently from a new one.
    answer(service)
    assert answer(service, **nothing) == answer(service)


def test_the_training_client_of_verifiers_reads_the_answers(
    service: Running, tiny_model_dir: Path
) -> None:
    pytest.importorskip("verifiers")
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import ProviderError
    from verifiers.v1.types import SamplingConfig

    config = TrainClientConfig(
        base_url=service.base_url, renderer_model_name=str(tiny_model_dir), api_key_var="NONE"
    )
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello you"}]}

    async def ask() -> Any:
        client = TrainClient(config)
        sampling = SamplingConfig(max_tokens=5, temperature=1.0)
        try:
            response = await client.get_response(ChatDialect(), body, sampling)
            with pytest.raises(ProviderError, match="nowhere"):
                await client.get_response(ChatDialect(), {**body, "model": "nowhere"}, sampling)
        finally:
            await client.close()
        return response

    tokens = asyncio.run(ask()).tokens
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert tokens.prompt_ids == tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_dict=False
    )
    assert 1 <= len(tokens.completion_ids) == len(tokens.completion_logprobs) <= 5
    assert all(one < 0 for one in tokens.completion_logprobs)
