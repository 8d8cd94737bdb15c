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
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from nip_astra.errors import ContextLengthError, ModelLoadError
from nip_astra.language_models.tool_calls import tool_form
from nip_astra.rollouts.messages import Turn

_logger = logging.getLogger(__name__)
_PLACEHOLDER = "\u241f{}\u241f"
MAX_KEPT_TEXTS = 4096
"""Texts whose tokens a format keeps."""
MAX_KEPT_LENGTH = 1000
"""Characters of a text above which its tokens are not kept."""


@dataclass(frozen=True)
class FittedContext:
    """A context that leaves room for the next turn."""

    ids: list[int]
    num_dropped_turns: int


class ConversationFormat(ABC):
    """Tokens of a conversation up to the reading model's next turn."""

    end_ids: tuple[int, ...] = ()
    """Tokens that end a turn in this format, besides the model's own end token."""
    supports_tools: bool = False
    """Whether contexts show tools to the reading model."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._kept: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def context(self, turns: Sequence[Turn]) -> list[int]:
        """Return the tokens before the reading model's next turn."""

    def with_tools(self, described: tuple[str, ...]) -> ConversationFormat:
        """Return the format for a model that reads tools, each in OpenAI's form as JSON."""
        return self

    @abstractmethod
    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        """Return the number of context tokens after the content of the last turn."""

    def last_turn_span(self, turns: Sequence[Turn], context: Sequence[int]) -> tuple[int, int]:
        """Return start and end of the last turn's content in a context."""
        stop = len(context) - self.num_tokens_after(turns)
        return stop - len(turns[-1].ids), stop

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

    `preamble` is a `user` turn before the conversation, for templates that require one.
    """

    def __init__(
        self, tokenizer: Any, *, system_prompt: str | None = None, preamble: str | None = None
    ) -> None:
        super().__init__(tokenizer)
        if not getattr(tokenizer, "chat_template", None):
            raise ModelLoadError(
                "the tokenizer has no chat template. Set format: plain for this agent, or use an "
                "instruction-tuned model."
            )
        self._head = [("system", system_prompt)] if system_prompt else []
        self._head += [("user", preamble)] if preamble else []
        self._glue_by_roles: dict[tuple[str, ...], list[list[int]]] = {}
        self._tools: tuple[str, ...] = ()
        self._by_tools: dict[tuple[str, ...], ChatFormat] = {(): self}

    @cached_property
    def supports_tools(self) -> bool:  # type: ignore[override]  # of the template
        return tool_form(self.tokenizer) is not None

    def with_tools(self, described: tuple[str, ...]) -> ChatFormat:
        if described not in self._by_tools:
            own = copy(self)
            own._tools, own._glue_by_roles = described, {}
            self._by_tools[described] = own
        return self._by_tools[described]

    def context(self, turns: Sequence[Turn]) -> list[int]:
        before, *glue = self._glue(tuple(turn.role for turn in turns))
        ids = list(before)
        for turn, after in zip(turns, glue, strict=True):
            ids += turn.ids
            ids += after
        return ids

    def num_tokens_after(self, turns: Sequence[Turn]) -> int:
        return len(self._glue(tuple(turn.role for turn in turns))[-1])

    def _glue(self, roles: tuple[str, ...]) -> list[list[int]]:
        if roles not in self._glue_by_roles:
            self._glue_by_roles[roles] = self._render_glue(roles)
        return self._glue_by_roles[roles]

    def turn_end(self, end_ids: Sequence[int]) -> tuple[int, ...]:
        # Of several end tokens, the template contains the one of training.
        *_, after = self._render_glue(("user", "assistant"), speaks_next=False)
        named = [token for token in after if token in end_ids]
        return tuple(named[:1]) or super().turn_end(end_ids)

    def _render_glue(self, roles: tuple[str, ...], *, speaks_next: bool = True) -> list[list[int]]:
        """Render placeholders through the template and tokenise the text between them.

        A system message of the conversation replaces the agent's own.
        """
        has_own = roles[:1] == ("system",)
        head = [one for one in self._head if not (has_own and one[0] == "system")]
        names = [_PLACEHOLDER.format(index) for index in range(len(roles))]
        turns = list(zip(roles, names, strict=True))
        turns = [*turns[:1], *head, *turns[1:]] if has_own else [*head, *turns]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=[json.loads(tool) for tool in self._tools] or None,
                tokenize=False,
                add_generation_prompt=speaks_next,
            )
        except Exception as error:
            raise ModelLoadError(
                f"the chat template refused a conversation of the roles "
                f"{[message['role'] for message in messages]}: {error}. If the user must begin, "
                "give the agent a preamble; without a system role, remove system_prompt and "
                "system messages."
            ) from error
        glue = []
        for name in names:
            before, found, text = text.partition(name)
            if not found:
                raise ModelLoadError(
                    "the chat template changes the content of a turn. Set format: plain for this "
                    "agent."
                )
            glue.append(before)
        glue.append(text)
        return [self.tokenizer.encode(part, add_special_tokens=False) for part in glue]


class PlainFormat(ConversationFormat):
    """Consecutive turns, for models without a chat template.

    A context begins with the tokenizer's first token, if it sets one. Otherwise, so that every
    token has a context, a conversation without its oldest turns begins with the separator, and one
    without separators with the token that begins or ends texts.

    Parameters
    ----------
    separator : str
        Text between turns; a single token also ends a turn.
    """

    def __init__(self, tokenizer: Any, *, separator: str = "\n") -> None:
        super().__init__(tokenizer)
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
            ids += turn.ids
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
