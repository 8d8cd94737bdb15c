"""Chat models as agents and attackers, without access to tokens or weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import Counted, TokenCount
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatFailure,
    ChatMessage,
    ChatModelParameters,
    ChatRequest,
    complete_all,
    estimate_tokens,
)
from nip_astra.language_models.services.reasons import CUT
from nip_astra.language_models.services.retrying import RetryingChatModel
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.rollouts.messages import ToolCall


class ChatReply(NamedTuple):
    """A chat model's reply, or the reason why there is none."""

    text: str
    failure: str | None = None
    """A `FailureReason`, `reasons.SKIPPED` or `reasons.CUT`; None for a reply."""
    is_refused: bool = False
    """Whether the service marks the reply as a refusal, or withholds it."""
    reasoning: str | None = None
    """Reasoning that the service gives beside the text."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools, which the target's conversation does not offer and nobody answers."""

    @classmethod
    def from_sample(cls, sample: ChatAnswer | ChatFailure) -> ChatReply:
        """Return the reply in a sample of a chat model."""
        if isinstance(sample, ChatFailure):
            return cls("", str(sample.reason))
        if sample.is_missing:
            return cls("", CUT, reasoning=sample.reasoning)
        text = (sample.text or sample.refusal or "").strip()
        return cls(text, None, sample.is_refused, sample.reasoning, sample.calls)


class ChatWork(Counted):
    """Stand-in for a language model that counts tokens and has no weights."""

    cache_bytes_per_token = 0
    can_be_forked = False

    def __init__(self, source: str) -> None:
        self.source = source
        self.token_count = TokenCount()

    def num_parameters(self) -> int:
        """Return 0, since the weights are remote."""
        return 0


class ChatAgent:
    """A chat model as target, which opens conversations, or as attacker."""

    num_truncated_contexts = 0
    """Always 0: the service rejects contexts that exceed the model's window."""

    def __init__(
        self,
        role: str,
        chat_model: RetryingChatModel,
        *,
        max_tokens: int,
        temperature: float | None,
        top_p: float = 1.0,
        system_prompt: str | None = None,
        preamble: str | None = None,
    ) -> None:
        self.role = role
        self.chat_model = chat_model
        self.language_model = ChatWork(chat_model.name)
        self.max_tokens = max_tokens
        self.temperature = temperature
        self.top_p = top_p
        self._head: list[ChatMessage] = []
        if system_prompt:
            self._head.append({"role": "system", "content": system_prompt})
        if preamble:
            self._head.append({"role": "user", "content": preamble})

    def request(self, turns: Sequence[str], seed: int) -> ChatRequest:
        """Return the request for a conversation's next turn; target and attacker alternate."""
        messages = list(self._head)
        for number, text in enumerate(turns):
            # The target's opening is first. An agent's own turns are the assistant's.
            is_target_turn = number % 2 == 0
            is_own_turn = is_target_turn is (self.role == "target")
            messages.append({"role": "assistant" if is_own_turn else "user", "content": text})
        return ChatRequest(
            tuple(messages),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
        )

    def reply(
        self, conversations: Sequence[Sequence[str]], seeds: Sequence[int]
    ) -> list[ChatReply]:
        """Request the next turn of all conversations concurrently."""
        requests = [
            self.request(turns, seed) for turns, seed in zip(conversations, seeds, strict=True)
        ]
        token_count = self.language_model.token_count
        replies = []
        for outcome in complete_all(self.chat_model, requests):
            token_count.forwarded += outcome.usage.prompt_tokens
            token_count.generated += outcome.usage.completion_tokens
            (sample,) = outcome.samples
            replies.append(ChatReply.from_sample(sample))
        return replies

    def num_tokens(self, text: str) -> int:
        """Return the estimated number of tokens, since the model's tokenizer is unknown."""
        return estimate_tokens(text)

    def check_prompts(self, prompts: Sequence[str], *, split: str) -> None:
        """Do nothing: a service's window is unknown, and its refusals are recorded."""


class TextConversation(NamedTuple):
    """A conversation as seen by a text attacker."""

    episode: int
    """Index of its episode in the evaluation."""
    texts: Sequence[str]
    """Messages so far, the target's opening first."""


class TextAttacker(ABC):
    """An attacker without access to tokens or probabilities.

    The likelihood of its probes is measured under the reference, as for other attackers.
    """

    role = "attacker"
    num_truncated_contexts = 0
    language_model: ChatWork

    @abstractmethod
    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        """Return the next probe of each conversation, or the reason why there is none."""


class FixedProbes(TextAttacker):
    """Predefined probes, one per episode, in order, repeating."""

    def __init__(self, probes: Sequence[str]) -> None:
        self.probes = probes
        self.language_model = ChatWork("fixed probes")

    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        if any(len(conversation.texts) > 1 for conversation in conversations):
            raise ConfigurationError(
                "fixed probes support one turn only. Set the number of turns to 1."
            )
        return [
            ChatReply(self.probes[conversation.episode % len(self.probes)])
            for conversation in conversations
        ]


class ChatAttackerParameters(SubParameters):
    """A chat model prompted to attack."""

    chat_model: ChatModelParameters  # type: ignore[valid-type]
    """Model that generates the probes."""
    system_prompt: PlainText
    """System prompt of the attacker."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Maximum length of a probe, in the chat model's tokens."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature; null uses the service's default."""


class ChatAttacker(TextAttacker):
    """A chat model prompted to attack; the target's messages are the user's."""

    def __init__(self, agent: ChatAgent) -> None:
        self.agent = agent
        self.language_model = agent.language_model

    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        return self.agent.reply([conversation.texts for conversation in conversations], seeds)
