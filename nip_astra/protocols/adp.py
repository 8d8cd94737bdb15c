"""A prover speaks once and the verifier decides."""

from __future__ import annotations

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import DeterministicSingleVerifierProtocolHandler
from nip_astra.protocols.registry import register_protocol_handler


@register_protocol_handler(InteractionProtocolType.ADP)
class AdpProtocol(DeterministicSingleVerifierProtocolHandler):
    """The prover sends one message, and the verifier decides in the round after it."""

    agent_names = ("prover", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover", "main"), ("verifier", "main"))
    never_reads = ("protocol_common.verifier_first", "protocol_common.verifier_no_guess_reward")
    max_message_rounds = 2
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return agent_name == ("prover", "verifier")[round_index]
