"""Answers in JSON, of schemas, and as calls of tools, as the official client requests them."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.serve.running import Running, running

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"$ref": "#/$defs/count"},
        "kind": {"enum": ["caf\u00e9", "bar"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["count", "kind", "flags"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("bytes")
    make_language_model(folder, window=2048, tokenizer=make_byte_tokenizer())
    with running({"bytes": str(folder), "tiny": str(tiny_model_dir)}) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=service.base_url, api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    given: dict[str, Any] = {"model": "bytes", "messages": HELLO, "seed": 1, "max_tokens": 400}
    return client.chat.completions.create(**(given | changes))


def called(message: Any) -> list[tuple[str, str]]:
    calls = [call.function for call in message.tool_calls or ()]
    return [(call.name, call.arguments) for call in calls]


def joined(chunks: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream: content, calls and reason of the end."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"content": "", "calls": [], "end": None})
            one["content"] += choice.delta.content or ""
            one["calls"] += called(choice.delta)
            one["end"] = choice.finish_reason or one["end"]
    return found


@pytest.fixture
def needs_library() -> None:
    pytest.importorskip("llguidance", reason="needs pip install 'nip_astra[structured]'")


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize("options", [{"temperature": 1}, {"temperature": 0}, {"top_p": 0.5}])
def test_answers_keep_to_a_schema_whole_and_streamed(
    client: openai.OpenAI, options: dict[str, Any]
) -> None:
    whole = ask(client, n=4, logprobs=True, response_format=FORM, **options)
    texts = [choice.message.content for choice in whole.choices]
    for choice, text in zip(whole.choices, texts, strict=True):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice.finish_reason == "stop"
        assert "".join(one.token for one in choice.logprobs.content) == text
    streamed = joined(ask(client, n=4, response_format=FORM, stream=True, **options))
    assert [streamed[place]["content"] for place in range(4)] == texts


@pytest.mark.usefixtures("needs_library")
def test_rows_of_a_batch_have_grammars_of_their_own(service: Running) -> None:
    from tests.serve.test_engine import answer_together

    engine = service.served_models.get("bytes").engine
    grammars = ['start: "yes" | "no"', None, r"start: /[a-f]{5,9}/", None]
    requests = [
        {"prompt": (2, 9), "max_tokens": 12, "seed": seed, "grammar": grammars[seed % 4]}
        for seed in range(12)
    ]
    together = [one.text for one in answer_together(engine, requests)]
    assert together == [engine.answer(**request)[0].text for request in requests]
    assert set(together[::4]) <= {"yes", "no"}
    assert all(5 <= len(text) <= 9 and set(text) <= set("abcdef") for text in together[2::4])
    assert len(set(together[1::2])) == 6, "rows without a grammar are free"


@pytest.mark.usefixtures("needs_library")
def test_an_object_that_is_cut_ends_by_length(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=9, response_format={"type": "json_object"}).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(("choice", "names"), [("required", {"count", "stop"}), (NAMED, {"count"})])
def test_calls_that_are_required_are_made(
    client: openai.OpenAI, choice: Any, names: set[str]
) -> None:
    options: dict[str, Any] = {"n": 6, "tools": TOOLS, "tool_choice": choice}
    options |= {"parallel_tool_calls": False, "max_tokens": 1000}
    whole = ask(client, **options).choices
    done = [one for one in whole if one.finish_reason != "length"]
    assert done, "the other function takes any object, which may not end"
    found = set()
    for one in done:
        (call,) = one.message.tool_calls
        assert one.finish_reason == "tool_calls"
        assert one.message.content is None
        found.add(call.function.name)
        if call.function.name == "count":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert found <= names
    streamed = joined(ask(client, stream=True, **options))
    for one in whole:
        assert streamed[one.index]["calls"] == called(one.message)
        assert streamed[one.index]["end"] == one.finish_reason
        assert streamed[one.index]["content"] == (one.message.content or "")


def test_results_of_tools_are_shown_to_the_model(client: openai.OpenAI) -> None:
    function = {"name": "count", "arguments": '{"count": 3}'}
    call = {"id": "call_1", "type": "function", "function": function}
    # As the client gives back the message of an answer.
    asked = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    more: dict[str, Any] = {"max_tokens": 8, "extra_body": {"return_token_ids": True}}
    answer = ask(client, messages=[*HELLO, asked, result], tools=TOOLS, **more)
    shown = make_byte_tokenizer().decode(answer.prompt_token_ids)
    text = f'<tool_call>\n{{"name": "count", "arguments": {function["arguments"]}}}\n</tool_call>'
    assert shown.endswith(f"assistant: {text}<end>tool: 3<end>assistant: ")
    for tool in TOOLS:
        assert (
            json.loads(shown.removeprefix("<bos>").split("\n")[TOOLS.index(tool)])
            == tool["function"]
        )
    none = ask(client, tools=TOOLS, tool_choice="none", max_tokens=8)
    assert none.usage == ask(client, max_tokens=8).usage


@pytest.mark.parametrize(
    ("changes", "param", "fact"),
    [
        ({"tools": TOOLS, "model": "tiny"}, "tools", "'tiny'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "a b"),
        ({"tool_choice": "required"}, "", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "x"}}}, "", "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format", "regex"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0", "tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0", "content"),
    ],
)
def test_forms_that_cannot_be_had_are_refused_by_name(
    client: openai.OpenAI, changes: dict[str, Any], param: str, fact: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **changes)
    assert (caught.value.param or "").startswith(param)
    assert fact in str(caught.value)


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"model": "tiny", "response_format": FORM}, "the vocabulary of 23 tokens"),
        ({"response_format": {**FORM, "json_schema": {"name": "a", "schema": {"not": {}}}}}, "not"),
    ],
)
def test_schemas_and_vocabularies_without_support_are_named(
    client: openai.OpenAI, changes: dict[str, Any], fact: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=fact) as caught:
        ask(client, **changes)
    assert caught.value.param == "response_format"


def test_without_the_library_its_extra_is_named(
    service: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    vars(service.served_models.get("bytes").engine._batch).pop("grammars", None)
    with pytest.raises(openai.BadRequestError, match=r"nip_astra\[structured\]"):
        ask(client, response_format=FORM)
