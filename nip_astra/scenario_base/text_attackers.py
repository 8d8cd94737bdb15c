"""Attackers without token probabilities: fixed probes, or a prompted chat model."""

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
    """A conversation as seen by a text attacker.

    Attributes
    ----------
    episode : int
        Index of its episode in the evaluation.
    texts : Sequence[str]
        Messages so far, the target's opening first.
    """

    episode: int
    texts: Sequence[str]


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
        """Next probe of each conversation, or the reason why there is none."""


class FixedProbes(TextAttacker):
    """Predefined probes: one per episode, in order, repeating."""

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

    chat_model: polymorphic(CHAT_MODELS.get, ChatModel.Parameters)  # type: ignore[valid-type]
    """Model that generates the probes."""
    system_prompt: PlainText
    """System prompt of the attacker."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Maximum length of a probe, in the chat model's tokens."""
    temperature: float | None = Field(default=1.0, ge=0)
    """Sampling temperature; null uses the service's default."""


class ChatAttacker(TextAttacker):
    """A chat model prompted to attack.

    Parameters
    ----------
    agent : ChatAgent
        Acts as the assistant; the target's messages are the user's.
    """

    def __init__(self, agent: ChatAgent) -> None:
        self.agent = agent
        self.language_model = agent.language_model

    def probe(
        self, conversations: Sequence[TextConversation], seeds: Sequence[int]
    ) -> list[ChatReply]:
        return self.agent.reply([conversation.texts for conversation in conversations], seeds)
