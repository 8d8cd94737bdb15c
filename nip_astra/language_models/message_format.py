"""The format of a model's messages: its reasoning, its text and its calls of tools.

    message_format = detect_format(tokenizer)
    message_format.parse('<think>Hm.</think>Wait. <tool_call>{"name": "f", "arguments": {}}')
    # ParsedMessage(reasoning="Hm.", text="Wait.", calls=(ToolCall("f", {}),), ...)

The marks are those of the tokenizer's chat template. A form of calls (`call_forms`) is used if
calls that the template renders come back from it; otherwise tools are refused. A message is split
once, from start to end: what looks like a call within the reasoning is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from nip_astra.errors import ModelAbilityError, ModelLoadError
from nip_astra.language_models.call_forms import (
    CALL_FORMS,
    INVOKE_TAGS,
    MISTRAL,
    CallForm,
    ReadCall,
    read_json,
    read_json_calls,
    typed_arguments,
)
from nip_astra.language_models.sequences import IncrementalDetokenizer
from nip_astra.language_models.services.chat import render_chat
from nip_astra.language_models.structured import json_rule
from nip_astra.language_models.text_cursor import (
    MalformedTextError,
    Reader,
    TextCursor,
    read_whole,
)
from nip_astra.rollouts.messages import ToolCall


class ThoughtMarkers(NamedTuple):
    """The texts around a thought."""

    opening: str
    closing: str


THOUGHT_MARKERS = (
    ThoughtMarkers("<think>", "</think>"),
    ThoughtMarkers("[THINK]", "[/THINK]"),
    ThoughtMarkers("<|channel>thought", "<channel|>"),
    ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtMarkers("<seed:think>", "</seed:think>"),
)
"""Markers that are used if a chat template has them, or a tokenizer as tokens of their own."""
ArgumentSchemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments of each tool, by name."""


class ReasoningPart(NamedTuple):
    """A part of the reasoning."""

    text: str


class MalformedCall(NamedTuple):
    """A call that cannot be read; its text is part of the message's text."""

    text: str
    fault: str
    """Why it cannot be read."""


MessagePart: TypeAlias = str | ReasoningPart | ToolCall | MalformedCall
"""A part of the text, of the reasoning, or a call."""


@dataclass(frozen=True)
class ParsedMessage:
    """A message in its parts.

    Attributes
    ----------
    reasoning : str or None
        The thoughts, separated by empty lines; None without one.
    text : str
        The rest without calls. Whitespace after a thought, before a call, and at the end after
        calls, is left out.
    calls : tuple of ToolCall
        The calls, in order.
    malformed : tuple of MalformedCall
        Calls that cannot be read. They stay in the text.
    is_unfinished : bool
        Whether the message ends within a thought, or before its text begins.
    """

    reasoning: str | None
    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    is_unfinished: bool = False


class Header(NamedTuple):
    """The header of a part of a message in channels."""

    is_reasoning: bool = False
    called: str = ""
    """Name of the tool that the part is sent to; empty if it is text."""


@dataclass(frozen=True)
class Channels:
    """A message as a sequence of parts, each with a header that says what it is."""

    marks: tuple[str, ...]
    """Texts of which each is in a chat template with these channels."""
    start: str
    header_end: str
    ends: tuple[str, ...]
    """Marks of which one ends a part."""
    example: str
    """A call, as a model that wrote a malformed one is shown it."""
    read_header: Callable[[str], Header]
    read_call: Callable[[str, str], list[ReadCall]]
    """From the name in the header and the content, the calls of a part."""

    def are_in(self, template: str) -> bool:
        """Return whether a chat template has these channels."""
        return all(mark in template for mark in self.marks)


def _read_harmony_header(header: str) -> Header:
    # A call may be made in any channel, also in the one of the reasoning.
    recipient = re.search(r"to=(?:functions\.)?([\w./-]+)", header)
    if recipient is not None:
        return Header(called=recipient[1])
    return Header(is_reasoning="<|channel|>analysis" in header)


