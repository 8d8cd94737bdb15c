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
    never_reads = (
        "protocol_common.verifier_first",
        "protocol_common.verifier_no_guess_reward",
        "protocol_common.prover_reward",
        "protocol_common.shared_reward",
        "zk_protocol.aux_prover_reward_coefficient",
    )
    max_message_rounds = 1
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return True
