"""Parser of tool calls in an answer, in the formats of chat templates.

    parse_tool_calls('Wait. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    # ("Wait.", [ToolCall("add", {"a": 1})])

Hermes' format has each call between tags, anywhere in the text; in the plain format the whole text
is one call in JSON, or a list of them. `parameters` is another name of `arguments`. In Mistral's
formats a mark, which may be a special token, begins the calls, which end the answer: a list in
JSON, or each call with a mark of its own, its name and its arguments.

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    [TOOL_CALLS]add[ARGS]{"a": 1}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.sequences import overlap
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.structured import json_rule
from nip_astra.rollouts.messages import ToolCall
from nip_astra.safe_text import valid_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARK = "[TOOL_CALLS]"
MARKS = (MARK, "[CALL_ID]", "[ARGS]")
"""Mistral's marks: of calls, of a call's identity, and of its arguments."""
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?={)")


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text of an answer without its calls, and the calls.

    A malformed call stays text. Whitespace before a call is removed, and at the end after calls.
    """
    parser = ToolCallParser()
    parts = [*parser.push(text), *parser.finish()]
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [part for part in parts if isinstance(part, ToolCall)]


class ToolCallParser:
    """Splits a streamed answer into text and calls, in order."""

    def __init__(self) -> None:
        self._pending = ""
        self._num_read = 0
        """Characters after an opening tag in which no closing tag ends a call."""
        self._has_calls = False
        self._is_json: bool | None = None

    def push(self, piece: str) -> Iterator[str | ToolCall]:
        """Yield the texts and calls completed by a piece."""
        self._pending += piece
        if self._is_json is None and (begin := self._pending.lstrip()):
            self._is_json = begin[0] in "{["
        if self._is_json is False:
            yield from self._read(is_last=False)

    def finish(self) -> Iterator[str | ToolCall]:
        """Yield the rest, at the end of the answer."""
        calls = _calls_in(self._pending) if self._is_json else None
        yield from calls or self._read(is_last=True)

    def _read(self, *, is_last: bool) -> Iterator[str | ToolCall]:
        while self._pending:
            before, tag, rest = self._pending.partition(OPEN)
            before, mark, marked = before.partition(MARK)
            if mark:
                tag, marked = "", self._pending[len(before) :]
            held = max(overlap(before, OPEN), overlap(before, MARK))
            text = before if is_last or tag or mark else before[: len(before) - held]
            if mark and is_last:
                calls = _marked_calls(marked)
                self._pending, self._has_calls = "", bool(calls)
                text = text.rstrip() if calls else before + marked
                yield from [text] if text else []
                yield from calls
                return
            if tag or mark or self._has_calls or not is_last:
                text = text.rstrip()
            if mark:
                # The calls are complete at the end of the answer.
                self._pending = self._pending[len(text) :]
                yield from [text] if text else []
                return
            if not tag:
                self._pending = "" if is_last else before[len(text) :]
                yield from [text] if text else []
                return
            found = _first_calls(rest, self._num_read, is_last=is_last)
            self._num_read = 0 if found is not None else max(0, len(rest) - len(CLOSE) + 1)
            if found is not None and not found[0]:
                # Not a call: the tag is text, and so is what follows it.
                text = self._pending[: len(before) + len(OPEN) + found[1]]
            yield from [text] if text else []
            if found is None:
                self._pending = self._pending[len(text) :]
                return
            calls, end = found
            self._has_calls |= bool(calls)
            self._pending = rest[end:]
            yield from calls


def _first_calls(rest: str, start: int, *, is_last: bool) -> tuple[list[ToolCall], int] | None:
    """Return the calls after an opening tag and their end; None if more text is needed."""
    end = rest.find(CLOSE, start)
    while end >= 0:
        calls = _calls_in(rest[:end])
        if calls is not None:
            return calls, end + len(CLOSE)
        # The tag is part of an argument.
        end = rest.find(CLOSE, end + 1)
    # The end of the turn may stand for the closing tag.
    return (_calls_in(rest) or [], len(rest)) if is_last else None


def _marked_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text in Mistral's format; none if one of them is malformed."""
    decoder, calls = json.JSONDecoder(strict=False), list[ToolCall]()
    while text := text.strip().removeprefix(MARK).lstrip():
        named = _NAMED.match(text)
        begin = named.end() if named else 0
        try:
            _, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            return []
        found = text[begin:end]
        if named:
            found = f'{{"name": {json.dumps(named[1])}, "arguments": {found}}}'
        read = _calls_in(found)
        if not read:
            return []
        calls, text = [*calls, *read], text[end:]
    return calls


