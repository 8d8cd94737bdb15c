"""Tool calls in answers, complete and in pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nip_astra.language_models import tool_calls
from nip_astra.language_models.sources import load_tokenizer
from nip_astra.language_models.tool_calls import (
    ToolCall,
    ToolCallParser,
    ToolForm,
    parse_tool_calls,
    tool_form,
)
from tests.kit.recording import record_calls
from tests.kit.tiny import make_byte_tokenizer

ADD = '{"name": "add", "arguments": {"a": 1}}'
CALL = ToolCall("add", {"a": 1})
TAGGED = f"<tool_call>\n{ADD}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("4 < 5 <tool", "4 < 5 <tool", []),
        ("  a \n", "  a \n", []),
        (TAGGED, "", [CALL]),
        (f"One moment.\n{TAGGED} \n{TAGGED}\n", "One moment.", [CALL, CALL]),
        (f"a {TAGGED} b ", "a b", [CALL]),
        (f"a <tool_call>{ADD}", "a", [CALL]),
        (f"<tool_call>[{ADD}, {ADD}]</tool_call>", "", [CALL, CALL]),
        (f"\n{ADD} ", "", [CALL]),
        (f"[{ADD}]", "", [CALL]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [CALL]),
        (json.dumps([CALL.as_message_part("x")]), "", [CALL]),
        ('{"name": "Ada"} ', '{"name": "Ada"} ', []),
        (f"[{ADD}, 1]", f"[{ADD}, 1]", []),
        (f"[1] {TAGGED}", "[1]", [CALL]),
        (f"a  <tool_call>{{}}</tool_call> {TAGGED}", "a  <tool_call>{}</tool_call>", [CALL]),
        ('{"name": "f", "arguments": {"a": NaN}}',) * 2 + ([],),
        ('{"name": "f", "arguments": "x"}',) * 2 + ([],),
        ("[" * 100_000,) * 2 + ([],),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "\\ud800 </tool_call>\n"}}</tool_call>',
            "",
            [ToolCall("f", {"a": "\ufffd </tool_call>\n"})],
        ),
        ('<tool_call>{"name": "f</tool_call>',) * 2 + ([],),
        (f"[TOOL_CALLS] [{ADD}, {ADD}]", "", [CALL, CALL]),
        (f"One moment.\n[TOOL_CALLS][{ADD}]", "One moment.", [CALL]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add{"a": 1}', "", [CALL, CALL]),
        ('[TOOL_CALLS]add[CALL_ID]q1w2e3r4t[ARGS]{"a": 1}', "", [CALL]),
        (
            'a [TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS] ]}"}',
            "a",
            [ToolCall("f", {"a": "[TOOL_CALLS] ]}"})],
        ),
        ('a [TOOL_CALLS] [{"name": "add", "arg',) * 2 + ([],),
        ('[TOOL_CALLS]f[ARGS]{"a": NaN}',) * 2 + ([],),
        ("[TOOL_CALLS] " + "[" * 100_000,) * 2 + ([],),
        ("4 [TOOL", "4 [TOOL", []),
        (f"{TAGGED} [TOOL_CALLS] [{ADD}]", "", [CALL, CALL]),
    ],
)
def test_calls_are_separated_from_text_however_they_arrive(
    text: str, content: str, calls: list[ToolCall]
) -> None:
    assert parse_tool_calls(text) == (content, calls)
    for size in (1, 3, 11) if len(text) < 1000 else ():
        parser = ToolCallParser()
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        parts = [part for piece in pieces for part in parser.push(piece)]
        parts += parser.finish()
        assert "" not in parts
        assert "".join(part for part in parts if isinstance(part, str)) == content
        assert [part for part in parts if isinstance(part, ToolCall)] == calls


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = ToolCallParser()
    assert list(parser.push("so 4 <")) == ["so 4"]
    assert list(parser.push(" 5, ")) == [" < 5,"]
    assert list(parser.push(TAGGED)) == [CALL]


def test_closing_tags_within_an_argument_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = record_calls(monkeypatch, tool_calls, "_calls_in")
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "</tool_call>" * 20
    parser = ToolCallParser()
    for letter in text + '"}}</tool_call>':
        calls = list(parser.push(letter))
    assert calls == [ToolCall("f", {"a": "</tool_call>" * 20})]
    assert len(reads) == 21


def test_a_template_either_shows_tools_or_is_known_not_to(tiny_model_dir: Path) -> None:
    assert tool_form(load_tokenizer(str(tiny_model_dir))) is None
    tokenizer = make_byte_tokenizer()
    assert tool_form(tokenizer) == ToolForm("tagged")
    for old, new in (("<tool_call>", ""), ('"arguments"', '"parameters"')):
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    assert tool_form(tokenizer) == ToolForm("plain", "parameters")
