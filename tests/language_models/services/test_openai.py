"""A model behind a service: its requests, its answers, and the outcomes of faults."""

from __future__ import annotations

import json
import sys
import threading
import time
from email.utils import formatdate
from typing import Any

import pytest

from nip_astra.errors import ConfigurationError, MissingDependencyError
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    FailureReason,
    FinishReason,
    LimitParameters,
)
from nip_astra.language_models.services.chat_models.openai import OpenAIChatModel
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.rollouts.messages import ToolCall
from tests.kit.chat_stub import ChatStub, Reply, chat_stub
from tests.kit.messages import says
from tests.language_models.services.requests import ask, completion, failure, saying, texts

pytest.importorskip("openai")


def build(stub: ChatStub, **parameters: Any) -> OpenAIChatModel:
    values = {"base_url": stub.base_url, "model": "model-1"} | parameters
    return OpenAIChatModel(OpenAIChatModel.Parameters(**values))


def test_options_are_sent_and_defaults_of_the_service_are_not() -> None:
    with chat_stub([completion("a"), completion("b"), completion("c")]) as stub:
        model = build(stub, extra_body={"top_k": 5})
        options = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9}
        ask(model, saying("hi", **options, stop=("\n",), seed=2**31 + 4))
        ask(model, saying("hi", max_tokens=None, temperature=None))
        other = build(stub, token_field="max_completion_tokens", sends_seed=False)
        ask(other, saying("hi", max_tokens=9, temperature=None, seed=3))
    user = {"role": "user", "content": "hi"}
    assert stub.paths == ["/v1/chat/completions"] * 3
    assert stub.requests[0] == {
        "model": "model-1",
        "messages": [user],
        **options,
        "stop": ["\n"],
        "seed": 4,
        "top_k": 5,
    }
    assert stub.requests[1] == {"model": "model-1", "messages": [user], "top_k": 5}
    assert set(stub.requests[2]) == {"model", "messages", "max_completion_tokens"}


def test_an_answer_holds_text_end_refusal_logprobs_and_usage() -> None:
    tokens = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}
    refusing = {"message": {"role": "assistant", "content": None, "refusal": "I cannot."}}
    replies = [
        completion("ab", finish_reason="length", logprobs=tokens),
        completion("x", **refusing),
        completion(None, finish_reason="content_filter"),
        completion(None, finish_reason="length"),
    ]
    with chat_stub(replies) as stub:
        model = build(stub)
        outcomes = [ask(model, saying(str(n), needs_logprobs=True))[0] for n in range(4)]
    assert [outcome.samples[0] for outcome in outcomes] == [
        ChatAnswer("ab", FinishReason.LENGTH, token_logprobs=(-0.5, -1.0)),
        ChatAnswer("", FinishReason.STOP, refusal="I cannot."),
        ChatAnswer("", FinishReason.CONTENT_FILTER),
        ChatAnswer("", FinishReason.LENGTH),
    ]
    assert outcomes[0].usage == (7, 3)
    assert stub.requests[0]["logprobs"] is True


def test_samples_are_requested_singly_with_own_seeds_or_together() -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        return completion(*["x"] * body.get("n", 1))

    def several(stub: ChatStub, **parameters: Any) -> RetryingChatModel:
        return RetryingChatModel(build(stub, **parameters), LimitParameters(num_retries=0))

    with chat_stub(answer) as stub:
        (outcome,) = ask(several(stub), saying("hi", num_samples=3, seed=7))
        assert texts(outcome) == ["x"] * 3
        assert outcome.usage == (21, 9)
        alone = {body["seed"] for body in stub.requests}
        ask(several(stub), saying("hi", num_samples=2, first_sample=1, seed=7))
        again = {body["seed"] for body in stub.requests[3:]}
        assert (len(alone), 7 in alone, again < alone) == (3, True, True)
        (outcome,) = ask(several(stub, samples_per_request=2), saying("hi", num_samples=3))
        assert sorted(body.get("n", 1) for body in stub.requests[5:]) == [1, 2]
        assert texts(outcome) == ["x"] * 3
    with chat_stub([completion("a", "b")]) as stub:
        (outcome,) = ask(several(stub, samples_per_request=3), saying("hi", num_samples=3))
    assert texts(outcome) == ["a", "b", "<malformed>"]


FLAGGED = {"code": 403, "message": "flagged", "metadata": {"reasons": [], "flagged_input": "hi"}}
"""OpenRouter's refusal of a prompt: https://openrouter.ai/docs/errors."""


AZURE = {
    "message": "The prompt triggered the content management policy.",
    "code": "content_filter",
    "status": 400,
    "innererror": {"code": "ResponsibleAIPolicyViolation"},
}
"""Azure's refusal of a prompt."""
TOO_MANY_TOKENS = {
    "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 "
    "tokens. Reduce 'max_tokens' or 'max_completion_tokens'.",
    "code": 400,
}
"""A conversation that exceeds the window, as vLLM rejects it."""


