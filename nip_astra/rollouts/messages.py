"""Turns of conversations: the messages of models, environments and tools.

Every part that handles a message uses `Turn`. A model's message is split once into reasoning, text
and calls of tools, where it is decoded or received. Scorers, rewards, tools, judges and histories
use text and calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""Author of a turn. For a scorer "user" is the attacker and "assistant" the target; for a reading
model "assistant" is the model itself and "user" its counterpart. A system turn opens the
conversation of a task, and tools answer calls in it."""


class ToolCall(NamedTuple):
    """A tool call by a model."""

    name: str
    arguments: dict[str, Any]

    def as_message_part(self, identity: str) -> dict[str, Any]:
        """Return the call as in the `tool_calls` of an assistant's message, in OpenAI's format."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"id": identity, "type": "function", "function": function}


def plain_calls(calls: Sequence[ToolCall]) -> list[list[Any]] | None:
    """Return calls as JSON values, each as name and arguments; None without any."""
    return [[call.name, call.arguments] for call in calls] or None


def calls_of_plain(plain: Sequence[Sequence[Any]] | None) -> tuple[ToolCall, ...]:
    """Return the calls of `plain_calls`."""
    return tuple(ToolCall(name, arguments) for name, arguments in plain or ())


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation.

    Attributes
    ----------
    role : Role
        Its author.
    text : str
        What others read: the message without reasoning and calls.
    reasoning : str or None
        What a model thought before its text; None without a thought.
    calls : tuple of ToolCall
        Its calls of tools, in order. A call within the reasoning is none.
    is_missing : bool
        Whether the answer ended before its text began, or within its reasoning: then there is no
        answer, which is neither a success nor a failure.
    ids : tuple of int
        Tokens, without role markers and end token, of the model that wrote or reads it; empty where
        there are none. A model's own turn includes its reasoning and calls.
    num_reasoning_ids : int
        Number of the first `ids` that belong to the reasoning, its markers and the space after.
    text_ids : tuple of int or None
        Tokens of text and calls, where they are not the rest of `ids`: a token reaches across the
        end of the reasoning, or text precedes it.
    logprobs : tuple of float or None
        Log-probability of each of `ids` under the model that sampled them, nats.
    loss_mask : tuple of bool or None
        Whether each of `ids` is learned from; None for all tokens that a policy sampled.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    is_missing: bool = False
    ids: tuple[int, ...] = ()
    num_reasoning_ids: int = 0
    text_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    loss_mask: tuple[bool, ...] | None = None

    @property
    def has_reasoning_ids(self) -> bool:
        """Return whether `ids` has tokens that belong to the reasoning."""
        return self.num_reasoning_ids > 0 or self.text_ids is not None

    @property
    def ids_without_reasoning(self) -> tuple[int, ...]:
        """Return the tokens of text and calls."""
        return self.ids[self.num_reasoning_ids :] if self.text_ids is None else self.text_ids

    def without_tokens(self) -> Turn:
        """Return the turn as it is recorded."""
        return Turn(self.role, self.text, self.reasoning, self.calls, self.is_missing)

    def __iter__(self) -> Iterator[str]:
        """Unpack to role and text, which is what most scorers and tasks of users read."""
        return iter((self.role, self.text))

    def to_plain(self) -> list[Any]:
        """Return role and text, and what else a reader of the message sees, as JSON values."""
        extras: dict[str, Any] = {}
        if self.reasoning is not None:
            extras["reasoning"] = self.reasoning
        if self.calls:
            extras["calls"] = plain_calls(self.calls)
        if self.is_missing:
            extras["is_missing"] = True
        # Most messages are a role and a text, as they were in files of earlier versions.
        return [self.role, self.text, extras] if extras else [self.role, self.text]

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Turn:
        """Return the turn of `to_plain`."""
        role, text, *rest = plain
        extras: Mapping[str, Any] = rest[0] if rest else {}
        return cls(
            role,
            text,
            extras.get("reasoning"),
            calls_of_plain(extras.get("calls")),
            extras.get("is_missing", False),
        )


Message: TypeAlias = Turn
"""The name of a turn in tasks and scorers of users: `Message(role, text)`."""