def _read_harmony_call(name: str, content: str) -> list[ReadCall]:
    arguments = read_json(content)
    if not isinstance(arguments, dict):
        raise MalformedTextError("the arguments are not an object")
    return [ReadCall(name, arguments)]


def _read_recipient_header(header: str) -> Header:
    recipient = re.search(r"to=([\w./-]+)", header)
    if recipient is None or recipient[1] == "user":
        return Header()
    if recipient[1] == "self":
        # What the model sends to itself is its reasoning.
        return Header(is_reasoning=True)
    return Header(called=recipient[1])


def _read_invoke_call(_: str, content: str) -> list[ReadCall]:
    cursor = TextCursor(content, is_whole=True)
    read_whole(cursor.skip_space())
    read_whole(cursor.expect(INVOKE_TAGS.opening))
    return read_whole(INVOKE_TAGS.read(cursor))


CHANNELS = (
    Channels(
        marks=("<|start|>", "<|channel|>analysis", "<|message|>"),
        start="<|start|>",
        header_end="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        example="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>",
        read_header=_read_harmony_header,
        read_call=_read_harmony_call,
    ),
    Channels(
        marks=("<|start|>", "to=self", "<|message|>", "<|eom|>"),
        start="<|start|>",
        header_end="<|message|>",
        ends=("<|eom|>", "<|eot|>"),
        example=INVOKE_TAGS.example,
        read_header=_read_recipient_header,
        read_call=_read_invoke_call,
    ),
)
"""Families of channels: gpt-oss and Muse."""
_CONTROL_MARKS = ("<|channel|>", "<|constrain|>")
_MAX_HEADER_LENGTH = 300
_TAGGED = "json"
"""The form of calls of templates that are not known to have another one."""


class CallWriting(NamedTuple):
    """How a template writes calls whose arguments are JSON: before, name, middle, arguments, ...

    Several calls have `between` between the arguments of one and the name of the next.
    """

    before: str
    middle: str
    after: str
    between: str | None
    """None if the template has one call per message."""