@pytest.mark.parametrize(("status", "error"), [(403, FLAGGED), (400, AZURE)])
def test_a_prompt_that_a_content_filter_refuses_is_a_refusal(
    status: int, error: dict[str, Any]
) -> None:
    with chat_stub([Reply(status, body=json.dumps({"error": error}))]) as stub:
        (outcome,) = ask(build(stub), saying("hi"))
    (answer,) = outcome.samples
    assert isinstance(answer, ChatAnswer)
    assert answer.is_refused
    assert answer.refusal == error["message"]


NEW_MODEL = {
    "message": "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
    "'max_completion_tokens' instead.",
    "param": "max_tokens",
    "code": "unsupported_parameter",
}
OLD_SERVICE = {
    "message": "Unrecognized request argument supplied: max_completion_tokens",
    "code": "unknown_parameter",
}


@pytest.mark.parametrize(
    ("error", "rejected", "accepted"),
    [
        (NEW_MODEL, "max_tokens", "max_completion_tokens"),
        (OLD_SERVICE, "max_completion_tokens", "max_tokens"),
    ],
)
def test_the_name_of_the_token_limit_that_the_service_requests_is_used_from_then_on(
    error: dict[str, Any], rejected: str, accepted: str
) -> None:
    def answer(body: dict[str, Any], number: int) -> Reply:
        if rejected in body:
            return Reply(400, body=json.dumps({"error": error}))
        return completion("hi")

    with chat_stub(answer) as stub:
        model = build(stub, token_field=rejected)
        outcomes = [ask(model, saying("a", max_tokens=9))[0] for _ in range(2)]
    assert [texts(outcome) for outcome in outcomes] == [["hi"]] * 2
    fields = [{name for name in body if name.startswith("max_")} for body in stub.requests]
    assert fields == [{rejected}, {accepted}, {accepted}]


def test_a_service_that_rejects_both_names_ends_the_run_after_two_requests() -> None:
    rejected = Reply(400, body=json.dumps({"error": NEW_MODEL}))
    with (
        chat_stub([rejected, rejected]) as stub,
        pytest.raises(ConfigurationError, match="max_completion_tokens"),
    ):
        ask(build(stub), saying("a"))
    assert len(stub.requests) == 2


CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"text": "ab"},
        ),
        ({"content": [{"type": "output_text", "text": "a"}]}, {"text": "a"}),
        (
            {"content": [{"type": "image_url", "image_url": {}}, {"type": "text", "text": "a"}]},
            {"text": "a"},
        ),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                    {"type": "text", "text": "a"},
                ]
            },
            {"text": "a", "reasoning": "hm"},
        ),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, {"text": "", "refusal": "no"}),
        ({"content": "a", "reasoning_content": "hm"}, {"text": "a", "reasoning": "hm"}),
        ({"content": "a", "reasoning": "hm"}, {"text": "a", "reasoning": "hm"}),
        (
            {"content": None, "tool_calls": [CALL]},
            {"text": "", "calls": (ToolCall("look", {"at": "x"}),)},
        ),
        (
            {"content": "", "tool_calls": [{"function": {"name": "go", "arguments": ""}}, 3]},
            {"text": "", "calls": (ToolCall("go", {}),)},
        ),
    ],
)
def test_parts_reasoning_and_calls_of_a_message_are_read(
    message: dict[str, Any], expected: dict[str, Any]
) -> None:
    with chat_stub([completion("x", message={"role": "assistant", **message})]) as stub:
        (outcome,) = ask(build(stub), saying("hi"))
    assert outcome.samples == (ChatAnswer(**expected),)


@pytest.mark.parametrize("name", ["content_filter", "refusal", "SAFETY"])
def test_an_answer_that_the_provider_withholds_is_a_refusal(name: str) -> None:
    with chat_stub([completion(None, finish_reason=name)]) as stub:
        (outcome,) = ask(build(stub), saying("hi"))
    assert outcome.samples == (ChatAnswer("", FinishReason.CONTENT_FILTER),)


def test_an_answer_cut_before_its_first_word_is_missing_and_others_are_not() -> None:
    replies = [
        completion(None, finish_reason="length"),
        completion("", finish_reason="length"),
        completion(None, finish_reason="length", message={"role": "x", "reasoning": "hm"}),
        completion("a", finish_reason="length"),
        completion("", finish_reason="stop"),
        completion(None, finish_reason="content_filter"),
        completion("", finish_reason="length", message={"content": None, "tool_calls": [CALL]}),
    ]
    with chat_stub(replies) as stub:
        model = build(stub)
        samples = [ask(model, saying("hi"))[0].samples[0] for _ in replies]
    answers = [sample for sample in samples if isinstance(sample, ChatAnswer)]
    expected = [True, True, True, False, False, False, False]
    assert [answer.is_missing for answer in answers] == expected


def test_a_response_of_any_length_is_read_up_to_a_bound_by_the_requested_tokens() -> None:
    long = completion("word " * 6_000_000)
    with chat_stub(lambda body, number: long) as stub:
        (outcome,) = ask(build(stub), saying("hi", max_tokens=18))
    assert failure(outcome).reason is FailureReason.TOO_LONG


IN_DAYS = formatdate(time.time() + 1e6, usegmt=True)


