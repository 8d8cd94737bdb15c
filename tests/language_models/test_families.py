"""Messages of families of models, in the forms of their chat templates."""

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from typing import Any

import pytest

from nip_astra.errors import ModelAbilityError
from nip_astra.language_models.message_format import (
    MessageFormat,
    MessagePart,
    ParsedMessage,
    ReasoningPart,
    argument_schemas,
    detect_format,
)
from nip_astra.language_models.services.chat import render_chat
from nip_astra.rollouts.messages import ToolCall
from tests.kit.families import FAMILIES, HELLO, TOOL, WITH_THOUGHTS, WITH_TOOLS, Family
from tests.kit.tiny import make_byte_tokenizer

CALLS = {
    "a call": [ToolCall("note", {"text": "milk", "count": 2})],
    "no arguments": [ToolCall("note", {})],
    "two calls": [ToolCall("note", {"text": "milk"}), ToolCall("note", {"text": "tea"})],
    "nested": [ToolCall("note", {"place": {"at": [1, {"b": "x, {y}"}], "is_far": True}})],
    "lines and tags": [ToolCall("note", {"text": 'one\ntwo </tool_call> {"a": 1}] three'})],
    "tags of arguments": [
        ToolCall(
            "note", {"text": "a</parameter>\nb</arg_value>\nc</atem:parameter>\nd", "count": 1}
        )
    ],
    "digits": [ToolCall("note", {"text": "007", "count": 7})],
}
SCHEMAS = argument_schemas([TOOL])


@cache
def format_of(name: str) -> MessageFormat:
    return detect_format(FAMILIES[name].tokenizer())


def read(name: str, text: str, **options: Any) -> ParsedMessage:
    """The parts of a message, the same however it arrives."""
    message_format = format_of(name)
    options = {"tools": SCHEMAS, **options}
    whole = message_format.parse(text, **options)
    for size in (1, 7):
        parser = message_format.parser(**options)
        parts: list[MessagePart] = []
        for start in range(0, len(text), size):
            parts += parser.push(text[start : start + size])
        parts += parser.finish()
        texts = [part for part in parts if isinstance(part, str)]
        reasoning = [part.text for part in parts if isinstance(part, ReasoningPart)]
        assert ("".join(texts), "".join(reasoning) or None) == (whole.text, whole.reasoning)
        assert [p for p in parts if isinstance(p, ToolCall)] == [*whole.calls]
        assert parser.is_unfinished == whole.is_unfinished
    return whole


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_calls_come_back_as_the_template_writes_them(name: str, kind: str) -> None:
    family, calls = FAMILIES[name], CALLS[kind]
    if len(calls) > 1 and not family.has_two_calls:
        pytest.skip("the template has one call per message")
    text = family.write_calls(calls)
    assert read(name, text, begins_in_thought=False) == ParsedMessage(None, "", tuple(calls))
    if family.think is not None:
        considered = "Shall I? " + family.write_calls([ToolCall("note", {"text": "no"})])
        thoughtful = family.think("Hm.") + text
        assert astuple(read(name, thoughtful))[:3] == ("Hm.", "", tuple(calls))
        if family.call_start == "<tool_call>" or "<|tool_call" in family.call_start:
            # Channels begin another part with a call.
            parsed = read(name, family.think(considered) + text)
            assert (parsed.reasoning, parsed.calls) == (considered.strip(), tuple(calls))


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_a_thought_is_separated_from_the_text(name: str) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    assert format_of(name).opens_thought == family.opens_thought
    text = "Tea: 1 < 2.\n\nWell"
    assert read(name, family.think("First\nthis.") + family.say(text)) == ParsedMessage(
        "First\nthis.", text
    )
    without_tools = read(name, family.think("Hm.") + family.say(text), tools=None)
    assert (without_tools.reasoning, without_tools.text) == ("Hm.", text)


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_a_thought_that_is_cut_is_no_answer(name: str) -> None:
    family = FAMILIES[name]
    assert family.think is not None
    whole = family.think("I could call note. So")
    cut = whole[: whole.index(" So")]
    assert read(name, cut) == ParsedMessage("I could call note.", "", is_unfinished=True)
    if family.shows_tools and family.call_start == "<tool_call>":
        text = cut + family.write_calls(CALLS["a call"])
        assert read(name, text).calls == ()
        assert read(name, text).is_unfinished


@pytest.mark.parametrize("name", WITH_THOUGHTS)
def test_without_thinking_an_answer_is_text(name: str) -> None:
    family = FAMILIES[name]
    if family.thinking_off is None:
        pytest.skip("the template always thinks")
    prompt = family.tokenizer().apply_chat_template(
        [HELLO], tokenize=False, add_generation_prompt=True, **family.thinking_off
    )
    begins = format_of(name).begins_in_thought(prompt)
    assert not begins
    text = family.say("Tea.")
    assert read(name, text, begins_in_thought=begins) == ParsedMessage(None, "Tea.")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_marks_that_are_special_tokens_are_kept_in_the_text(name: str) -> None:
    family, message_format = FAMILIES[name], format_of(name)
    tokenizer = family.tokenizer()
    text = family.write_calls(CALLS["a call"])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert message_format.decode(tokenizer, [*ids, tokenizer.eos_token_id]) == text
    assert {*message_format.special_ids} <= {*family.special}
    drawn = {tokenizer.convert_tokens_to_ids(mark) for mark in family.special if mark in text}
    assert drawn <= {*message_format.shown_ids()}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_malformed_call_stays_text_and_is_reported(name: str) -> None:
    family = FAMILIES[name]
    whole = family.write_calls(CALLS["lines and tags"])
    cut = whole[: whole.index("two")]
    parsed = read(name, cut, begins_in_thought=False)
    assert parsed.calls == ()
    assert parsed.text.strip() == cut.strip()
    is_marked = family.call_start != '{"name"'
    assert [call.text.strip() for call in parsed.malformed] == [cut.strip()] * is_marked
    assert format_of(name).has_call_mark(parsed.text) == is_marked


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_used_where_the_template_shows_them(name: str) -> None:
    assert format_of(name).supports_tools == FAMILIES[name].shows_tools
    format_of(name).require_tools()


