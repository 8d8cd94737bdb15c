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
        self._kept: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def context(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens before the reading model's next turn."""

    def with_tools(self, described: tuple[str, ...]) -> ConversationFormat:
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
        own = self.tokenizer.eos_token_id
        return (*self.end_ids, *([own] if own in end_ids else []), *end_ids)[:1]

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the content tokens of a turn of another speaker."""
        known = self._kept.get(text)
        if known is None:
            known = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            self._keep({text: known})
        return known

    def written_text(self, turn: Turn) -> str:
        """Return the content of a turn as a context has it."""
        if turn.role == "tool" and self.writes_results_as_json:
            return json.dumps(turn.text, ensure_ascii=False)[1:-1]
        if turn.calls:
            # Of a given turn: a model's own has the tokens that it sampled.
            return "\n".join(part for part in (turn.text, self.written_calls(turn.calls)) if part)
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
        known = {text: self._kept[text] for text in texts if text in self._kept}
        new = list(dict.fromkeys(text for text in texts if text not in known))
        if len(new) == 1:
            known[new[0]] = self.encode(new[0])
        elif new:
            ids = self.tokenizer(new, add_special_tokens=False)["input_ids"]
            found = dict(zip(new, map(tuple, ids), strict=True))
            self._keep(found)
            known |= found
        return [known[text] for text in texts]

    def _keep(self, found: Mapping[str, tuple[int, ...]]) -> None:
        """Keep the tokens of short texts, such as opening prompts, which come again."""
        if len(self._kept) + len(found) > MAX_KEPT_TEXTS:
            self._kept.clear()
        short = {text: ids for text, ids in found.items() if len(text) <= MAX_KEPT_LENGTH}
        self._kept.update(islice(short.items(), MAX_KEPT_TEXTS))

    def fit(self, turns: Sequence[Turn], *, num_tokens: int) -> FittedContext:
        """Return the longest context of at most `num_tokens`, dropping the oldest whole turns.

        A system message at the beginning is kept.
        """
        head = turns[: sum(turn.role == "system" for turn in turns[:1])]
        for start in range(len(head), len(turns)):
            ids = self.context([*head, *turns[start:]])
            if len(ids) <= num_tokens:
                return FittedContext(ids, start - len(head))
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

    def with_tools(self, described: tuple[str, ...]) -> ChatFormat:
        if described:
            self.message_format.require_tools()
        if described not in self._by_tools:
            own = copy(self)
            own._tools, own._layouts = described, {}
            self._by_tools[described] = own
        return self._by_tools[described]

    def context(self, turns: Sequence[Turn]) -> list[int]:
        layout = self._layout(turns)
        before, *glue = layout.glue
        ids = list(before)
        for turn, keeps_reasoning, after in zip(turns, layout.keeps_reasoning, glue, strict=True):
            ids += turn.ids if keeps_reasoning else turn.ids_without_reasoning
            ids += after
        return ids

    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        return len(self._layout(turns).glue[-1])

    def _layout(self, turns: Sequence[Turn]) -> Layout:
        shapes = self._shapes_of(turns)
        if shapes not in self._layouts:
            self._layouts[shapes] = self._lay_out(shapes)
        return self._layouts[shapes]

    def _shapes_of(self, turns: Sequence[Turn]) -> tuple[TurnShape, ...]:
        shapes = [TurnShape(turn.role, turn.has_reasoning_ids) for turn in turns]
        has_results = any(turn.role == "tool" for turn in turns)
        if not (has_results and self._renders_calls):
            return tuple(shapes)
        called: tuple[str, ...] = ()
        num_results = 0
        for number, turn in enumerate(turns):
            following = turns[number + 1 : number + 2]
            if turn.role == "tool":
                name = called[min(num_results, len(called) - 1)] if called else _UNKNOWN_TOOL
                shapes[number] = shapes[number]._replace(called=(name,))
                num_results += 1
            elif turn.role == "assistant" and following and following[0].role == "tool":
                # A wrong call has a result too, which says what is wrong.
                called = tuple(call.name for call in turn.calls) or (_UNKNOWN_TOOL,)
                num_results = 0
                rendered = called[-1:] if self.message_format.channels else called
                shapes[number] = shapes[number]._replace(called=rendered)
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
        parts = [call.as_message_part(f"callofn{place:02}") for place, call in enumerate(calls)]
        answer = {"role": "assistant", "content": "", "tool_calls": parts}
        text = render_chat(self.tokenizer, [_QUESTION, answer], opens_answer=False)
        written = text.rpartition(_QUESTION["content"])[2]
        form = message_format.form
        if form.opening in written:
            start, end = written.index(form.opening), written.rindex(form.closing)
            return written[start : end + len(form.closing)]
        # Calls without marks, as Llama's: the text up to the end of the turn.
        end = written.rindex("}") + 1
        return written[written.index("{") : end]

    @property
    def answer_opening(self) -> str:
        """Return the text of a context after a user's turn, with which an answer begins."""
        return self._texts_around((TurnShape("user"),))[-1]

    def turn_end(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        # Of several end tokens, the template contains the one of training.
        shapes = (TurnShape("user"), TurnShape("assistant"))
        *_, text_after = self._texts_around(shapes, speaks_next=False)
        after = self.tokenizer.encode(text_after, add_special_tokens=False)
        named = [token for token in after if token in end_ids]
        return tuple(named[:1]) or super().turn_end(end_ids)

    def _lay_out(self, shapes: tuple[TurnShape, ...]) -> Layout:
        """Return the tokens around turns, and which turns keep their reasoning.

        A turn keeps it if the template shows it after the text that began the answer. Then the
        context extends that of the answer by the answer's own tokens.
        """
        texts = self._texts_around(shapes)
        keeps_reasoning = [False] * len(shapes)
        for number, shape in enumerate(shapes):
            before, is_shown, _ = texts[number].partition(_REASONING.format(number))
            if not is_shown:
                continue
            answer_opening = self._texts_around(shapes[:number])[-1]
            if not before.startswith(answer_opening):
                # The answer was sampled after another text than its tokens would follow here.
                plain = shape._replace(has_reasoning=False)
                without = (*shapes[:number], plain, *shapes[number + 1 :])
                return self._lay_out(without)
            texts[number] = answer_opening
            keeps_reasoning[number] = True
        glue = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return Layout(glue, keeps_reasoning)

    def _texts_around(
        self, shapes: tuple[TurnShape, ...], *, speaks_next: bool = True
    ) -> list[str]:
        """Render placeholders through the template, and return the texts around their contents.

        A system message of the conversation replaces the agent's own.
        """
        has_own = bool(shapes) and shapes[0].role == "system"
        head = [
            {"role": role, "content": content}
            for role, content in self._head
            if not (has_own and role == "system")
        ]
        turns = [_placeholder_message(number, shape) for number, shape in enumerate(shapes)]
        messages = [*turns[:1], *head, *turns[1:]] if has_own else [*head, *turns]
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
                without = tuple(shape._replace(has_reasoning=False) for shape in shapes)
                return self._texts_around(without, speaks_next=speaks_next)
            raise ModelLoadError(
                f"the chat template refused a conversation of the roles "
                f"{[message['role'] for message in messages]}: {error}. If the user must begin, "
                "give the agent a preamble; without a system role, remove system_prompt and "
                "system messages."
            ) from error
        texts = []
        for number, shape in enumerate(shapes):
            before, is_shown, text = text.partition(_PLACEHOLDER.format(number))
            if is_shown and shape.role == "assistant" and shape.called:
                before, text = self._around_calls(before, text, len(shape.called))
            if not is_shown:
                raise ModelLoadError(
                    "the chat template changes the content of a turn. Set format: plain for this "
                    "agent."
                )
            texts.append(before)
        return [*texts, text]

    def _around_calls(self, before: str, after: str, num_calls: int) -> tuple[str, str]:
        """Return the texts around calls, whose last argument stands between two texts."""
        channels, form = self.message_format.channels, self.message_format.form
        if channels is not None:
            start = before.rindex(channels.header_end) + len(channels.header_end)
            ends = [place for end in channels.ends if (place := after.find(end)) >= 0]
            return before[:start], after[min(ends) :]
        for _ in range(num_calls):
            before = before[: before.rindex(form.opening)]
        return before, after.partition(form.closing)[2]


_UNKNOWN_TOOL = "tool"
_RESULT = {"tool_call_id": "callofone"}
"""A call and its result have one identity, which Mistral's templates limit to nine letters."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "hello"}
_BROKEN_LINE = 'a "line"\nand another'


def _placeholder_call(name: str, value: str) -> dict[str, Any]:
    # Templates expect the arguments as an object.
    function = {"name": name, "arguments": {"value": value}}
    return {"id": _RESULT["tool_call_id"], "type": "function", "function": function}


def _placeholder_message(number: int, shape: TurnShape) -> dict[str, Any]:
    """Return a message of placeholders; templates have different names for its reasoning."""
    placeholder = _PLACEHOLDER.format(number)
    message: dict[str, Any] = {"role": str(shape.role), "content": placeholder}
    if shape.role == "assistant" and shape.called:
        values = [""] * (len(shape.called) - 1) + [placeholder]
        calls = [_placeholder_call(*pair) for pair in zip(shape.called, values, strict=True)]
        message |= {"content": "", "tool_calls": calls}
    elif shape.called:
        message |= {"name": shape.called[0], **_RESULT}
    if shape.has_reasoning:
        message |= dict.fromkeys(REASONING_FIELDS, _REASONING.format(number))
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
        # Older turns are left out, see `fit`.
        return super().longest_turn(num_tokens - (0 if self._start else len(self._separator)))

    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        return len(self._separator)
