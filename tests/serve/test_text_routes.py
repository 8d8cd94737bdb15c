"""The routes for text, as the official client calls them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from nip_astra.language_models.sequences import Progress
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from tests.kit.messages import says
from tests.serve.running import Running, running

HELLO = [{"role": "user", "content": "hello you"}]


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[Running]:
    with running({"tiny": str(tiny_model_dir)}, max_answer_tokens=100) as service:
        yield service


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 1, "max_tokens": 12}
    return client.chat.completions.create(**(given | changes))


def test_a_model_is_described(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="no-such-model"):
        client.models.retrieve("no-such-model")


def test_answers_have_seeds_samples_and_lengths(client: openai.OpenAI) -> None:
    assert len({ask(client, seed=None).choices[0].message.content for _ in range(8)}) > 1
    four = ask(client, n=4)
    assert [choice.index for choice in four.choices] == [0, 1, 2, 3]
    texts = [choice.message.content for choice in four.choices]
    assert len(set(texts)) > 1
    assert ask(client, n=4).choices[3].message.content == texts[3]
    assert ask(client).choices[0].message.content == texts[0]
    assert ask(client, seed=2).choices[0].message.content != texts[0]
    assert {choice.finish_reason for choice in four.choices} <= {"stop", "length"}
    short = ask(client, max_completion_tokens=2, max_tokens=openai.NOT_GIVEN, temperature=0)
    usage = short.usage
    assert (short.choices[0].finish_reason, usage.completion_tokens) == ("length", 2)
    assert usage.total_tokens == usage.prompt_tokens + 2


def test_log_probabilities_are_those_of_the_tokens(client: openai.OpenAI) -> None:
    choice = ask(client, temperature=0, logprobs=True, top_logprobs=3).choices[0]
    tokens = choice.logprobs.content
    assert "".join(one.token for one in tokens) == choice.message.content
    num_likely = 0
    for token in tokens:
        tops = {top.token: top.logprob for top in token.top_logprobs}
        assert tops.get(token.token, token.logprob) == token.logprob
        num_likely += token.token in tops
        assert bytes(token.bytes).decode() == token.token
        assert token.logprob <= 0
        logprobs = [top.logprob for top in token.top_logprobs]
        assert (logprobs, len(logprobs)) == (sorted(logprobs, reverse=True), 3)
    assert num_likely > len(tokens) / 2, "in the text around it, as the token itself"
    assert ask(client).choices[0].logprobs is None


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": ["cat", "mat ."]}, {"temperature": 0}])
def test_a_stream_says_what_a_whole_answer_says(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    whole = ask(client, logprobs=True, **options)
    options = {**options, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, logprobs=True, **options))
    for choice in whole.choices:
        parts = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert "".join(one.delta.content or "" for one in parts) == choice.message.content
        assert [one.finish_reason for one in parts if one.finish_reason] == [choice.finish_reason]
        records = [record for one in parts if one.logprobs for record in one.logprobs.content]
        expected = [record.logprob for record in choice.logprobs.content]
        assert [record.logprob for record in records] == pytest.approx(expected, abs=2e-5)
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole.usage]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_go_on_with_texts_and_tokens(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "seed": 5, "temperature": 0}
    both = client.completions.create(prompt=["the cat", "good day"], n=2, logprobs=2, **given)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    assert len(both.choices[0].logprobs.top_logprobs[0]) == 2
    one = client.completions.create(prompt="good day", **given)
    assert one.choices[0].text == both.choices[2].text
    ids = client.completions.create(prompt=[7, 8], **given)
    assert ids.choices[0].text == one.choices[0].text
    streamed = client.completions.create(prompt="good day", stream=True, **given)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def scored(client: openai.OpenAI, prompt: Any, **changes: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "logprobs": 1, "echo": True}
    return client.completions.create(prompt=prompt, **(given | {"max_tokens": 1} | changes)).choices


def test_an_echoed_prompt_is_scored_as_the_model_scores_it(
    service: Running, client: openai.OpenAI, tiny_model_dir: Path
) -> None:
    prompts = ["the cat sat on a mat .", "hello you how are you", "the cat sat on the cat"]
    module = load_causal_lm(str(tiny_model_dir), None)
    tokenizer = load_tokenizer(str(tiny_model_dir))
    choices = scored(client, prompts, n=2)[::2]
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = tokenizer.encode(prompt)
        with torch.no_grad():
            logprobs = module(torch.tensor([ids])).logits[0].log_softmax(dim=1)
        scores = choice.logprobs
        assert scores.token_logprobs[0] is None
        assert scores.top_logprobs[0] is None
        expected = [float(logprobs[i, one]) for i, one in enumerate(ids[1:])]
        assert scores.token_logprobs[1:-1] == pytest.approx(expected, abs=2e-5)
        best = [max(top.values()) for top in scores.top_logprobs[1:]]
        assert best == pytest.approx(logprobs.max(dim=1).values.tolist(), abs=2e-5)
        assert "".join(scores.tokens) == choice.text
        assert choice.text.startswith(prompt)
        pairs = zip(scores.text_offset, scores.tokens, strict=True)
        assert all(choice.text.startswith(one, at) for at, one in pairs)
        assert len(scores.tokens) == len(ids) + 1, "the end of the turn counts"
    engine = service.served_models.get("tiny").engine
    before = engine._batch.token_count.forwarded
    as_ids = scored(client, [tokenizer.encode(prompt) for prompt in prompts], max_tokens=0)
    assert engine._batch.token_count.forwarded - before == 18, "each token once"
    for with_answer, without in zip(choices, as_ids, strict=True):
        assert without.logprobs.tokens == with_answer.logprobs.tokens[:-1]
        expected = with_answer.logprobs.token_logprobs[1:-1]
        assert without.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-5)
        assert without.finish_reason == "length"
    given: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 1, "logprobs": 1}
    stream = client.completions.create(prompt=prompts[0], echo=True, stream=True, **given)
    parts = [chunk.choices[0] for chunk in stream]
    assert "".join(part.text for part in parts) == choices[0].text
    assert [one for part in parts for one in part.logprobs.tokens] == choices[0].logprobs.tokens
    (unscored,) = scored(client, prompts[0], logprobs=None)
    assert unscored.text == choices[0].text
    (whole,) = scored(client, [[7] * 96], max_tokens=0)
    assert len(whole.logprobs.tokens) == 96, "a prompt may fill the window"


@pytest.mark.parametrize("options", [{}, {"stop": ["cat", "you"]}, {"logprobs": True}])
def test_token_ids_are_all_that_were_drawn(client: openai.OpenAI, options: dict[str, Any]) -> None:
    more: dict[str, Any] = {"n": 3, "max_tokens": 40, "extra_body": {"return_token_ids": True}}
    whole = ask(client, **more, **options)
    prompt = whole.prompt_token_ids
    assert len(prompt) == whole.usage.prompt_tokens
    counted = [len(choice.token_ids) for choice in whole.choices]
    assert sum(counted) == whole.usage.completion_tokens
    if "stop" not in options:
        ends = [choice.token_ids[-1] == 3 for choice in whole.choices]
        assert ends == [choice.finish_reason == "stop" for choice in whole.choices]
    for choice in whole.choices:
        if choice.logprobs is not None:
            tokens = choice.logprobs.content
            assert len(tokens) == len(choice.token_ids)
            assert "".join(one.token for one in tokens) == choice.message.content
    streamed: dict[int, list[int]] = {}
    prompts = []
    for chunk in ask(client, stream=True, **more, **options):
        prompts += [chunk.prompt_token_ids] if "prompt_token_ids" in chunk.model_extra else []
        for choice in chunk.choices:
            streamed.setdefault(choice.index, []).extend(getattr(choice, "token_ids", ()))
    assert streamed == {choice.index: choice.token_ids for choice in whole.choices}
    assert prompts == [prompt] * 3
    (completed,) = client.completions.create(
        model="tiny", prompt=[7, 8], max_tokens=5, extra_body={"return_token_ids": True}
    ).choices
    assert completed.prompt_token_ids == [7, 8]
    assert 1 <= len(completed.token_ids) <= 5


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_leaves_frees_its_places(
    service: Running, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    batch = service.served_models.get("tiny").engine._batch
    steps: list[int] = []
    step = batch.step

    def slowly() -> list[Progress]:
        steps.append(len(batch.rows))
        time.sleep(0.02 if len(batch.rows) else 0)
        return step()

    monkeypatch.setattr(batch, "step", slowly)
    # Seven greedy answers to this prompt contain no end token.
    options: dict[str, Any] = {"n": 7, "temperature": 0, "max_tokens": 85, "stream": is_streamed}

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=service.base_url, api_key="any") as client:
            request = client.chat.completions.create(model="tiny", messages=HELLO, **options)
            task = asyncio.ensure_future(request)
            while max(steps, default=0) < 7:
                await asyncio.sleep(0.01)
            if is_streamed:
                await (await task).close()
            task.cancel()

    asyncio.run(leave())
    deadline = time.monotonic() + 30
    while len(batch.rows) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(batch.rows) == 0
    assert steps.count(7) < 70


@pytest.mark.parametrize(
    ("option", "value"),
    [("logit_bias", {"1": 1}), ("frequency_penalty", 0.5), ("modalities", ["audio"])],
)
def test_an_option_that_is_not_supported_is_refused_by_name(
    client: openai.OpenAI, option: str, value: Any
) -> None:
    with pytest.raises(openai.BadRequestError, match=f"'{option}'") as caught:
        ask(client, **{option: value})
    assert (caught.value.param, caught.value.code) == (option, "unsupported_parameter")


def test_options_without_effect_are_no_fault(client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    inert = {"frequency_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
    inert |= {"metadata": {"run": "1"}, "user": "me", "reasoning_effort": "low", "store": True}
    inert |= {"safety_identifier": "a", "prompt_cache_key": "b", "verbosity": "low"}
    inert |= {"service_tier": "flex", "parallel_tool_calls": False}
    assert ask(client, **inert).choices[0].message.content == plain


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"content": 3}]}, "messages.0"),
        ({"messages": [[]]}, "messages.0"),
        ({"messages": "hello"}, "messages"),
        ({"extra_body": {"temprature": 0.5}}, "'temprature'"),
        ({"messages": [{"role": "system", "content": "x"}]}, "chat template refused"),
        ({"messages": [{"role": "user", "content": "cat " * 200}]}, "window of 96"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 101}, "this service allows 100"),
        ({"n": 129}, "129 answers"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs need"),
        ({"stream_options": {"include_usage": True}}, "stream_options need"),
        ({"seed": 1 << 70}, "seed"),
        ({"n": True}, "'n'"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "give one"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "b" * 513}}, "512"),
        ({"user": "u" * 513}, "user"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"service_tier": "first"}, "service_tier"),
        ({"extra_body": {"top_k": -2}}, "top_k"),
    ],
)
def test_wrong_fields_are_named(client: openai.OpenAI, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        ask(client, **changes)


@pytest.mark.parametrize("prompt", ["", ["good day", ""], [[7], []]])
def test_a_prompt_without_tokens_is_refused(client: openai.OpenAI, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=prompt)
    assert caught.value.param == "prompt"


def test_an_unknown_model_or_route_is_a_json_error(service: Running) -> None:
    for method, path in [("GET", "/v1/nothing"), ("GET", "/v1/chat/completions"), ("GET", "/")]:
        reply = httpx.request(method, service.root + path)
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["type"] == "invalid_request_error"
    body = {"model": "../../etc/passwd", "messages": HELLO}
    reply = httpx.post(f"{service.base_url}/chat/completions", json=body)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b'"x"',
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"n": NaN}',
            b"1" * 5000,
        ),
        rb'{"model": "tiny", "messages": [{"role": "user", "content": "\ud800"}]}',
    ],
)
def test_a_body_that_is_no_object_or_no_text_is_a_json_error(
    service: Running, content: bytes
) -> None:
    reply = httpx.post(f"{service.base_url}/chat/completions", content=content)
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_limits_are_checked_before_anything_is_computed(tiny_model_dir: Path) -> None:
    limits = {"max_body_bytes": 2000, "max_streams": 1, "max_waiting": 1}
    with (
        running({"tiny": str(tiny_model_dir)}, **limits) as service,
        openai.OpenAI(base_url=service.base_url, api_key="any", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError, match="2000 bytes") as caught:
            ask(client, messages=[{"role": "user", "content": "cat " * 1000}])
        assert caught.value.status_code == 413
        options: dict[str, Any] = {"n": 20, "max_tokens": 85, "stream": True}
        with ask(client, **options), pytest.raises(openai.RateLimitError, match="1 streams"):
            ask(client, **options)
        parts = (b"x" * 500 for _ in range(9))
        reply = httpx.post(f"{service.base_url}/chat/completions", content=parts)
        assert reply.status_code == 413
        with pytest.raises(openai.RateLimitError, match="allows 1") as refused:
            client.completions.create(model="tiny", prompt=["cat", "mat"], max_tokens=2)
        assert refused.value.response.headers["retry-after"] == "1"


def test_a_token_is_required_if_configured(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "let me in")
    with running({"tiny": str(tiny_model_dir)}, token_variable="MY_TOKEN") as service:
        for token, status in (("another", 401), ("let me i", 401), ("", 401), ("let me in", 200)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            reply = httpx.get(f"{service.base_url}/models", headers=headers)
            assert reply.status_code == status
            assert status == 200 or "token" in reply.json()["error"]["message"]
        assert httpx.get(f"{service.root}/health").json() == {"status": "ok"}


def test_pages_of_other_sites_are_refused(service: Running) -> None:
    others = {"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "http://["}
    for header in others:
        reply = httpx.get(f"{service.base_url}/models", headers=header)
        assert reply.status_code == 403
        assert says(reply.json()["error"]["message"], *header.values())
    reply = httpx.get(f"{service.base_url}/models", headers={"Origin": "http://localhost:3000"})
    assert reply.status_code == 200