@dataclass(frozen=True)
class MessageFormat:
    """The format of the messages of a model.

    Attributes
    ----------
    thought : ThoughtMarkers or None
        Markers around its reasoning, unless it has channels; None without reasoning.
    opens_thought : bool
        Whether the chat template opens the reasoning, so that an answer begins within it.
    channels : Channels or None
        The channels of its messages, if it has them.
    form_name : str
        The form of its calls, in `CALL_FORMS`.
    shows_tools : bool
        Whether the chat template shows tools to the model.
    fault : str
        Why tools cannot be used although they are shown; empty if they can.
    writing : CallWriting or None
        How calls are written, if their arguments are JSON; answers can then be constrained to
        calls.
    special_ids : Mapping
        Ids of the marks that are special tokens, which a text omits otherwise.
    name : str
        The model, in messages.
    """

    thought: ThoughtMarkers | None = None
    opens_thought: bool = False
    channels: Channels | None = None
    form_name: str = _TAGGED
    shows_tools: bool = False
    fault: str = ""
    writing: CallWriting | None = None
    special_ids: Mapping[str, int] = field(default_factory=dict)
    name: str = "the model"

    @property
    def supports_tools(self) -> bool:
        """Whether the model reads tools in its chat template, and its calls can be read."""
        return self.shows_tools and not self.fault

    @property
    def has_marks(self) -> bool:
        """Whether a message without calls can have more than text."""
        return self.thought is not None or self.channels is not None

    @property
    def form(self) -> CallForm:
        """Return the form of calls; channels have their own."""
        return CALL_FORMS.get(self.form_name)

    @property
    def example(self) -> str:
        """Return a call in this format."""
        return self.form.example if self.channels is None else self.channels.example

    def shown_ids(self, *, with_calls: bool = True) -> tuple[int, ...]:
        """Return special tokens that are marks: an answer may have them, and `parse` needs them."""
        if with_calls or self.channels is not None:
            # The marks of channels are around text, too.
            return tuple(self.special_ids.values())
        return tuple(
            token_id for mark, token_id in self.special_ids.items() if not self._is_call_mark(mark)
        )

    def _is_call_mark(self, mark: str) -> bool:
        return self.thought is None or not any(mark in marker for marker in self.thought)

    def _with_special_ids(self, special: Mapping[str, int]) -> MessageFormat:
        """Return the format with the ids of its marks among special tokens."""
        if self.channels is not None:
            channels = self.channels
            marks = {channels.start, channels.header_end, *channels.ends, *_CONTROL_MARKS}
        else:
            marks = {*self.form.marks, self.form.opening}
            if self.form_name == _TAGGED:
                # As in `MessageParser`, which reads Mistral's marks beside these.
                marks.update(MISTRAL.marks)
        ids = {}
        for mark, token_id in special.items():
            if mark in marks or not self._is_call_mark(mark):
                ids[mark] = token_id
        return replace(self, special_ids=ids)

    def has_call_mark(self, text: str) -> bool:
        """Return whether a parsed text still has the mark of a call, which is malformed then."""
        if self.channels is not None:
            return self.channels.header_end in text
        return self.form.opening in text

    def require_tools(self) -> None:
        """Raise `ModelAbilityError` if the chat template shows tools whose calls cannot be read."""
        if self.fault:
            raise ModelAbilityError(
                f"{self.name} cannot use tools: {self.fault}. Leave out the tools, or set a chat "
                f"template whose calls have a known form: {', '.join(CALL_FORMS.names())}."
            )

    def begins_in_thought(self, prompt: str) -> bool:
        """Return whether an answer after this prompt begins within a thought."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought.opening)

    def end_of_reasoning(self, text: str) -> int:
        """Return the number of the first characters of a message up to its text or calls.

        They are the reasoning before it, with its markers or headers; 0 without any.
        """
        if self.channels is not None:
            # The last part's header ends where its text begins.
            header_end = self.channels.header_end
            position = text.rfind(header_end)
            return position + len(header_end) if position >= 0 else 0
        if self.thought is None:
            return 0
        has_opened = self.opens_thought or text.lstrip().startswith(self.thought.opening)
        if not has_opened:
            return 0
        position = text.find(self.thought.closing)
        return len(text) if position < 0 else position + len(self.thought.closing)

    def parser(
        self, *, begins_in_thought: bool | None = None, tools: ArgumentSchemas | None = None
    ) -> MessageParser:
        """Return a parser of one message that arrives in pieces; arguments as in `parse`."""
        return MessageParser(self, begins_in_thought=begins_in_thought, tools=tools)

    def parse(
        self,
        text: str,
        *,
        begins_in_thought: bool | None = None,
        tools: ArgumentSchemas | None = None,
    ) -> ParsedMessage:
        """Return the parts of a message.

        Parameters
        ----------
        text : str
            The message, with marks that are special tokens (`decode`).
        begins_in_thought : bool, optional
            Whether the prompt ended within a thought; by default as the chat template's does.
        tools : Mapping, optional
            Schemas of the arguments by name of the tool, which give arguments that are written as
            texts their types. Without tools, calls are text.
        """
        parser = self.parser(begins_in_thought=begins_in_thought, tools=tools)
        reasoning: list[str] = []
        texts: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[MalformedCall] = []
        for part in (*parser.push(text), *parser.finish()):
            match part:
                case ReasoningPart():
                    reasoning.append(part.text)
                case ToolCall():
                    calls.append(part)
                case MalformedCall():
                    malformed.append(part)
                case str():
                    texts.append(part)
        return ParsedMessage(
            reasoning="".join(reasoning) or None,
            text="".join(texts),
            calls=tuple(calls),
            malformed=tuple(malformed),
            is_unfinished=parser.is_unfinished,
        )

    def decode(self, tokenizer: Any, ids: Sequence[int]) -> str:
        """Return the text of tokens, with the special ones that are marks."""
        return IncrementalDetokenizer(tokenizer, (), self.shown_ids()).decode_all([*ids])

    def call_rules(self, tools: Sequence[Mapping[str, Any]], *, allows_several: bool) -> list[str]:
        """Return grammar rules for `calls` of tools, in the form that the chat template renders.

        Raises
        ------
        ModelAbilityError
            If the arguments are not JSON in this form.
        """
        if self.writing is None:
            raise ModelAbilityError(
                f"{self.name} writes the arguments of calls not as JSON, so an answer cannot be "
                'constrained to calls. Use tool_choice "auto" without a response_format.'
            )
        before, middle, after, between = self.writing
        several_calls = "call"
        if allows_several and between is not None:
            several_calls = f"call ({self._write_symbols(between)} call)*"
        symbols = [self._write_symbols(before), several_calls, self._write_symbols(after)]
        alternatives = [f"call_{index}" for index in range(len(tools))]
        rules = [
            f"calls: {' '.join(symbol for symbol in symbols if symbol)}",
            f"call: {' | '.join(alternatives)}",
        ]
        for alternative, tool in zip(alternatives, tools, strict=True):
            schema = {"type": "object", **tool.get("parameters", {})}
            name = json.dumps(tool["name"])
            rules.append(f"{alternative}: {name} {self._write_symbols(middle)} {json_rule(schema)}")
        return rules

    def _write_symbols(self, text: str) -> str:
        """Return a text in a grammar, in which marks that are special tokens are tokens."""
        if not text:
            return ""
        parts = [text]
        if self.special_ids:
            # The longest first, since a mark may begin with another.
            marks = sorted(self.special_ids, key=len, reverse=True)
            pattern = "|".join(map(re.escape, marks))
            parts = re.split(f"({pattern})", text)
        symbols = []
        for part in parts:
            if part in self.special_ids:
                symbols.append(f"<[{self.special_ids[part]}]>")
            elif part:
                symbols.append(json.dumps(part))
        return " ".join(symbols)

    def thought_rule(self) -> str:
        """Return the grammar rule for `thought`, the rest of a thought that the prompt opened."""
        assert self.thought is not None
        closing = self.thought.closing
        if closing in self.special_ids:
            return f"thought: /(?s:.*)/ <[{self.special_ids[closing]}]>"
        return f"thought[suffix={json.dumps(closing)}]: /(?s:.*)/"


def argument_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the arguments of tools in OpenAI's form, by name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


# ---- parsing


class MessageParser:
    """Splits a message that arrives in pieces into its parts, in order.

    Each character is read once, also within calls; text is held back only while its meaning depends
    on what follows.
    """

    def __init__(
        self,
        message_format: MessageFormat,
        *,
        begins_in_thought: bool | None = None,
        tools: ArgumentSchemas | None = None,
    ) -> None:
        self.is_unfinished = False
        self._format = message_format
        if begins_in_thought is None:
            begins_in_thought = message_format.opens_thought
        self._tools = tools
        self._cursor = TextCursor()
        self._parts = _Parts()
        self._openings = self._find_openings()
        is_plain = not message_format.has_marks and tools is None
        if is_plain:
            self._reader = self._read_text(())
        elif message_format.channels is not None:
            self._reader = self._read_channels(message_format.channels)
        else:
            self._reader = self._read_marked(begins_in_thought=begins_in_thought)
        self._is_done = False

    def _find_openings(self) -> dict[str, CallForm]:
        """Return the forms of calls by their opening marks."""
        if self._tools is None or self._format.channels is not None:
            return {}
        form = self._format.form
        forms_by_opening = {form.opening: form}
        if self._format.form_name == _TAGGED:
            # A model whose calls are JSON may also mark them as others do.
            forms_by_opening[MISTRAL.opening] = MISTRAL
        return forms_by_opening

    def push(self, piece: str) -> list[MessagePart]:
        """Return the parts that a piece completes."""
        self._cursor.feed(piece)
        return self._advance()

    def finish(self) -> list[MessagePart]:
        """Return the rest, at the end of the message."""
        self._cursor.close()
        parts = self._advance()
        return parts + self._parts.finish()

    def _advance(self) -> list[MessagePart]:
        if not self._is_done:
            self._is_done = next(self._reader, _DONE) is _DONE
        return self._parts.take()

    def _read_text(self, marks: tuple[str, ...]) -> Reader[str]:
        mark = yield from self._cursor.scan(marks, self._parts.add_text)
        return mark

    def _read_marked(self, *, begins_in_thought: bool) -> Reader[str]:
        thought = self._format.thought
        marks = tuple(self._openings)
        if thought is not None:
            marks += (thought.opening,)
        if thought is not None and begins_in_thought:
            yield from self._cursor.skip_space()
            # Some models open it once more.
            yield from self._cursor.accept(thought.opening)
            yield from self._read_thought(thought.closing)
        while True:
            if not self._parts.has_text:
                yield from self._read_plain_calls(marks)
            mark = yield from self._read_text(marks)
            if not mark:
                return ""
            if mark in self._openings:
                yield from self._read_calls(mark)
            else:
                assert thought is not None
                yield from self._read_thought(thought.closing)

    def _read_thought(self, *closings: str) -> Reader[None]:
        self._parts.begin_reasoning()
        mark = yield from self._cursor.scan(closings, self._parts.add_reasoning)
        self._parts.end_reasoning()
        self.is_unfinished = not mark

    def _read_calls(self, mark: str) -> Reader[None]:
        self._cursor.start_record()
        try:
            calls = yield from self._openings[mark].read(self._cursor)
        except MalformedTextError as fault:
            text = mark + self._cursor.stop_record()
            self._parts.add_malformed(MalformedCall(text, str(fault)))
        else:
            self._cursor.stop_record()
            self._add_calls(calls)

    def _add_calls(self, calls: Sequence[ReadCall]) -> None:
        for name, arguments, has_types in calls:
            if not has_types:
                arguments = typed_arguments(arguments, (self._tools or {}).get(name))
            self._parts.add_call(ToolCall(name, arguments))

    def _read_plain_calls(self, marks: Sequence[str]) -> Reader[None]:
        """Read a text that is only calls in JSON, which is known at its end."""
        if self._tools is None or self._format.form_name != _TAGGED:
            return
        space = yield from self._cursor.skip_space()
        first_character = yield from self._cursor.peek(1)
        is_json = first_character in ("{", "[")
        if is_json:
            # Mistral's mark begins with a bracket, too.
            for mark in marks:
                next_characters = yield from self._cursor.peek(len(mark))
                is_json = is_json and next_characters != mark
        if not is_json:
            self._cursor.put_back(space)
            return
        text = yield from self._cursor.take_rest()
        try:
            self._add_calls(read_json_calls(text))
        except MalformedTextError:
            self._cursor.put_back(space + text)
            # It is text, even if more of it looks like that.
            self._parts.has_text = True

    def _read_channels(self, channels: Channels) -> Reader[str]:
        cursor = self._cursor
        while not cursor.is_at_end:
            # Recorded, since a part that cannot be read is text.
            cursor.start_record()
            try:
                header_text = yield from cursor.take_until(
                    channels.header_end, max_length=_MAX_HEADER_LENGTH
                )
            except MalformedTextError:
                text = cursor.stop_record()
                has_header_mark = any(mark in text for mark in (channels.start, *_CONTROL_MARKS))
                if has_header_mark and cursor.is_at_end:
                    self.is_unfinished = True
                    return ""
                self._parts.add_text(text)
                yield from self._read_text(channels.ends)
                continue
            header = channels.read_header(header_text)
            if header.is_reasoning:
                cursor.stop_record()
                yield from self._read_thought(*channels.ends)
            elif not header.called:
                cursor.stop_record()
                self.is_unfinished = False
                yield from self._read_text(channels.ends)
            else:
                self.is_unfinished = False
                yield from self._read_channel_call(channels, header.called)
            # Wait for more, so that the end of the text is noticed.
            yield from cursor.peek(1)
        return ""

    def _read_channel_call(self, channels: Channels, name: str) -> Reader[None]:
        pieces: list[str] = []
        yield from self._cursor.scan(channels.ends, pieces.append)
        text = self._cursor.stop_record()
        if self._tools is None:
            self._parts.add_text(text)
            return
        try:
            self._add_calls(channels.read_call(name, "".join(pieces)))
        except MalformedTextError as fault:
            self._parts.add_malformed(MalformedCall(text, str(fault)))


_DONE = "done"


class _Parts:
    """Collects the parts of a message, without the whitespace around thoughts and calls."""

    def __init__(self) -> None:
        self.has_text = False
        self._has_calls = False
        self._has_reasoning = False
        self._parts: list[MessagePart] = []
        self._texts: list[str] = []
        self._space: list[str] = []
        """Whitespace that is left out if a thought or call follows."""
        self._drops_space = False

    def add_text(self, text: str) -> None:
        text, space = self._split_space(text)
        if text:
            self.has_text = True
            self._texts += [*self._space, text]
            self._space = []
        if space:
            self._space.append(space)

    def _split_space(self, text: str) -> tuple[str, str]:
        """Return a text without whitespace at its end, and that whitespace."""
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        stripped = text.rstrip()
        return stripped, text[len(stripped) :]

    def begin_reasoning(self) -> None:
        self._end_text()
        self._drops_space = True
        self._space = ["\n\n"] if self._has_reasoning else []

    def add_reasoning(self, text: str) -> None:
        text, space = self._split_space(text)
        if text:
            self._has_reasoning = True
            self._parts.append(ReasoningPart("".join([*self._space, text])))
            self._space = []
        if space:
            self._space.append(space)

    def end_reasoning(self) -> None:
        self._space = []
        self._drops_space = not self.has_text

    def add_call(self, call: ToolCall) -> None:
        self._space = []
        self._end_text()
        self._has_calls = True
        self._parts.append(call)

    def add_malformed(self, call: MalformedCall) -> None:
        self.add_text(call.text)
        self._end_text()
        self._parts.append(call)

    def _end_text(self) -> None:
        if self._texts:
            self._parts.append("".join(self._texts))
        self._texts = []

    def take(self) -> list[MessagePart]:
        """Return the parts since the last call."""
        self._end_text()
        parts, self._parts = self._parts, []
        return parts

    def finish(self) -> list[MessagePart]:
        """Return the whitespace at the end, unless calls or only reasoning precede it."""
        space = "" if self._has_calls else "".join(self._space)
        self._space = []
        return [space] if space else []


# ---- detection


def detect_format(tokenizer: Any, *, thought: ThoughtMarkers | None = None) -> MessageFormat:
    """Return the format of the messages of a tokenizer's chat template.

    Parameters
    ----------
    tokenizer : Any
        A tokenizer of transformers, with or without a chat template.
    thought : ThoughtMarkers, optional
        Markers to use instead of those of the template or tokenizer.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, Mapping):
        # Several templates by name, such as one for tools.
        template = "\n".join(template.values())
    special_ids = {}
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special_ids[token.content] = token_id
    channels = None
    if thought is None:
        channels = next((family for family in CHANNELS if family.are_in(template)), None)
        if channels is None:
            thought = _find_thought(template, tokenizer)
    name = getattr(tokenizer, "name_or_path", "") or "the model"
    message_format = MessageFormat(thought, channels=channels, name=name)
    message_format = message_format._with_special_ids(special_ids)
    if not template:
        return message_format
    try:
        prompt = render_chat(tokenizer, [_QUESTION], opens_answer=True)
    except ModelLoadError:
        return message_format
    opens_thought = message_format.begins_in_thought(prompt)
    message_format = replace(message_format, opens_thought=opens_thought)
    return _detect_calls(message_format, tokenizer, special_ids)


