"""The routes for text and for tokens, as their clients call them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nip_astra.language_models.sequences import Progress
from nip_astra.language_models.sources import load_causal_lm, load_tokenizer
from nip_astra.serve.served_models import Engine
from nip_astra.serve.text_routes import EngineClient
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


def test_the_smallest_temperatures_are_greedy(client: openai.OpenAI) -> None:
    greedy, *others = [
        ask(client, temperature=temperature).choices[0].message.content
        for temperature in (0, 1e-8, 1e-38, 1e-320)
    ]
    assert others == [greedy] * 3


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
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, options: dict[str, Any]) -> None:
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


def test_an_echoed_prompt_is_scored(
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


def test_a_closed_stream_with_a_backlog_keeps_no_request_waiting(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()

    async def backlog(_: EngineClient, engine: Engine, requests: Any) -> AsyncIterator[Any]:
        while not is_over.is_set():
            yield 0, Progress(requests[0], 0, "text")

    monkeypatch.setattr(EngineClient, "stream", backlog)
    try:
        with ask(client, stream=True) as chunks:
            next(chunks)
        assert client.with_options(timeout=5).models.list()
    finally:
        is_over.set()


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
def test_unsupported_options_are_refused(client: openai.OpenAI, option: str, value: Any) -> None:
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
        ({"stop": ["a"] * 5}, "'stop' .* at most 4 items"),
        ({"top_logprobs": 2}, "400 - .*top_logprobs need logprobs"),
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


def test_a_prompt_without_tokens_is_refused(client: openai.OpenAI) -> None:
    for prompt, place in (("", "prompt"), (["good day", ""], "prompt"), ([[7], []], "prompt.1")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=prompt)
        assert caught.value.param == place


def test_an_unknown_model_or_route_is_a_json_error(service: Running) -> None:
    for path in ("/v1/nothing", "/v1/chat/completions", "/", "/v1/models/no-such-model"):
        reply = httpx.get(service.root + path)
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
def test_a_body_that_is_no_object_is_a_json_error(service: Running, content: bytes) -> None:
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


def test_a_token_may_be_required(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


PROMPT = [5, 9, 7]


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
        ({"max_tokens": 9999}, {}, "this service allows 100"),
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


def test_the_client_of_verifiers_reads_the_answers(service: Running, tiny_model_dir: Path) -> None:
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
