"""Two provers who do not hear each other answer a verifier."""

from __future__ import annotations

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import DeterministicSingleVerifierProtocolHandler
from nip_astra.protocols.registry import register_protocol_handler
from nip_astra.protocols.two_provers import (
    AGENT_NAMES,
    CHANNEL_NAMES,
    TwoProverParameters,
    is_active,
    turns,
)


@register_protocol_handler(InteractionProtocolType.MNIP)
class MnipProtocol(DeterministicSingleVerifierProtocolHandler):
    """Both provers argue for 1, each in a channel that the other does not see.

    The verifier sees both, may hold one's answers against the other's, and may decide in its turns.
    """

    agent_names = AGENT_NAMES
    message_channel_names = CHANNEL_NAMES
    agent_channel_visibility = (
        ("prover0", "prover0_channel"),
        ("prover1", "prover1_channel"),
        ("verifier", "prover0_channel"),
        ("verifier", "prover1_channel"),
    )

    class Parameters(TwoProverParameters):
        """How long conversations are, and in which order provers speak."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        order = turns(self.parameters, verifier_first=self.common.verifier_first)
        return is_active(agent_name, round_index, channel_name, order)