def format_with_markers(tokenizer: Any, markers: Sequence[str] | None) -> MessageFormat:
    """Return the format with other markers of thoughts; None for its own, empty for none."""
    message_format = detect_format(tokenizer, thought=thought_between(markers))
    if markers is not None and not markers:
        return replace(message_format, thought=None, opens_thought=False, channels=None)
    return message_format


def thought_between(markers: Sequence[str] | None) -> ThoughtMarkers | None:
    """Return the markers of a parameter; None if it has no two texts."""
    return ThoughtMarkers(*markers) if markers else None


def _find_thought(template: str, tokenizer: Any) -> ThoughtMarkers | None:
    """Return the markers that the template has, or else those that the tokenizer has as tokens."""
    for markers in THOUGHT_MARKERS:
        if markers.opening in template or markers.closing in template:
            return markers
    tokens = {token.content for token in tokenizer.added_tokens_decoder.values()}
    for markers in THOUGHT_MARKERS:
        if template and tokens.issuperset(markers):
            return markers
    return None


_NAME = "probe_tool"
_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "A text."},
        "digits": {"type": "string", "description": "A text of digits."},
        "count": {"type": "integer", "description": "A number."},
        "ratio": {"type": "number", "description": "A number."},
        "is_set": {"type": "boolean", "description": "A truth value."},
        "items": {"type": "array", "items": {"type": "string"}, "description": "Some texts."},
        "nested": {"type": "object", "properties": {}, "description": "An object."},
    },
    "required": [],
}
_TOOLS = [
    {
        "type": "function",
        "function": {"name": _NAME, "description": "A tool.", "parameters": _SCHEMA},
    }
]
_QUESTION: dict[str, Any] = {"role": "user", "content": "hello"}
_SIMPLE: dict[str, Any] = {"count": 7}
_PROBES: tuple[dict[str, Any], ...] = (
    _SIMPLE,
    {"text": "first line\nsecond </tool_call> line", "digits": "007"},
    {"ratio": 0.5, "is_set": True, "items": ["a", "b"]},
    {"nested": {"inner": {"values": [1, "two"]}, "word": "three, {four}"}},
    {},
)
"""Arguments of calls that must come back."""


