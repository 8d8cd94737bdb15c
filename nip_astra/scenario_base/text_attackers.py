"""Attackers that only give texts: fixed probes, or a chat model with a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.chat import CHAT_MODELS, ChatModel
from nip_astra.parameters.parameters_base import PlainText, SubParameters, polymorphic
from nip_astra.scenario_base.chat_agent import ChatAgent, ChatReply, ChatWork


class TextConversation(NamedTuple):
    """What a text attacker sees of a conversation.

    Attributes
    ----------
    episode : int
        Number of its episode, counted through the whole evaluation.
    texts : Sequence[str]
        What was said, the target's opening first.
    """

    episode: int
    texts: Sequence[str]


class TextAttacker(ABC):
    """An attacker of which neither tokens nor probabilities are known.

    How likely its probes are is measured under the reference, as those of any attacker are.
    """

    role = "attacker"
    num_truncated_contexts = 0
    language_model: ChatWork

    @abstractmethod
    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        """The next probe of each conversation, or why there is none."""


class FixedProbes(TextAttacker):
    """Probes that are written down beforehand: one an episode, in order, then again."""

    def __init__(self, probes: Sequence[str]) -> None:
        self.probes = probes
        self.language_model = ChatWork("fixed probes")

    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        if any(len(conversation.texts) > 1 for conversation in conversations):
            raise ConfigurationError(
                "a second probe was asked for, but fixed probes are one turn each. Set the number "
                "of turns to 1."
            )
        return [
            ChatReply(self.probes[conversation.episode % len(self.probes)])
            for conversation in conversations
        ]


class ChatAttackerParameters(SubParameters):
    """A chat model that attacks because its prompt says so."""

    chat_model: polymorphic(CHAT_MODELS.get, ChatModel.Parameters)  # type: ignore[valid-type]
    """The model that says the probes."""
    system_prompt: PlainText
    """What it is told to do."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Longest probe, in the chat model's tokens."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature; null leaves it to the service."""


class ChatAttacker(TextAttacker):
    """A chat model that attacks because its prompt says so.

    Parameters
    ----------
    agent : ChatAgent
        Speaks as the assistant; what the target says is the user's.
    """

    def __init__(self, agent: ChatAgent) -> None:
        self.agent = agent
        self.language_model = agent.language_model

    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        return self.agent.reply([conversation.texts for conversation in conversations], seeds)