def _calls_in(text: str) -> list[ToolCall] | None:
    """Return the calls in a JSON text; None if it ends within a string."""
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse_constant)
        if "\\u" in text:
            # Halves of surrogate pairs cannot be encoded.
            found = json.loads(valid_text(json.dumps(found, ensure_ascii=False)))
        calls = [_as_call(one) for one in (found if isinstance(found, list) else [found])]
    except json.JSONDecodeError as error:
        return None if error.msg.startswith("Unterminated string") else []
    except (ValueError, RecursionError):
        return []
    valid = [call for call in calls if call is not None]
    return valid if len(valid) == len(calls) else []


def _as_call(value: Any) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments, strict=False, parse_constant=_refuse_constant)
    if isinstance(name, str) and name and isinstance(arguments, dict):
        return ToolCall(name, arguments)
    return None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class ToolForm(NamedTuple):
    """The call format of a chat template."""

    kind: Literal["tagged", "plain", "marked list", "marked"]
    """Hermes' format, the plain one, or Mistral's with a list or with names and arguments."""
    arguments: str = "arguments"
    """Name of the arguments field."""
    tail: str = ""
    """Text between a marked name and its arguments."""
    special: Mapping[str, int] = {}
    """Ids of the marks that are special tokens, which a text omits otherwise."""


def tool_form(tokenizer: Any) -> ToolForm | None:
    """Return the call format of the tokenizer's chat template; None if it shows no tools."""
    function: dict[str, Any] = {"name": "probe_tool", "arguments": {"probe_value": 1}}
    # Mistral's templates need an identity of nine letters and digits.
    call = {"id": "probecall", "type": "function", "function": function}
    schema = {"type": "object", "properties": {}}
    offered = {"name": "probe_tool", "description": "", "parameters": schema}
    tools = [{"type": "function", "function": offered}]
    question: dict[str, Any] = {"role": "user", "content": "hello"}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        offer = render_chat(tokenizer, [question], opens_answer=True, tools=tools)
        text = render_chat(tokenizer, [question, answer], opens_answer=False, tools=tools)
    except ModelLoadError:
        return None
    before = text[: text.find("probe_value")]
    if "probe_tool" not in offer:
        return None
    named = re.search(r"\[TOOL_CALLS\]\s*probe_tool(?:\[CALL_ID\]\w+)?((?:\[ARGS\])?)\s*{", before)
    special = {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in MARKS
    }
    if named is not None:
        return ToolForm("marked", tail=named[1], special=special)
    names = re.findall('"(arguments|parameters)"', before)
    name = ["arguments", *names][-1]
    if re.search(r"\[TOOL_CALLS\]\s*\[", before):
        return ToolForm("marked list", name, special=special)
    is_tagged = re.search(rf"{OPEN}\s*{{[^<]*$", before) is not None
    return ToolForm("tagged" if is_tagged else "plain", name)


def call_rules(
    tools: Sequence[Mapping[str, Any]], form: ToolForm, *, allows_several: bool
) -> list[str]:
    """Return grammar rules for `calls`: one call or, except in the plain format, several."""
    mark = _terminal(MARK, form)
    whole = {
        "tagged": ("call", ' ("\\n" call)*', ""),
        "plain": ("call", "", ""),
        "marked list": (f'{mark} " "? "[" call', ' (", " call)*', ' "]"'),
        "marked": ("call", " call*", ""),
    }
    first, further, last = whole[form.kind]
    rules = [f"calls: {first}{further if allows_several else ''}{last}"]
    rules.append(f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}")
    begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if form.kind == "tagged" else ("", "")
    for place, tool in enumerate(tools):
        head = json.dumps(f'{begin}{{"name": {json.dumps(tool["name"])}, "{form.arguments}": ')
        tail = json.dumps(f"}}{end}")
        if form.kind == "marked":
            after = f" {_terminal(form.tail, form)}" if form.tail else ""
            head, tail = f"{mark} {json.dumps(tool['name'])}{after}", ""
        schema = {"type": "object", **tool.get("parameters", {})}
        rules.append(f"call_{place}: {head} {json_rule(schema)} {tail}".rstrip())
    return rules


def _terminal(mark: str, form: ToolForm) -> str:
    """Return a mark in a grammar: a special token, or its text."""
    return f"<[{form.special[mark]}]>" if mark in form.special else json.dumps(mark)