def _detect_calls(
    message_format: MessageFormat, tokenizer: Any, special_ids: Mapping[str, int]
) -> MessageFormat:
    """Return a format with the form of its template's calls, or why there is none."""
    try:
        offer = render_chat(tokenizer, [_QUESTION], opens_answer=True, tools=_TOOLS)
    except ModelLoadError:
        return message_format
    if _NAME not in offer:
        return message_format
    message_format = replace(message_format, shows_tools=True)
    probes = _Probes(tokenizer, message_format, offer)
    try:
        answers = [probes.render([arguments]) for arguments in _PROBES]
    except ModelLoadError as error:
        return replace(message_format, fault=f"its chat template refuses calls ({error})")
    if _NAME not in answers[0].text:
        return replace(message_format, fault="its chat template does not write calls")
    form_names = [_TAGGED] if message_format.channels else CALL_FORMS.names()
    for form_name in form_names:
        candidate = replace(message_format, form_name=form_name)._with_special_ids(special_ids)
        can_read_all = all(
            _comes_back(candidate, answer, [arguments])
            for answer, arguments in zip(answers, _PROBES, strict=True)
        )
        if can_read_all:
            return replace(candidate, writing=_find_writing(candidate, probes, answers[0]))
    written = answers[0].text.strip()[:120]
    return replace(
        message_format,
        fault=f"calls that its chat template writes have no known form ({written!r})",
    )


