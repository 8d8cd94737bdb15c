"""A chat model as an agent, without access to tokens or weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nip_astra.language_models.base import Counted, TokenCount
from nip_astra.language_models.services.chat import (
    ChatAnswer,
    ChatMessage,
    ChatRequest,
    complete_all,
    estimate_tokens,
)
from nip_astra.language_models.services.retrying import RetryingChatModel

NOT_ASKED = "ended"
"""Failure of responses after the first one that failed."""


class ChatReply(NamedTuple):
    """A chat model's reply, or the reason why there is none.

    Attributes
    ----------
    failure : str or None
        A `FailureReason`, or `NOT_ASKED`; None for a reply.
    is_refused : bool
        Whether the service marks the reply as a refusal, or withholds it.
    """

    text: str
    failure: str | None = None
    is_refused: bool = False


class ChatWork(Counted):
    """Stands in for a language model: counts tokens, has no weights."""

    cache_bytes_per_token = 0
    can_be_forked = False

    def __init__(self, source: str) -> None:
        self.source = source
        self.token_count = TokenCount()

    def num_parameters(self) -> int:
        """0: the weights are remote."""
        return 0


class ChatAgent:
    """A chat model in a role.

    Attributes
    ----------
    role : str
        "target", which opens conversations, or "attacker".
    num_truncated_contexts : int
        Always 0: the service rejects contexts that exceed the model's window.
    """

    num_truncated_contexts = 0

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
        """Request for the next turn.

        Parameters
        ----------
        turns : Sequence[str]
            The conversation; target and attacker alternate, and the target opens.
        """
        is_target = self.role == "target"
        messages: list[ChatMessage] = [
            {"role": "assistant" if (number % 2 == 0) is is_target else "user", "content": text}
            for number, text in enumerate(turns)
        ]
        return ChatRequest(
            (*self._head, *messages),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed,
        )

    def reply(
        self, conversations: Sequence[Sequence[str]], seeds: Sequence[int]
    ) -> list[ChatReply]:
        """The next turn of all conversations, requested concurrently.

        Raises
        ------
        ConfigurationError, BudgetExhaustedError
            As `ChatModel.answer`.
        """
        pairs = zip(conversations, seeds, strict=True)
        outcomes = complete_all(
            self.chat_model, [self.request(turns, seed) for turns, seed in pairs]
        )
        count, replies = self.language_model.token_count, []
        for outcome in outcomes:
            count.forwarded += outcome.usage.prompt_tokens
            count.generated += outcome.usage.completion_tokens
            (sample,) = outcome.samples
            if isinstance(sample, ChatAnswer):
                text = (sample.text or sample.refusal or "").strip()
                replies.append(ChatReply(text, is_refused=sample.is_refused))
            else:
                replies.append(ChatReply("", str(sample.reason)))
        return replies

    def num_tokens(self, text: str) -> int:
        """Estimated number of tokens, because the model's tokenizer is unknown."""
        return estimate_tokens(text)

    def check_prompts(self, prompts: Sequence[str], *, split: str) -> None:
        """Do nothing: a service's window is unknown, and its refusals are recorded."""
