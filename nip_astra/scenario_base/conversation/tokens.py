"""Conversations as token sequences of the model that reads them.

Generated tokens are never tokenised again; only the text between turns (role markers, separators)
is tokenised, once per shape of conversation.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from nip_astra.errors import ContextLengthError, ModelAbilityError, ModelLoadError
from nip_astra.language_models.message_format import (
    MessageFormat,
    format_with_markers,
    thought_between,
)
from nip_astra.language_models.services.chat import REASONING_FIELDS, render_chat
from nip_astra.rollouts.messages import Role, ToolCall, Turn

_logger = logging.getLogger(__name__)
_PLACEHOLDER = "\u241f{}\u241f"
_REASONING = "\u241e{}\u241e"
MAX_KEPT_TEXTS = 4096
"""Texts whose tokens a format keeps."""
MAX_KEPT_LENGTH = 1000
"""Characters of a text above which its tokens are not kept."""


@dataclass(frozen=True)
class FittedContext:
    """A context that leaves room for the next turn."""

    ids: list[int]
    num_dropped_turns: int


class TurnShape(NamedTuple):
    """The part of a turn on which the text around it depends."""

    role: Role
    has_reasoning: bool = False
    called: tuple[str, ...] = ()
    """Names of the tools that a turn calls, or whose result it is, if the template needs them."""


class Layout(NamedTuple):
    """The tokens before the first turn, after each one, and before the next."""

    glue: list[list[int]]
    keeps_reasoning: list[bool]
    """Whether a context has each turn's reasoning."""