class _Answer(NamedTuple):
    """An answer as the template writes it."""

    text: str
    begins_in_thought: bool


class _Probes:
    """Renders calls in an answer to a question."""

    def __init__(self, tokenizer: Any, message_format: MessageFormat, offer: str) -> None:
        self._tokenizer = tokenizer
        self._format = message_format
        self._offer = offer
        content = "probe text"
        answer = {"role": "assistant", "content": content}
        text = render_chat(tokenizer, [_QUESTION, answer], opens_answer=False, tools=_TOOLS)
        self.end = text.rpartition(content)[2]
        """What the template writes after an answer."""

    def render(self, calls: Sequence[Mapping[str, Any]]) -> _Answer:
        """Return the answer that calls the tool with each of some arguments."""
        parts = [
            # Mistral's templates need an identity of nine letters and digits.
            ToolCall(_NAME, dict(arguments)).as_message_part(f"probecal{index}")
            for index, arguments in enumerate(calls)
        ]
        answer = {"role": "assistant", "content": "", "tool_calls": parts}
        text = render_chat(self._tokenizer, [_QUESTION, answer], opens_answer=False, tools=_TOOLS)
        prompt_length = _count_shared_characters(self._offer, text)
        if prompt_length < len(self._offer):
            # The history of a template may open a thought in another way than its prompt; marks
            # stay whole.
            mark_ends = [text.rfind(end, 0, prompt_length) for end in (">", "]", "\n")]
            prompt_length = max(mark_ends) + 1
        begins_in_thought = self._format.begins_in_thought(text[:prompt_length])
        return _Answer(text[prompt_length:].removesuffix(self.end), begins_in_thought)


