"""Chat models behind any HTTP service, by templates."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, ParameterError
from nip_astra.language_models.services.chat import (
    CHAT_MODELS,
    ChatAnswer,
    ChatMessage,
    ChatRequest,
    FailureReason,
    FinishReason,
    LimitParameters,
)
from nip_astra.language_models.services.chat_models.http import HttpChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel
from tests.kit.chat_stub import ChatStub, Reply, chat_stub
from tests.kit.misbehaving import MISBEHAVIOURS, misbehaving
from tests.language_models.services.requests import ask, failure, saying, texts

CONVERSATION: tuple[ChatMessage, ...] = (
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hi {{ seed }}"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "how are you?"},
)


def build(stub: ChatStub, **parameters: Any) -> HttpChatModel:
    values = {"url": f"{stub.base_url}/ask", "answer": "outputs.0.text"} | parameters
    return HttpChatModel(CHAT_MODELS.get("http").Parameters(**values))


def output(text: Any, **more: Any) -> Reply:
    return Reply(body=json.dumps({"outputs": [{"text": text}], **more}))


def test_a_template_is_filled_with_values_of_their_types() -> None:
    body = {
        "input": {"prompt": "{{ prompt }}", "all": "Talk:\n{{conversation}}\n"},
        "history": "{{ messages }}",
        "system": "{{ system }}",
        "options": {"n": "{{ max_tokens }}", "t": "{{ temperature }}", "seed": "{{ seed }}"},
        "fixed": [1, None, {"a": None}],
        "note": "at most {{ max_tokens }}",
    }
    request = ChatRequest(CONVERSATION, max_tokens=9, temperature=0.5, seed=4)
    with chat_stub([output("fine"), output("good")]) as stub:
        model = build(stub, body=body, headers={"X-Kind": "test"})
        (outcome,) = ask(model, request)
        ask(model, saying("hi", max_tokens=9, temperature=None))
    assert texts(outcome) == ["fine"]
    assert outcome.is_usage_estimated
    assert stub.paths == ["/v1/ask"] * 2
    assert stub.headers[0]["X-Kind"] == "test"
    talk = "\n".join(f"{message['role']}: {message['content']}" for message in CONVERSATION)
    assert stub.requests[0] == {
        "input": {"prompt": "how are you?", "all": f"Talk:\n{talk}\n"},
        "history": list(CONVERSATION),
        "system": "Be kind.",
        "options": {"n": 9, "t": 0.5, "seed": 4},
        "fixed": [1, None, {"a": None}],
        "note": "at most 9",
    }
    assert stub.requests[1]["options"] == {"n": 9}, "what has no value is left out"
    assert "system" not in stub.requests[1]


def test_secrets_come_from_the_environment_and_are_shown_and_stored_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "hidden-1")
    with chat_stub([output("fine"), Reply(400, body="no: hidden-1"), Reply(401)]) as stub:
        model = build(
            stub,
            url=f"{stub.base_url}/ask?key={{{{key}}}}",
            headers={"Authorization": "Bearer {{ key }}"},
            secrets={"key": "MY_KEY"},
        )
        assert texts(ask(model, saying("hi"))[0]) == ["fine"]
        refused = failure(ask(model, saying("hi"))[0])
        with pytest.raises(ConfigurationError) as caught:
            ask(model, saying("hi"))
    assert stub.headers[0]["Authorization"] == "Bearer hidden-1"
    assert stub.paths[0] == "/v1/ask?key=hidden-1"
    assert refused.reason is FailureReason.REFUSED
    shown = (str(model.parameters.to_dict()), model.place, refused.message, str(caught.value))
    assert not any("hidden-1" in text for text in shown)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(ConfigurationError, match="'MY_KEY'"):
        HttpChatModel(model.parameters)


@pytest.mark.parametrize(
    ("values", "fact"),
    [
        ({"body": {"x": "{{ prompts }}"}}, "prompts"),
        ({"body": {"x": "hello"}}, "messages"),
        ({"headers": {"Authorization": "Bearer s3cret"}}, "Authorization"),
        ({"headers": {"X-Api-Key": "{{ seed }}"}}, "X-Api-Key"),
        ({"url": "http://a.test/?api_key=s3cret"}, "api_key"),
        ({"url": "http://user:s3cret@a.test/"}, "password"),
        ({"url": "ftp://a.test/"}, "address"),
    ],
)
def test_wrong_templates_and_secrets_in_them_are_refused(values: dict[str, Any], fact: str) -> None:
    with pytest.raises(ParameterError, match=fact) as caught:
        CHAT_MODELS.get("http").Parameters(**{"url": "http://a.test/"} | values)
    assert "s3cret" not in str(caught.value)


def test_the_parts_of_a_response_are_read_at_their_paths() -> None:
    places = {"finish_reason": "why", "refusal": "no"}
    replies = [
        output("a"),
        output([{"type": "text", "text": "a"}]),
        output("half", why="length"),
        output(None, no="I cannot."),
        output("", why="length"),
        output("", why="content_filter"),
    ]
    with chat_stub(replies) as stub:
        model = build(stub, **places)
        samples = [ask(model, saying("hi"))[0].samples[0] for _ in replies]
    assert samples == [
        ChatAnswer("a"),
        ChatAnswer("a"),
        ChatAnswer("half", FinishReason.LENGTH),
        ChatAnswer("", refusal="I cannot."),
        ChatAnswer("", FinishReason.LENGTH),
        ChatAnswer("", FinishReason.CONTENT_FILTER),
    ]


BAD = {
    **{status: "status " + status for status in ("400", "429", "503")},
    "half": "body: half",
    "null": "body: null",
    "a list": "body: a list",
    "deep": "body: deep and closed",
    "no text": "body: no text at all",
    "no choices": "body: no choices",
    "a number": "content: a number",
    "ends": "ends in the body",
    "reset": "reset",
    "noise": "noise",
    "endless": "endless body",
    "30 MB": "30 MB of text",
    "400 KB": "400 KB of text",
    "gzip bomb": "gzip bomb",
    "no room": "no room: OpenAI",
    "redirect": "a redirect to itself",
    "404": "status 404",
}


@pytest.mark.parametrize("name", BAD)
def test_a_service_that_misbehaves_has_the_outcome_of_openais(name: str) -> None:
    misbehaviour = MISBEHAVIOURS[BAD[name]]
    limits = LimitParameters(num_retries=1, backoff=0.0, max_retry_after=0.1)
    with misbehaving(misbehaviour.send) as server:
        parameters = CHAT_MODELS.get("http").Parameters(url=server.address, timeout=4.0)
        model = RetryingChatModel(HttpChatModel(parameters), limits)
        try:
            outcome = str(failure(ask(model, saying("hi"))[0]).reason)
        except ConfigurationError as error:
            outcome = type(error).__name__
    assert outcome in misbehaviour.outcomes
