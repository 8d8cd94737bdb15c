"""The verifier decides alone: what interaction is measured against."""

from __future__ import annotations

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import DeterministicSingleVerifierProtocolHandler
from nip_astra.protocols.registry import register_protocol_handler


@register_protocol_handler(InteractionProtocolType.SOLO_VERIFIER)
class SoloVerifierProtocol(DeterministicSingleVerifierProtocolHandler):
    """The verifier decides in the only round, and nobody speaks to it."""

    agent_names = ("verifier",)
    message_channel_names = ("main",)
    agent_channel_visibility = (("verifier", "main"),)
    max_message_rounds = 1
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return True