def _count_shared_characters(first: str, second: str) -> int:
    """Return the length of the common beginning."""
    num_shared = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        num_shared += 1
    return num_shared


def _comes_back(
    message_format: MessageFormat, answer: _Answer, calls: Sequence[Mapping[str, Any]]
) -> bool:
    """Return whether a format reads exactly these calls of the tool from an answer."""
    parsed = message_format.parse(
        answer.text, begins_in_thought=answer.begins_in_thought, tools={_NAME: _SCHEMA}
    )
    expected = [ToolCall(_NAME, dict(arguments)) for arguments in calls]
    return [*parsed.calls] == expected and not parsed.malformed


_IDENTITY = re.compile(r',\s*"id":\s*"probecal\d"|\[CALL_ID\]probecal\d')
"""The identity of a call, which a model need not write."""


def _find_writing(
    message_format: MessageFormat, probes: _Probes, answer: _Answer
) -> CallWriting | None:
    """Return how the template writes calls, if their arguments are JSON."""
    surroundings = _split_around_arguments(_strip_thought(message_format, answer))
    if surroundings is None or not surroundings.middle:
        return None
    before, middle, after = surroundings
    between = None
    try:
        answer_with_two = probes.render([_SIMPLE, _SIMPLE])
    except ModelLoadError:
        # The template has one call per message.
        pass
    else:
        if _comes_back(message_format, answer_with_two, [_SIMPLE, _SIMPLE]):
            first_call = _split_around_arguments(_strip_thought(message_format, answer_with_two))
            if first_call is not None:
                # What follows the first call, up to the name of the second.
                between = first_call.after.partition(_NAME)[0]
    if message_format.channels is not None:
        for end in message_format.channels.ends:
            # The model's own end of a part.
            after = after.partition(end)[0]
            if between is not None and end in between:
                between = None
    return CallWriting(before, middle, after.rstrip(), between)


def _strip_thought(message_format: MessageFormat, answer: _Answer) -> str:
    """Return an answer without its reasoning and without the identities of calls."""
    text = _IDENTITY.sub("", answer.text)
    if message_format.thought is not None:
        text = text.rpartition(message_format.thought.closing)[2]
    return text if message_format.channels else text.strip()


class _Surroundings(NamedTuple):
    """The text around the name and the arguments of a call."""

    before: str
    middle: str
    after: str


def _split_around_arguments(text: str) -> _Surroundings | None:
    """Return the text before the first name, after it, and after its arguments in JSON."""
    before, _, rest = text.partition(_NAME)
    decoder = json.JSONDecoder()
    for match in re.finditer("{", rest):
        try:
            arguments, end = decoder.raw_decode(rest, match.start())
        except ValueError:
            continue
        if arguments == _SIMPLE:
            return _Surroundings(before, rest[: match.start()], rest[end:])
    return None
