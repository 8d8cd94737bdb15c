"""Answers as JSON, by schemas, and as tool calls, as the official client requests them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from transformers import AddedToken

from tests.kit.messages import says
from tests.kit.tiny import make_byte_tokenizer, make_language_model
from tests.serve.running import Running, running

HELLO = [{"role": "user", "content": "hello"}]
WITH_IDS = {"return_token_ids": True}
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
NEGATED = {**FORM, "json_schema": {"name": "a", "schema": {"not": {}}}}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "count"}}
needs_library = pytest.mark.skipif(
    find_spec("llguidance") is None, reason="needs pip install 'nip_astra[structured]'"
)
MARKS = ["[TOOL_CALLS]", "[ARGS]"]
CALLS = {
    "listed": (
        "[TOOL_CALLS] [{% for call in m.tool_calls %}"
        "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
        '"id": "{{ call.id }}"}{{ ", " if not loop.last }}{% endfor %}]'
    ),
    "marked": (
        "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
        "{{ call.function.arguments | tojson }}{% endfor %}"
    ),
}
"""Calls in Mistral's two forms, by the name of the served model."""


def mistral_tokenizer(form: str) -> Any:
    tokenizer = make_byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = (
        "<bos>{% for tool in tools or [] %}{{ tool.function | tojson }}\n{% endfor %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        f"{{% if m.tool_calls %}}{CALLS[form]}{{% endif %}}<end>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models = {"tiny": str(tiny_model_dir)}
    for name in ("bytes", *CALLS):
        tokenizer = mistral_tokenizer(name) if name in CALLS else make_byte_tokenizer()
        folder = tmp_path_factory.mktemp(name)
        models[name] = str(make_language_model(folder, window=2048, tokenizer=tokenizer))
    with running(models) as service:
        yield service


def ask(client: openai.OpenAI, **changes: Any) -> Any:
    given: dict[str, Any] = {"model": "bytes", "messages": HELLO, "seed": 1, "max_tokens": 400}
    return client.chat.completions.create(**(given | changes))


def called(message: Any) -> list[tuple[str, str]]:
    calls = [call.function for call in message.tool_calls or ()]
    return [(call.name, call.arguments) for call in calls]


def joined(chunks: Any) -> dict[int, dict[str, Any]]:
    """The choices of a stream: content, tool calls and finish reason."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = choices.setdefault(part.index, {"content": "", "calls": [], "end": None})
            choice["content"] += part.delta.content or ""
            choice["calls"] += called(part.delta)
            choice["end"] = part.finish_reason or choice["end"]
    return choices


@needs_library
@pytest.mark.parametrize("options", [{"temperature": 1}, {"temperature": 0}, {"top_p": 0.5}])
def test_answers_keep_to_a_schema(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = ask(client, n=4, logprobs=True, response_format=FORM, **options).choices
    streamed = joined(ask(client, n=4, response_format=FORM, stream=True, **options))
    for choice in whole:
        text = choice.message.content
        jsonschema.validate(json.loads(text), SCHEMA)
        assert choice.finish_reason == "stop"
        assert "".join(one.token for one in choice.logprobs.content) == text
        assert streamed[choice.index]["content"] == text


@needs_library
def test_an_object_that_is_cut_ends_by_length(client: openai.OpenAI) -> None:
    choice = ask(client, max_tokens=9, response_format={"type": "json_object"}).choices[0]
    assert (choice.finish_reason, choice.message.content[0]) == ("length", "{")


@needs_library
@pytest.mark.parametrize(("choice", "names"), [("required", {"count", "stop"}), (NAMED, {"count"})])
def test_required_calls_are_made(client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    options: dict[str, Any] = {"n": 6, "tools": TOOLS, "tool_choice": choice}
    options |= {"parallel_tool_calls": False, "max_tokens": 1000}
    whole = ask(client, **options).choices
    done = [one for one in whole if one.finish_reason != "length"]
    assert done, "the other function takes any object, which may not end"
    for one in done:
        (call,) = one.message.tool_calls
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        assert call.function.name in names
        if call.function.name == "count":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    streamed = joined(ask(client, stream=True, **options))
    for one in whole:
        parts = {"calls": called(one.message), "end": one.finish_reason}
        assert streamed[one.index] == parts | {"content": one.message.content or ""}


@needs_library
@pytest.mark.parametrize("form", CALLS)
def test_mistrals_calls_are_read_streamed_and_given_back(client: openai.OpenAI, form: str) -> None:
    options: dict[str, Any] = {"model": form, "n": 6, "tools": TOOLS[:1], "max_tokens": 600}
    options |= {"tool_choice": "required", "temperature": 0.7}
    whole = ask(client, **options).choices
    ended = [one.message for one in whole if one.finish_reason == "tool_calls"]
    assert len(ended) >= 3
    for message in ended:
        assert message.content is None
        for name, arguments in called(message):
            assert name == "count"
            jsonschema.validate(json.loads(arguments), SCHEMA)
    streamed = joined(ask(client, stream=True, **options))
    assert [streamed[one.index]["calls"] for one in whole] == [called(one.message) for one in whole]
    single = ask(client, **options, parallel_tool_calls=False).choices
    assert {len(choice.message.tool_calls or [0]) for choice in single} == {1}
    result = {"role": "tool", "content": "3"}
    results = [{**result, "tool_call_id": call.id} for call in ended[0].tool_calls]
    given = [*HELLO, ended[0].model_dump(), *results]
    answer = ask(client, model=form, messages=given, max_tokens=2, extra_body=WITH_IDS)
    shown = mistral_tokenizer(form).decode(answer.prompt_token_ids)
    assert says(shown, "[TOOL_CALLS]", "tool: 3<end>")


@pytest.mark.parametrize("form", CALLS)
def test_marks_of_calls_are_drawn_only_with_tools(client: openai.OpenAI, form: str) -> None:
    mark = mistral_tokenizer(form).convert_tokens_to_ids("[TOOL_CALLS]")
    more: dict[str, Any] = {"model": form, "n": 16, "max_tokens": 120, "temperature": 2}
    more["extra_body"] = WITH_IDS
    for tools, is_drawn in ((TOOLS, True), ([], False)):
        choices = ask(client, **more, **({"tools": tools} if tools else {})).choices
        drawn = [one for one in choices if mark in one.token_ids]
        assert bool(drawn) is is_drawn
        for one in choices:
            has_calls = bool(one.message.tool_calls)
            assert has_calls or ("[TOOL_CALLS]" in one.message.content) == (one in drawn)


def test_results_of_tools_are_shown_to_the_model(client: openai.OpenAI) -> None:
    function = {"name": "count", "arguments": '{"count": 3}'}
    call = {"id": "call_1", "type": "function", "function": function}
    # In the form in which the client returns an answer's message.
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    more: dict[str, Any] = {"max_tokens": 8, "tools": TOOLS}
    answer = ask(client, messages=[*HELLO, message, result], extra_body=WITH_IDS, **more)
    shown = make_byte_tokenizer().decode(answer.prompt_token_ids)
    text = f'<tool_call>\n{{"name": "count", "arguments": {function["arguments"]}}}\n</tool_call>'
    assert shown.endswith(f"assistant: {text}<end>tool: 3<end>assistant: ")
    lines = shown.removeprefix("<bos>").split("\n")[: len(TOOLS)]
    assert [json.loads(line) for line in lines] == [tool["function"] for tool in TOOLS]
    none = ask(client, tool_choice="none", **more)
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
        # Known only to the library.
        ({"model": "tiny", "response_format": FORM}, "response_format", "23 tokens"),
        ({"response_format": NEGATED}, "response_format", "not"),
    ],
)
@needs_library
def test_forms_that_are_not_supported_are_refused_by_name(
    client: openai.OpenAI, changes: dict[str, Any], param: str, fact: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=fact) as caught:
        ask(client, **changes)
    assert (caught.value.param or "").startswith(param)


@needs_library
def test_a_schema_beyond_a_limit_is_a_bad_request(client: openai.OpenAI) -> None:
    large = {"type": "object", "properties": {"a": {"enum": ["x" * 16_000]}}}
    for options in (
        {"response_format": {**FORM, "json_schema": {"name": "a", "schema": large}}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": large}}],
            "tool_choice": "required",
        },
    ):
        with pytest.raises(openai.BadRequestError, match="15000"):
            client.chat.completions.create(model="bytes", messages=HELLO, **options)  # type: ignore[call-overload]


def test_without_the_library_its_extra_is_named(
    service: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    vars(service.served_models.get("bytes").engine._batch).pop("grammars", None)
    with pytest.raises(openai.BadRequestError, match=r"nip_astra\[structured\]"):
        ask(client, response_format=FORM)
