"""Tool calls in answers, complete and in pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nip_astra.language_models.message_format import (
    MessageFormat,
    MessagePart,
    detect_format,
)
from nip_astra.language_models.sources import load_tokenizer
from nip_astra.rollouts.messages import ToolCall
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
    parsed = MessageFormat().parse(text, tools={})
    assert (parsed.text, [*parsed.calls]) == (content, calls)
    for size in (1, 3, 11) if len(text) < 1000 else ():
        parts = parse_in_pieces(MessageFormat(), text, size=size)
        assert "" not in parts
        assert "".join(part for part in parts if isinstance(part, str)) == content
        assert [part for part in parts if isinstance(part, ToolCall)] == calls


def parse_in_pieces(
    message_format: MessageFormat, text: str, *, size: int, **options: Any
) -> list[MessagePart]:
    parser = message_format.parser(**{"tools": {}, **options})
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = MessageFormat().parser(tools={})
    assert parser.push("so 4 <") == ["so 4"]
    assert parser.push(" 5, ") == [" < 5,"]
    assert parser.push(TAGGED) == [CALL]


def test_a_template_either_shows_tools_or_is_known_not_to(tiny_model_dir: Path) -> None:
    assert not detect_format(load_tokenizer(str(tiny_model_dir))).shows_tools
    tokenizer = make_byte_tokenizer()
    assert detect_format(tokenizer).supports_tools
    for old, new in (
        ("<tool_call>\\n", ""),
        ("\\n</tool_call>", ""),
        ('"arguments"', '"parameters"'),
    ):
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
    assert detect_format(tokenizer).supports_tools