class ConversationFormat(ABC):
    """Tokens of a conversation up to the reading model's next turn."""

    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn in this format, besides the model's own end token."""
    supports_tools: bool = False
    """Whether contexts show tools to the reading model."""
    message_format: MessageFormat = MessageFormat()
    """The format of the reading model's own turns."""
    writes_results_as_json: bool = False
    """Whether results of tools are texts in JSON."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids_by_text: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def context(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens before the reading model's next turn."""

    def with_tools(self, tools: tuple[str, ...]) -> ConversationFormat:
        """Return the format for a model that reads tools, each in OpenAI's form as JSON.

        Raises `ModelAbilityError` if the chat template shows tools, but its calls cannot be read.
        """
        return self

    @abstractmethod
    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        """Return the number of context tokens after the content of the last turn."""

    def last_turn_span(self, turns: Sequence[Turn], context: Sequence[int]) -> tuple[int, int]:
        """Return start and end of the last turn's content in a context."""
        stop = len(context) - self.num_tokens_after(turns)
        return stop - len(turns[-1].ids_without_reasoning), stop

    def turn_end(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the token that ends the reading model's turn, if any, given its end tokens."""
        if self.end_ids:
            return self.end_ids[:1]
        tokenizer_end = self.tokenizer.eos_token_id
        if tokenizer_end in end_ids:
            return (tokenizer_end,)
        return tuple(end_ids[:1])

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the content tokens of a turn of another speaker."""
        ids = self._ids_by_text.get(text)
        if ids is None:
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            self._cache({text: ids})
        return ids

    def written_text(self, turn: Turn) -> str:
        """Return the content of a turn as a context has it."""
        if turn.role == "tool" and self.writes_results_as_json:
            # The template adds the quotes.
            return json.dumps(turn.text, ensure_ascii=False)[1:-1]
        if turn.calls:
            # Of a given turn: a model's own has the tokens that it sampled.
            calls = self.written_calls(turn.calls)
            return "\n".join(part for part in (turn.text, calls) if part)
        return turn.text

    def written_calls(self, calls: tuple[ToolCall, ...]) -> str:
        """Return calls of a given turn as a context has them.

        Raises
        ------
        ModelAbilityError
            If contexts cannot have them.
        """
        raise ModelAbilityError(
            "the conversation has calls of tools, and the format plain shows none. Remove the "
            "messages with tool_calls, or choose a model with a chat template for tools."
        )

    def encode_all(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Apply `encode` to each text, in one call."""
        # Collected apart: the cache may drop a text while others are added.
        ids_by_text: dict[str, tuple[int, ...]] = {}
        new_texts: list[str] = []
        for text in dict.fromkeys(texts):
            if text in self._ids_by_text:
                ids_by_text[text] = self._ids_by_text[text]
            else:
                new_texts.append(text)
        if len(new_texts) == 1:
            ids_by_text[new_texts[0]] = self.encode(new_texts[0])
        elif new_texts:
            encoded = self.tokenizer(new_texts, add_special_tokens=False)["input_ids"]
            new_ids = dict(zip(new_texts, map(tuple, encoded), strict=True))
            self._cache(new_ids)
            ids_by_text |= new_ids
        return [ids_by_text[text] for text in texts]

    def _cache(self, ids_by_text: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the tokens of short texts, such as opening prompts, which come again."""
        if len(self._ids_by_text) + len(ids_by_text) > MAX_KEPT_TEXTS:
            self._ids_by_text.clear()
        short_texts = {
            text: ids for text, ids in ids_by_text.items() if len(text) <= MAX_KEPT_LENGTH
        }
        self._ids_by_text.update(islice(short_texts.items(), MAX_KEPT_TEXTS))

    def fit(self, turns: Sequence[Turn], *, num_tokens: int) -> FittedContext:
        """Return the longest context of at most `num_tokens`, dropping the oldest whole turns.

        A system message at the beginning is kept.
        """
        has_system_message = bool(turns) and turns[0].role == "system"
        num_kept = 1 if has_system_message else 0
        for start in range(num_kept, len(turns)):
            ids = self.context([*turns[:num_kept], *turns[start:]])
            if len(ids) <= num_tokens:
                return FittedContext(ids, start - num_kept)
        raise ContextLengthError(
            f"a turn of {len(turns[-1].ids)} tokens exceeds the model's window, which leaves "
            f"{num_tokens} tokens of context. Shorten the prompt, or lower max_new_tokens."
        )

    def longest_turn(self, num_tokens: int) -> int:
        """Return the most tokens of another speaker's turn that a context of `num_tokens` holds."""
        return max(num_tokens - len(self.context([Turn("user")])), 0)


class ChatFormat(ConversationFormat):
    """The tokenizer's chat template; the reading model is `assistant`, the other `user`.

    `preamble` is a `user` turn before the conversation, for templates that require one, and
    `template_options` are variables of the template, for instance `enable_thinking`. The reasoning
    of the reading model's earlier turns is left out, unless the template shows it;
    `reasoning_markers` replace those of the template, and none if they are empty.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        preamble: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        reasoning_markers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise ModelLoadError(
                "the tokenizer has no chat template. Set format: plain for this agent, or use an "
                "instruction-tuned model."
            )
        self._head = [("system", system_prompt)] if system_prompt else []
        self._head += [("user", preamble)] if preamble else []
        self._options = dict(template_options or {})
        self._markers = reasoning_markers
        self._layouts: dict[tuple[TurnShape, ...], Layout] = {}
        self._tools: tuple[str, ...] = ()
        self._by_tools: dict[tuple[str, ...], ChatFormat] = {(): self}

    @cached_property
    def message_format(self) -> MessageFormat:  # type: ignore[override]  # of the template
        detected = format_with_markers(self.tokenizer, self._markers)
        if detected.thought is None:
            return detected
        # As the variables of the template have it.
        opens_thought = detected.begins_in_thought(self.answer_opening)
        return replace(detected, opens_thought=opens_thought)

    @property
    def supports_tools(self) -> bool:  # type: ignore[override]  # of the template
        return self.message_format.supports_tools

    def with_tools(self, tools: tuple[str, ...]) -> ChatFormat:
        if tools:
            self.message_format.require_tools()
        if tools not in self._by_tools:
            # The same format except for what the tools change; all share one table of formats.
            format_with_tools = copy(self)
            format_with_tools._tools = tools
            format_with_tools._layouts = {}
            self._by_tools[tools] = format_with_tools
        return self._by_tools[tools]

    def context(self, turns: Sequence[Turn]) -> list[int]:
        layout = self._layout(turns)
        before_first, *after_each = layout.glue
        ids = list(before_first)
        for turn, keeps_reasoning, after in zip(
            turns, layout.keeps_reasoning, after_each, strict=True
        ):
            ids += turn.ids if keeps_reasoning else turn.ids_without_reasoning
            ids += after
        return ids

    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        return len(self._layout(turns).glue[-1])

    def _layout(self, turns: Sequence[Turn]) -> Layout:
        shapes = self._find_shapes(turns)
        if shapes not in self._layouts:
            self._layouts[shapes] = self._lay_out(shapes)
        return self._layouts[shapes]

    def _find_shapes(self, turns: Sequence[Turn]) -> tuple[TurnShape, ...]:
        shapes = [TurnShape(turn.role, turn.has_reasoning_ids) for turn in turns]
        has_results = any(turn.role == "tool" for turn in turns)
        if not (has_results and self._renders_calls):
            return tuple(shapes)
        # The tools that the last answer has called, and how many of their results have come.
        called: tuple[str, ...] = ()
        num_results = 0
        for index, turn in enumerate(turns):
            if turn.role == "tool":
                tool_name = _UNKNOWN_TOOL
                if called:
                    tool_name = called[min(num_results, len(called) - 1)]
                shapes[index] = shapes[index]._replace(called=(tool_name,))
                num_results += 1
                continue
            is_answered_by_tool = index + 1 < len(turns) and turns[index + 1].role == "tool"
            if turn.role == "assistant" and is_answered_by_tool:
                # A wrong call has a result too, which says what is wrong.
                called = tuple(call.name for call in turn.calls) or (_UNKNOWN_TOOL,)
                num_results = 0
                # A part of a message in channels has one call.
                rendered = called[-1:] if self.message_format.channels else called
                shapes[index] = shapes[index]._replace(called=rendered)
        return tuple(shapes)

    @cached_property
    def _renders_calls(self) -> bool:
        """Whether the template shows results of tools only after calls that are told apart."""
        if self.message_format.channels is not None:
            return True
        shapes = (TurnShape("user"), TurnShape("assistant"), TurnShape("tool"))
        try:
            self._texts_around(shapes)
        except ModelLoadError:
            return True
        return False

    @cached_property
    def writes_results_as_json(self) -> bool:  # type: ignore[override]  # of the template
        call = _placeholder_call(_UNKNOWN_TOOL, "x")
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "content": _BROKEN_LINE, "name": _UNKNOWN_TOOL, **_RESULT}
        try:
            text = render_chat(self.tokenizer, [_QUESTION, answer, result], opens_answer=True)
        except ModelLoadError:
            return False
        return json.dumps(_BROKEN_LINE) in text

    def written_calls(self, calls: tuple[ToolCall, ...]) -> str:
        message_format = self.message_format
        message_format.require_tools()
        if message_format.channels is not None:
            raise ModelAbilityError(
                f"{message_format.name} writes calls of tools in channels, which a given message "
                "cannot have. Remove the messages with tool_calls, or choose another model."
            )
        # Mistral's templates limit an identity to nine letters.
        parts = [call.as_message_part(f"callofn{index:02}") for index, call in enumerate(calls)]
        answer = {"role": "assistant", "content": "", "tool_calls": parts}
        text = render_chat(self.tokenizer, [_QUESTION, answer], opens_answer=False)
        answer_text = text.rpartition(_QUESTION["content"])[2]
        form = message_format.form
        if form.opening in answer_text:
            start = answer_text.index(form.opening)
            stop = answer_text.rindex(form.closing) + len(form.closing)
        else:
            # Calls without marks, as Llama's: the text up to the end of the turn.
            start = answer_text.index("{")
            stop = answer_text.rindex("}") + 1
        return answer_text[start:stop]

    @property
    def answer_opening(self) -> str:
        """Return the text of a context after a user's turn, with which an answer begins."""
        return self._texts_around((TurnShape("user"),))[-1]

    def turn_end(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        # Of several end tokens, the template contains the one of training.
        shapes = (TurnShape("user"), TurnShape("assistant"))
        *_, text_after_answer = self._texts_around(shapes, speaks_next=False)
        for token in self.tokenizer.encode(text_after_answer, add_special_tokens=False):
            if token in end_ids:
                return (token,)
        return super().turn_end(end_ids)

    def _lay_out(self, shapes: tuple[TurnShape, ...]) -> Layout:
        """Return the tokens around turns, and which turns keep their reasoning.

        A turn keeps it if the template shows it after the text that began the answer. Then the
        context extends that of the answer by the answer's own tokens.
        """
        texts = self._texts_around(shapes)
        keeps_reasoning = [False] * len(shapes)
        for index, shape in enumerate(shapes):
            before, reasoning_mark, _ = texts[index].partition(_REASONING.format(index))
            if not reasoning_mark:
                # The template leaves the reasoning out.
                continue
            answer_opening = self._texts_around(shapes[:index])[-1]
            if not before.startswith(answer_opening):
                # The answer was sampled after another text than its tokens would follow here.
                plain_shape = shape._replace(has_reasoning=False)
                return self._lay_out((*shapes[:index], plain_shape, *shapes[index + 1 :]))
            texts[index] = answer_opening
            keeps_reasoning[index] = True
        glue = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return Layout(glue, keeps_reasoning)

    def _texts_around(
        self, shapes: tuple[TurnShape, ...], *, speaks_next: bool = True
    ) -> list[str]:
        """Render placeholders through the template, and return the texts around their contents.

        A system message of the conversation replaces the agent's own.
        """
        messages = self._placeholder_messages(shapes)
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=[json.loads(tool) for tool in self._tools] or None,
                tokenize=False,
                add_generation_prompt=speaks_next,
                **self._options,
            )
        except Exception as error:
            if any(shape.has_reasoning for shape in shapes):
                # The template may refuse only the fields of the reasoning.
                plain_shapes = tuple(shape._replace(has_reasoning=False) for shape in shapes)
                return self._texts_around(plain_shapes, speaks_next=speaks_next)
            raise ModelLoadError(
                f"the chat template refused a conversation of the roles "
                f"{[message['role'] for message in messages]}: {error}. If the user must begin, "
                "give the agent a preamble; without a system role, remove system_prompt and "
                "system messages."
            ) from error
        texts = []
        for index, shape in enumerate(shapes):
            before, placeholder, text = text.partition(_PLACEHOLDER.format(index))
            if not placeholder:
                raise ModelLoadError(
                    "the chat template changes the content of a turn. Set format: plain for this "
                    "agent."
                )
            if shape.role == "assistant" and shape.called:
                before, text = self._around_calls(before, text, len(shape.called))
            texts.append(before)
        return [*texts, text]

    def _placeholder_messages(self, shapes: Sequence[TurnShape]) -> list[dict[str, Any]]:
        """Return the agent's first messages and a placeholder for each turn."""
        turns = [_placeholder_message(index, shape) for index, shape in enumerate(shapes)]
        has_system_turn = bool(shapes) and shapes[0].role == "system"
        head = [{"role": role, "content": content} for role, content in self._head]
        if not has_system_turn:
            return [*head, *turns]
        preamble = [message for message in head if message["role"] != "system"]
        return [turns[0], *preamble, *turns[1:]]

    def _around_calls(self, before: str, after: str, num_calls: int) -> tuple[str, str]:
        """Return the texts around calls, whose last argument stands between two texts."""
        message_format = self.message_format
        channels = message_format.channels
        if channels is not None:
            content_start = before.rindex(channels.header_end) + len(channels.header_end)
            end_positions = [after.find(end) for end in channels.ends]
            content_end = min(position for position in end_positions if position >= 0)
            return before[:content_start], after[content_end:]
        form = message_format.form
        for _ in range(num_calls):
            before = before[: before.rindex(form.opening)]
        return before, after.partition(form.closing)[2]


_UNKNOWN_TOOL = "tool"
_RESULT = {"tool_call_id": "callofone"}
"""A call and its result have one identity, which Mistral's templates limit to nine letters."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "hello"}
_BROKEN_LINE = 'a "line"\nand another'


def _placeholder_call(name: str, argument: str) -> dict[str, Any]:
    # Templates expect the arguments as an object.
    function = {"name": name, "arguments": {"value": argument}}
    return {"id": _RESULT["tool_call_id"], "type": "function", "function": function}


def _placeholder_message(index: int, shape: TurnShape) -> dict[str, Any]:
    """Return a message of placeholders; templates have different names for its reasoning."""
    placeholder = _PLACEHOLDER.format(index)
    message: dict[str, Any] = {"role": str(shape.role), "content": placeholder}
    if shape.role == "assistant" and shape.called:
        # The last call has the placeholder, after which the calls end.
        *first_tools, last_tool = shape.called
        calls = [_placeholder_call(tool, "") for tool in first_tools]
        calls.append(_placeholder_call(last_tool, placeholder))
        message |= {"content": "", "tool_calls": calls}
    elif shape.called:
        message |= {"name": shape.called[0], **_RESULT}
    if shape.has_reasoning:
        message |= dict.fromkeys(REASONING_FIELDS, _REASONING.format(index))
    return message


class PlainFormat(ConversationFormat):
    """Consecutive turns, for models without a chat template.

    A context begins with the tokenizer's first token, if it sets one. Otherwise, so that every
    token has a context, a conversation without its oldest turns begins with the separator, and one
    without separators with the token that begins or ends texts.

    Parameters
    ----------
    separator : str
        Text between turns; a single token also ends a turn.
    reasoning_markers : sequence of str, optional
        Texts around the reasoning of the model's own turns; without them all is text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        separator: str = "\n",
        reasoning_markers: Sequence[str] | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self.message_format = MessageFormat(thought_between(reasoning_markers))
        self._separator = tokenizer.encode(separator, add_special_tokens=False)
        if separator and not self._separator:
            _logger.warning(
                "The tokenizer makes no token of turn_separator %r, so turns are not separated. "
                "Set it for instance to %r.",
                separator,
                tokenizer.eos_token,
            )
        self.end_ids = tuple(self._separator) if len(self._separator) == 1 else ()
        bos = tokenizer.bos_token_id
        starts_with_bos = bos is not None and tokenizer.encode("a")[:1] == [bos]
        self._start = [bos] if starts_with_bos else []
        if not self._start and not self._separator:
            first = tokenizer.eos_token_id if bos is None else bos
            if first is None:
                raise ModelLoadError(
                    "without a turn_separator, the tokenizer needs a token that begins or ends a "
                    "text. Set turn_separator to a text that the tokenizer knows."
                )
            self._start = [first]

    def context(self, turns: Sequence[Turn]) -> list[int]:
        ids = list(self._start)
        for turn in turns:
            ids += turn.ids_without_reasoning
            ids += self._separator
        return ids

    def fit(self, turns: Sequence[Turn], *, num_tokens: int) -> FittedContext:
        if self._start:
            return super().fit(turns, num_tokens=num_tokens)
        whole = self.context(turns)
        if len(whole) <= num_tokens:
            return FittedContext(whole, 0)
        rest = super().fit(turns, num_tokens=num_tokens - len(self._separator))
        return FittedContext([*self._separator, *rest.ids], rest.num_dropped_turns)

    def longest_turn(self, num_tokens: int) -> int:
        if not self._start:
            # Older turns are left out, so the context begins with the separator; see `fit`.
            num_tokens -= len(self._separator)
        return super().longest_turn(num_tokens)

    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        return len(self._separator)
