"""A verifier asks and a prover answers."""

from __future__ import annotations

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import (
    DeterministicSingleVerifierProtocolHandler,
    MessageRounds,
)
from nip_astra.protocols.registry import register_protocol_handler


@register_protocol_handler(InteractionProtocolType.NIP)
class NipProtocol(DeterministicSingleVerifierProtocolHandler):
    """A verifier and a prover in turn; the verifier may decide in each of its turns."""

    agent_names = ("prover", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover", "main"), ("verifier", "main"))

    class Parameters(MessageRounds):
        """How long conversations are."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        is_first_mover = (agent_name == "verifier") == self.common.verifier_first
        return round_index % 2 == (0 if is_first_mover else 1)