def test_tools_are_refused_where_calls_do_not_come_back() -> None:
    tokenizer = Family("lfm2").tokenizer()
    unwritten = detect_format(tokenizer)
    unknown = make_byte_tokenizer()
    unknown.chat_template = unknown.chat_template.replace("tool_call>", "use_tool>")
    unknown.name_or_path = "some/model"
    for message_format in (unwritten, detect_format(unknown)):
        assert message_format.shows_tools
        assert not message_format.supports_tools
        with pytest.raises(ModelAbilityError) as caught:
            message_format.require_tools()
    assert "some/model" in str(caught.value)
    assert "<use_tool>" in str(caught.value)


BEGIN, END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK = (
    "<\uff5ctool\u2581call\u2581begin\uff5c>{{ c.function.name }}<\uff5ctool\u2581sep\uff5c>"
    "{{ c.function.arguments | tojson }}<\uff5ctool\u2581call\u2581end\uff5c>"
)
OTHER_TEMPLATES = {
    "named_json": (BEGIN, DEEPSEEK, "", END),
    "action": (
        "<|START_ACTION|>[",
        '{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", '
        '"parameters": {{ c.function.arguments | tojson }}}',
        ", ",
        "]<|END_ACTION|>",
    ),
    "tool_call_list": (
        "<|tool_call|>[",
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        ", ",
        "]<|/tool_call|>",
    ),
}
"""Start of calls, a call, its separator, and the end, of families that `trl` does not have."""


@pytest.mark.parametrize("form", OTHER_TEMPLATES)
def test_calls_of_further_families_come_back(form: str) -> None:
    start, call, separator, end = OTHER_TEMPLATES[form]
    tokenizer = make_byte_tokenizer()
    old = tokenizer.chat_template
    begin, finish = old.index("{% for call in"), old.index("<end>")
    separated = f"{{{{ '{separator}' if not loop.last }}}}"
    calls = f"{start}{{% for c in m.tool_calls %}}{call}{separated}{{% endfor %}}{end}"
    tokenizer.chat_template = (
        f"{old[:begin]}{{% if m.tool_calls %}}{calls}{{% endif %}}{old[finish:]}"
    )
    message_format = detect_format(tokenizer)
    assert (message_format.form_name, message_format.supports_tools) == (form, True)
    parts = [call.as_message_part("x") for call in CALLS["two calls"]]
    answer: dict[str, Any] = {"role": "assistant", "content": "Well.", "tool_calls": parts}
    text = render_chat(tokenizer, [HELLO, answer], opens_answer=False, tools=[TOOL])
    text = text[text.index("Well.") : text.rindex("<end>")]
    assert message_format.parse(text, tools=SCHEMAS) == ParsedMessage(
        None, "Well.", tuple(CALLS["two calls"])
    )


def test_calls_as_deepseek_writes_them_in_code_come_back() -> None:
    call = DEEPSEEK.replace("{{ c.function.name }}", "function").replace(
        "{{ c.function.arguments | tojson }}", 'note\n```json\n{"text": "a\\nb"}\n```'
    )
    parsed = MessageFormat(form_name="named_json").parse(f"{BEGIN}{call}\n{END}", tools=SCHEMAS)
    assert parsed.calls == (ToolCall("note", {"text": "a\nb"}),)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"type": "string"}, '"7"', '"7"'),
        ({"type": "integer"}, "7", 7),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "number"}, " 0.5 ", 0.5),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": ["string", "null"]}, "none", "none"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "007", "007"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({}, "[1, 2]", [1, 2]),
        ({}, "one", "one"),
        ({"$ref": "#/$defs/word"}, "7", "7"),
        ({"$ref": "#/$defs/loop"}, "7", 7),
    ],
)
def test_an_argument_that_is_written_as_text_gets_the_type_of_its_schema(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    definitions = {"word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}
    tools = {"f": {"properties": {"a": schema}, "$defs": definitions}}
    call = (
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    (parsed,) = read("Qwen 3.5", call, begins_in_thought=False, tools=tools).calls
    assert parsed == ToolCall("f", {"a": value})
    assert type(parsed.arguments["a"]) is type(value)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_an_argument_with_many_closing_tags_takes_linear_time(name: str) -> None:
    family, parser = FAMILIES[name], format_of(name).parser(tools=SCHEMAS, begins_in_thought=False)
    word = "</tool_call> ] } "
    text = family.write_calls([ToolCall("note", {"text": word * 2000})])
    seen = 0
    cursor = parser._cursor
    feed = cursor.feed

    def count(piece: str) -> None:
        nonlocal seen
        feed(piece)
        seen += len(cursor._text)

    cursor.feed = count  # type: ignore[method-assign]
    parts = [part for letter in text for part in parser.push(letter)] + parser.finish()
    assert parts == [ToolCall("note", {"text": word * 2000})] or family.call_start == '{"name"'
    assert seen < 100 * len(text)


def test_rendered_offers_are_read_from_the_installed_templates() -> None:
    assert len({FAMILIES[name].template for name in WITH_TOOLS}) >= 12
    for name in WITH_TOOLS:
        text = render_chat(FAMILIES[name].tokenizer(), [HELLO], opens_answer=True, tools=[TOOL])
        assert "Keep a note." in text