@pytest.mark.parametrize(
    ("reply", "reason", "wait"),
    [
        (Reply(429, body="wait", headers={"Retry-After": "7"}), "rate_limited", 7.0),
        (
            Reply(429, headers={"Retry-After": IN_DAYS}),
            "rate_limited",
            pytest.approx(1e6, rel=0.01),
        ),
        (Reply(400, body="unknown field response_format"), "unknown_form", 0.0),
        (Reply(200, body='{"error": {"code": 502, "message": "gone"}}'), "unavailable", 0.0),
        (Reply(200, body='{"error": {"code": 429, "message": "busy"}}'), "rate_limited", 0.0),
        (completion("half an ans", finish_reason="error"), "unavailable", 0.0),
        (Reply(400, body='{"error": {"message": "no", "code": "other"}}'), "refused", 0.0),
        (Reply(400, body=json.dumps({"error": TOO_MANY_TOKENS})), "context_length", 0.0),
        (Reply(413, body="Please reduce the length of the messages."), "context_length", 0.0),
        (Reply(400, body="request exceeds the available context size"), "context_length", 0.0),
    ],
    ids=[
        "busy",
        "busy_until",
        "unknown_form",
        "gone_behind",
        "busy_behind",
        "broken_off",
        "refused",
        "context_length",
        "too_large",
        "context_size",
    ],
)
def test_a_fault_is_data_with_its_reason(reply: Reply, reason: str, wait: float) -> None:
    """Beside the faults of `tests.kit.misbehaving`."""
    with chat_stub([reply]) as stub:
        request = saying("hi", response_format={"type": "json_object"})
        result = failure(ask(build(stub), request)[0])
        assert len(stub.requests) == 1, "the package repeats nothing by itself"
    assert (result.reason, result.retry_after) == (reason, wait)
    assert result.message


def test_a_closed_port_and_a_late_answer_are_failures() -> None:
    with chat_stub([]) as stub:
        pass
    gone = failure(ask(build(stub), saying("hi"))[0])
    assert gone.reason is FailureReason.UNAVAILABLE
    never = threading.Event()
    with chat_stub([Reply(waits_for=never)]) as stub:
        late = failure(ask(build(stub, timeout=0.2), saying("hi"))[0])
        never.set()
    assert late.reason is FailureReason.TIMEOUT
    assert late.message == "no answer in 0.2 s"


@pytest.mark.parametrize(
    "reply",
    [
        Reply(401, body="no such key secret-1"),
        Reply(302, headers={"Location": "http://127.0.0.1:9/v1/chat/completions"}),
        Reply(400, body='{"error": {"message": "no seed", "code": "unsupported_parameter"}}'),
        Reply(403, body='{"error": {"code": 403, "message": "no access", "metadata": null}}'),
        Reply(404, body="no model grammar-2"),
    ],
    ids=lambda reply: str(reply.status),
)
def test_faults_of_every_request_end_the_run_without_showing_the_key(
    reply: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret-1")
    with chat_stub([reply]) as stub:
        with pytest.raises(ConfigurationError) as caught:
            ask(build(stub, api_key_variable="MY_KEY"), saying("hi"))
        assert stub.headers[0]["Authorization"] == "Bearer secret-1"
    assert says(caught.value, reply.status, "base_url", "api_key_variable")
    assert "secret-1" not in str(caught.value)


def test_scripts_with_a_token_per_character_are_not_estimated_as_english() -> None:
    with chat_stub([completion("\u597d" * 40, usage=None)]) as stub:
        (outcome,) = ask(build(stub), saying("\u4f60" * 80))
    assert outcome.usage == (64, 30)


@pytest.mark.parametrize(
    "usage",
    [None, "many", {"prompt_tokens": "7"}, (-1, 3), (True, 3), {"prompt_tokens": 3}, (1e3, 2)],
    ids=str,
)
def test_an_invalid_usage_is_estimated_from_the_texts(usage: Any) -> None:
    with chat_stub([completion("x" * 40, usage=usage)]) as stub:
        (outcome,) = ask(build(stub), saying("y" * 80))
    assert outcome.is_usage_estimated
    assert outcome.usage == (24, 10)


def test_event_loops_may_change_and_no_key_is_sent_unless_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-strangers")
    with chat_stub(lambda body, number: completion(str(number))) as stub:
        model = build(stub)
        assert [texts(ask(model, saying("hi"))[0]) for _ in range(3)] == [["0"], ["1"], ["2"]]
    assert "Authorization" not in stub.headers[0]
    assert "not-for-strangers" not in json.dumps(stub.headers)


def test_missing_keys_keys_in_the_address_and_a_missing_package_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with chat_stub([]) as stub:
        with pytest.raises(ConfigurationError, match="'NOT_SET'"):
            build(stub, api_key_variable="NOT_SET")
        with pytest.raises(ConfigurationError, match="api_key_variable") as caught:
            build(stub, base_url="http://user:secret@127.0.0.1/v1")
        assert "secret" not in str(caught.value)
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(MissingDependencyError, match=r"nip_astra\[api\]"):
            build(stub)
