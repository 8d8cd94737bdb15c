"""Parser of tool calls in an answer, in two common formats of chat templates.

    parse_tool_calls('Wait. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    # ("Wait.", [ToolCall("add", {"a": 1})])

Hermes' form has each call between tags, anywhere in the text; in the plain form the whole text is
one call in JSON, or a list of them. `parameters` is another name of `arguments`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from nip_astra.errors import ModelLoadError
from nip_astra.language_models.sequences import overlap
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.structured import json_rule
from nip_astra.safe_text import valid_text

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A tool call by a model."""

    name: str
    arguments: dict[str, Any]

    def as_message_part(self, identity: str) -> dict[str, Any]:
        """Return the call as in the `tool_calls` of an assistant's message, in OpenAI's format."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"id": identity, "type": "function", "function": function}


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
            text = before if is_last else before[: len(before) - overlap(before, OPEN)]
            if tag or self._has_calls or not is_last:
                text = text.rstrip()
            if not tag:
                self._pending = "" if is_last else before[len(text) :]
                yield from [text] if text else []
                return
            found = _first_calls(rest, is_last=is_last)
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


def _first_calls(rest: str, *, is_last: bool) -> tuple[list[ToolCall], int] | None:
    """Return the calls after an opening tag and their end; None if more text is needed."""
    end = rest.find(CLOSE)
    while end >= 0:
        calls = _calls_in(rest[:end])
        if calls is not None:
            return calls, end + len(CLOSE)
        # The tag is part of an argument.
        end = rest.find(CLOSE, end + 1)
    # The end of the turn may stand for the closing tag.
    return (_calls_in(rest) or [], len(rest)) if is_last else None


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

    is_tagged: bool
    """Hermes' format; otherwise the plain one."""
    arguments: str
    """Name of the arguments field."""


def tool_form(tokenizer: Any) -> ToolForm | None:
    """Return the call format of the tokenizer's chat template; None if it shows no tools."""
    call = {"type": "function", "function": {"name": "probe_tool", "arguments": {"probe_value": 1}}}
    schema = {"type": "object", "properties": {}}
    function = {"name": "probe_tool", "description": "", "parameters": schema}
    tools = [{"type": "function", "function": function}]
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
    names = re.findall('"(arguments|parameters)"', before)
    return ToolForm(re.search(rf"{OPEN}\s*{{[^<]*$", before) is not None, ["arguments", *names][-1])


def supports_tools(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template shows tools to the model."""
    return tool_form(tokenizer) is not None


def call_rules(
    tools: Sequence[Mapping[str, Any]], form: ToolForm, *, allows_several: bool
) -> list[str]:
    """Return grammar rules for `calls`: one function call or, in Hermes' format, several."""
    begin, end = (f"{OPEN}\n", f"\n{CLOSE}") if form.is_tagged else ("", "")
    further = ' ("\\n" call)*' if allows_several and form.is_tagged else ""
    rules = [f"calls: call{further}"]
    rules.append(f"call: {' | '.join(f'call_{place}' for place in range(len(tools)))}")
    for place, tool in enumerate(tools):
        head = f'{begin}{{"name": {json.dumps(tool["name"])}, "{form.arguments}": '
        schema = {"type": "object", **tool.get("parameters", {})}
        tail = json.dumps(f"}}{end}")
        rules.append(f"call_{place}: {json.dumps(head)} {json_rule(schema)} {tail}")
    return rules
