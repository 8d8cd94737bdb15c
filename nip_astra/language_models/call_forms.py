"""The forms in which chat templates write calls of tools, one entry per family of models.

A form reads the calls that follow its mark in a message. A new family is a new entry:

    register_call_form("my_family")(MyForm(opening="<call>", ...))

Templates write arguments in JSON, or as texts between tags. A text has no type of its own: it gets
that of the parameter in the tool's schema (`typed_argument`), so that "007" stays a text for a
parameter that is one, and is a number for no parameter.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from nip_astra.language_models.text_cursor import (
    SPACE,
    MalformedTextError,
    Notation,
    Reader,
    TextCursor,
    end_of_string,
)
from nip_astra.registry import Registry
from nip_astra.safe_text import valid_text

Item = TypeVar("Item")


class ReadCall(NamedTuple):
    """A call as it was written."""

    name: str
    arguments: dict[str, Any]
    has_types: bool = True
    """Whether the arguments are values; otherwise they are texts."""


@dataclass(frozen=True)
class CallForm(ABC):
    """A form of calls."""

    opening: str
    """Mark that begins calls."""
    example: str
    """A call, as a model that wrote a malformed one is shown it."""
    marks: tuple[str, ...] = ()
    """Marks within calls, which a tokenizer may have as special tokens."""
    closing: str = ""
    """Mark after all calls; empty if each call has its own opening."""

    @abstractmethod
    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        """Read calls after their opening mark.

        Raises `MalformedTextError` where something else follows.
        """


CALL_FORMS: Registry[CallForm] = Registry("call_form")
"""Forms of calls between marks in a message, by name."""


def register_call_form(name: str) -> Callable[[CallForm], CallForm]:
    """Register a form of calls."""
    return CALL_FORMS.register(name)


# ---- calls in JSON


def read_json(text: str) -> Any:
    """Return a value in JSON; raise `MalformedTextError` if it is not valid."""

    def refuse_constant(constant: str) -> None:
        # Python's reader would accept NaN and Infinity.
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, strict=False, parse_constant=refuse_constant)
        if "\\u" in text:
            # Halves of surrogate pairs cannot be encoded.
            value = json.loads(valid_text(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        raise MalformedTextError(str(error) or "it is too deep") from error
    return value


def read_json_calls(text: str) -> list[ReadCall]:
    """Return the calls of a text that is one call in JSON, or a list of them.

    Raises `MalformedTextError` if one of them is no call.
    """
    content = read_json(text)
    calls = content if isinstance(content, list) else [content]
    return [_read_json_call(call) for call in calls]


def _read_json_call(call: Any) -> ReadCall:
    """Return the call that a value in JSON is, under the keys of OpenAI, Cohere or Llama."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict):
        raise MalformedTextError("a call is not an object")
    name = call.get("name", call.get("tool_name"))
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        # OpenAI writes arguments as a text in JSON.
        arguments = read_json(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        raise MalformedTextError("a call needs a name, and arguments that are an object")
    return ReadCall(name, arguments)


@dataclass(frozen=True)
class JsonCalls(CallForm):
    """Each call, or a list of calls, in JSON between marks."""

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        yield from cursor.skip_space()
        text = yield from cursor.take_balanced()
        calls = read_json_calls(text)
        yield from cursor.skip_space()
        # The end of the message may stand for the closing mark.
        if not cursor.is_at_end:
            yield from cursor.expect(self.closing)
        return calls


register_call_form("json")(
    JsonCalls(
        "<tool_call>",
        '<tool_call>{"name": ..., "arguments": {...}}</tool_call>',
        ("<tool_call>", "</tool_call>"),
        closing="</tool_call>",
    )
)
register_call_form("action")(
    JsonCalls(
        "<|START_ACTION|>",
        '<|START_ACTION|>[{"tool_name": ..., "parameters": {...}}]<|END_ACTION|>',
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        closing="<|END_ACTION|>",
    )
)
register_call_form("tool_call_list")(
    JsonCalls(
        "<|tool_call|>",
        '<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>',
        ("<|tool_call|>", "<|/tool_call|>"),
        closing="<|/tool_call|>",
    )
)


@dataclass(frozen=True)
class MarkedCalls(CallForm):
    """Mistral's calls, which end the message: a list in JSON, or names with their arguments.

    [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]
    [TOOL_CALLS]add[ARGS]{"a": 1}
    """

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        text = yield from cursor.take_rest()
        decoder = json.JSONDecoder(strict=False)
        calls: list[ReadCall] = []
        position = 0
        while True:
            match = _NAMED_CALL.match(text, position)
            assert match is not None
            value_start = match.end()
            if value_start == len(text):
                break
            try:
                # Finds the end of the value, since another call may follow.
                _, value_end = decoder.raw_decode(text, value_start)
            except (ValueError, RecursionError) as error:
                raise MalformedTextError(str(error)) from error
            content = text[value_start:value_end]
            name = match["name"]
            if name is None:
                calls += read_json_calls(content)
            else:
                calls.append(_read_named_call(name, content))
            position = value_end
        if not calls:
            raise MalformedTextError("no call follows")
        return calls


_NAMED_CALL = re.compile(
    r"\s*(?:\[TOOL_CALLS\])?\s*"
    r"(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?={))?"
)


def _read_named_call(name: str, text: str) -> ReadCall:
    arguments = read_json(text)
    if not isinstance(arguments, dict):
        raise MalformedTextError("the arguments are not an object")
    return ReadCall(name, arguments)


MISTRAL = MarkedCalls(
    "[TOOL_CALLS]",
    '[TOOL_CALLS][{"name": ..., "arguments": {...}}]',
    ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)


@dataclass(frozen=True)
class NamedJsonCalls(CallForm):
    """DeepSeek's calls: a name and its arguments in JSON, each call between marks of its own."""

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        calls: list[ReadCall] = []
        while True:
            yield from cursor.skip_space()
            is_call = yield from cursor.accept(_CALL_BEGIN)
            if not is_call:
                break
            before = yield from cursor.take_until(_CALL_SEPARATOR)
            after = yield from cursor.take_until(_CALL_END)
            # Version 3 writes the kind of the tool before, and the arguments as code.
            match = _CODE_CALL.fullmatch(after)
            name, text = (before, after) if match is None else (match[1], match[2])
            calls.append(_read_named_call(name.strip(), text))
        if not calls:
            raise MalformedTextError(f"{_CALL_BEGIN} is missing")
        yield from cursor.accept(_CALLS_END)
        return calls


_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_CALL_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
_CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CODE_CALL = re.compile(r"\s*(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)

register_call_form("named_json")(
    NamedJsonCalls(
        _CALLS_BEGIN,
        f"{_CALLS_BEGIN}{_CALL_BEGIN}NAME{_CALL_SEPARATOR}{{...}}{_CALL_END}{_CALLS_END}",
        (_CALLS_BEGIN, _CALL_BEGIN, _CALL_SEPARATOR, _CALL_END, _CALLS_END),
    )
)


# ---- arguments between tags


@dataclass(frozen=True)
class TaggedCalls(CallForm):
    """Arguments as texts between tags."""

    name_open: str = ""
    name_close: str = ""
    key_open: str = ""
    key_close: str = ""
    value_open: str = ""
    value_close: str = ""
    call_close: str = ""
    """Mark after the arguments of a call."""
    has_value_lines: bool = False
    """Whether a line break before and after a value belongs to the tags."""

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        calls: list[ReadCall] = []
        while True:
            yield from cursor.skip_space()
            call = yield from self._read_call(cursor)
            calls.append(call)
            if not self.closing:
                return calls
            yield from cursor.skip_space()
            is_end = yield from cursor.accept(self.closing)
            if is_end or cursor.is_at_end:
                return calls

    def _read_call(self, cursor: TextCursor) -> Reader[ReadCall]:
        yield from cursor.expect(self.name_open)
        name = yield from cursor.take_word()
        yield from cursor.expect(self.name_close)
        arguments: dict[str, Any] = {}
        while True:
            yield from cursor.skip_space()
            is_argument = yield from cursor.accept(self.key_open)
            if not is_argument:
                break
            key = yield from cursor.take_until(self.key_close)
            if self.value_open:
                yield from cursor.skip_space()
                yield from cursor.expect(self.value_open)
            arguments[key] = yield from self._read_value(cursor)
        yield from cursor.expect(self.call_close)
        return ReadCall(name, arguments, has_types=False)

    def _read_value(self, cursor: TextCursor) -> Reader[str]:
        """Read a value, which may have its closing tag in it: then no argument or end follows."""
        parts: list[str] = []
        while True:
            part = yield from cursor.take_until(self.value_close)
            parts.append(part)
            space = yield from cursor.skip_space()
            for follower in (self.key_open, self.call_close):
                next_characters = yield from cursor.peek(len(follower))
                if next_characters == follower:
                    content = "".join(parts)
                    if self.has_value_lines:
                        content = content.removeprefix("\n").removesuffix("\n")
                    return content
            # The tag was part of the value.
            parts += [self.value_close, space]


register_call_form("function_tags")(
    TaggedCalls(
        "<tool_call>",
        "<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>",
        name_open="<function=",
        name_close=">",
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        call_close="</function>",
        closing="</tool_call>",
        has_value_lines=True,
    )
)
register_call_form("argument_tags")(
    TaggedCalls(
        "<tool_call>",
        "<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
        call_close="</tool_call>",
    )
)
INVOKE_TAGS = TaggedCalls(
    "<atem:function_calls>",
    '<atem:function_calls>\n<atem:invoke name="NAME">\n'
    '<atem:parameter name="KEY">VALUE</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    name_open='<atem:invoke name="',
    name_close='">',
    key_open='<atem:parameter name="',
    key_close='">',
    value_close="</atem:parameter>",
    call_close="</atem:invoke>",
    closing="</atem:function_calls>",
)
"""Muse's calls, in a message of their own."""


def typed_arguments(
    arguments: Mapping[str, str], schema: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return arguments that were written as texts, with the types of a tool's schema."""
    schema = schema or {}
    properties = schema.get("properties", {})
    typed: dict[str, Any] = {}
    for name, text in arguments.items():
        typed[name] = typed_argument(text, properties.get(name, {}), schema)
    return typed


def typed_argument(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return an argument that was written as text, with the type of its schema.

    It stays a text if the schema allows a text and the text is none of the other types; without a
    type in the schema, it is the value in JSON if it is one. References are relative to `root`.
    """
    types = set(_find_types(schema, root))
    if types == {"string"}:
        return text
    stripped = text.strip()
    try:
        parsed = read_json(_PYTHON_CONSTANTS.get(stripped, stripped))
    except MalformedTextError:
        return text
    is_allowed = not types or any(_is_of_type(parsed, name) for name in types)
    if "string" in types and not is_allowed:
        return text
    return parsed


_PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Templates write constants as in Python."""
_MAX_REFERENCES = 16


def _find_types(schema: Any, root: Mapping[str, Any], num_followed: int = 0) -> Iterator[str]:
    """Yield the types that a schema allows."""
    # A reference may lead back to itself.
    if not isinstance(schema, Mapping) or num_followed > _MAX_REFERENCES:
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _find_types(target, root, num_followed + 1)
    types = schema.get("type") or ()
    yield from [types] if isinstance(types, str) else types
    if schema.get("nullable") is True:
        yield "null"
    constants = list(schema.get("enum", ()))
    if "const" in schema:
        constants.append(schema["const"])
    if any(isinstance(constant, str) for constant in constants):
        yield "string"
    for keyword in ("anyOf", "oneOf", "allOf"):
        for subschema in schema.get(keyword) or ():
            yield from _find_types(subschema, root, num_followed + 1)


_PYTHON_TYPES: dict[str, type] = {
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
    "string": str,
}


def _is_of_type(value: Any, type_name: str) -> bool:
    """Return whether a value is of a type of JSON schema."""
    if type_name in ("integer", "number"):
        # In Python a bool is an int.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and (type_name == "number" or value == int(value))
    python_type = _PYTHON_TYPES.get(type_name)
    return python_type is not None and isinstance(value, python_type)


# ---- notations like JSON


@dataclass(frozen=True)
class BareKeyCalls(CallForm):
    """Gemma's calls: `call:NAME{key:value}`, with strings between marks of their own."""

    notation: ClassVar[Notation]

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        yield from cursor.skip_space()
        yield from cursor.expect("call:")
        name = yield from cursor.take_word()
        text = yield from cursor.take_balanced(self.notation)
        arguments = LiteralReader(text, self.notation).read_mapping()
        yield from cursor.skip_space()
        if not cursor.is_at_end:
            yield from cursor.expect(self.closing)
        return [ReadCall(name, arguments)]


BareKeyCalls.notation = Notation(
    ('<|"|>', '"'), has_escapes=False, breaks=("<tool_call|>", "<turn|>")
)
register_call_form("bare_keys")(
    BareKeyCalls(
        "<|tool_call>",
        '<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        closing="<tool_call|>",
    )
)


@dataclass(frozen=True)
class PythonCalls(CallForm):
    """LFM's calls: a list of calls as in Python, with named arguments."""

    notation: ClassVar[Notation]

    def read(self, cursor: TextCursor) -> Reader[list[ReadCall]]:
        yield from cursor.skip_space()
        text = yield from cursor.take_balanced(self.notation)
        calls = LiteralReader(text, self.notation).read_calls()
        yield from cursor.skip_space()
        if not cursor.is_at_end:
            yield from cursor.expect(self.closing)
        return calls


PythonCalls.notation = Notation(("'", '"'), ends_before=",)]}:", foreign="<")
register_call_form("python_calls")(
    PythonCalls(
        "<|tool_call_start|>",
        "<|tool_call_start|>[NAME(key='text')]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        closing="<|tool_call_end|>",
    )
)


class LiteralReader:
    """Reads values in a notation like those of JSON and Python."""

    def __init__(self, text: str, notation: Notation) -> None:
        self._text = text
        self._position = 0
        self._notation = notation

    def read_calls(self) -> list[ReadCall]:
        """Return a list of calls: `[name(key=value), ...]`."""
        return self._read_items("[", "]", self._read_call)

    def read_mapping(self, depth: int = 0) -> dict[str, Any]:
        """Return a mapping: `{key: value}`."""
        pairs = self._read_items("{", "}", lambda: self._read_pair(":", depth))
        return _require_unique_keys(pairs)

    def _read_call(self) -> ReadCall:
        name = self._read_word()
        pairs = self._read_items("(", ")", lambda: self._read_pair("=", 0))
        return ReadCall(name, _require_unique_keys(pairs))

    def _read_pair(self, separator: str, depth: int) -> tuple[str, Any]:
        quote = self._accept_quote()
        key = self._read_string(quote) if quote else self._read_word()
        self._expect(separator)
        return key, self._read_value(depth)

    def _read_value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise MalformedTextError("it is too deep")
        quote = self._accept_quote()
        if quote:
            return self._read_string(quote)
        first_character = self._text[self._position : self._position + 1]
        if first_character == "{":
            return self.read_mapping(depth + 1)
        if first_character == "[":
            return self._read_items("[", "]", lambda: self._read_value(depth + 1))
        word = self._read_word()
        return read_json(_PYTHON_CONSTANTS.get(word, word))

    def _read_items(self, opening: str, closing: str, read_item: Callable[[], Item]) -> list[Item]:
        self._expect(opening)
        items: list[Item] = []
        while not self._accept(closing):
            if items:
                self._expect(",")
            items.append(read_item())
        return items

    def _accept_quote(self) -> str:
        """Read the mark that begins a string, if it comes next; return it or the empty text."""
        for quote in self._notation.quotes:
            if self._accept(quote):
                return quote
        return ""

    def _read_string(self, quote: str) -> str:
        pattern = end_of_string(quote, self._notation)
        start = self._position
        while (match := pattern.search(self._text, self._position)) is not None:
            self._position = match.end()
            is_escape = match[0].startswith("\\")
            if not is_escape:
                text = self._text[start : match.start()]
                return _ESCAPE.sub(_unescape, text) if self._notation.has_escapes else text
        raise MalformedTextError("a string does not end")

    def _read_word(self) -> str:
        self._skip_space()
        match = _WORD.match(self._text, self._position)
        if match is None:
            raise MalformedTextError(f"a name or value is missing at character {self._position}")
        self._position = match.end()
        return match[0]

    def _expect(self, mark: str) -> None:
        if not self._accept(mark):
            raise MalformedTextError(f"{mark!r} is missing at character {self._position}")

    def _accept(self, mark: str) -> bool:
        self._skip_space()
        is_next = self._text.startswith(mark, self._position)
        if is_next:
            self._position += len(mark)
        return is_next

    def _skip_space(self) -> None:
        match = SPACE.match(self._text, self._position)
        assert match is not None
        self._position = match.end()


_WORD = re.compile(r"[^\s,:=()\[\]{}<\"']+")
_MAX_DEPTH = 64
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


def _unescape(match: re.Match[str]) -> str:
    if match[1] is not None:
        return valid_text(chr(int(match[1], 16)))
    return _ESCAPES.get(match[2], match[2])


def _require_unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    arguments = dict(pairs)
    if len(arguments) < len(pairs):
        raise MalformedTextError("an argument comes twice")
    return arguments
