"""Two provers argue for opposite answers before each other's eyes."""

from __future__ import annotations

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import (
    ACCEPT,
    REJECT,
    DeterministicSingleVerifierProtocolHandler,
)
from nip_astra.protocols.registry import register_protocol_handler
from nip_astra.protocols.two_provers import (
    AGENT_NAMES,
    CHANNEL_NAMES,
    TwoProverParameters,
    is_active,
    turns,
)


@register_protocol_handler(InteractionProtocolType.DEBATE)
class DebateProtocol(DeterministicSingleVerifierProtocolHandler):
    """`prover0` argues for 0 and `prover1` for 1, with a verifier that may decide in its turns.

    Each prover speaks in its own channel, at once or in turn, and all see both channels.
    """

    agent_names = AGENT_NAMES
    message_channel_names = CHANNEL_NAMES
    agent_channel_visibility = tuple(
        (agent, channel) for agent in AGENT_NAMES for channel in CHANNEL_NAMES
    )
    favoured_decisions = {"prover0": REJECT, "prover1": ACCEPT}

    class Parameters(TwoProverParameters):
        """How long conversations are, and in which order provers speak."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        order = turns(self.parameters, verifier_first=self.common.verifier_first)
        return is_active(agent_name, round_index, channel_name, order)
