"""Three provers and a verifier on three channels, of which each agent sees some."""

from __future__ import annotations

from pydantic import Field

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import (
    DeterministicSingleVerifierProtocolHandler,
    MessageRounds,
)
from nip_astra.protocols.registry import register_protocol_handler

TURNS = (
    {("verifier", "main"), ("verifier", "prover0_verifier")},
    {("prover0", "prover0_verifier"), ("prover1", "prover_chat")},
    {("prover1", "main"), ("prover2", "prover_chat")},
)
"""Who sends where in a round, by its number modulo 3."""


@register_protocol_handler(InteractionProtocolType.MULTI_CHANNEL_TEST)
class MultiChannelTestProtocol(DeterministicSingleVerifierProtocolHandler):
    """A protocol for tests: several senders in a round, and a channel that the verifier misses."""

    agent_names = ("prover0", "prover1", "prover2", "verifier")
    message_channel_names = ("main", "prover0_verifier", "prover_chat")
    agent_channel_visibility = (
        ("prover0", "main"),
        ("prover1", "main"),
        ("prover2", "main"),
        ("verifier", "main"),
        ("prover0", "prover0_verifier"),
        ("verifier", "prover0_verifier"),
        ("prover0", "prover_chat"),
        ("prover1", "prover_chat"),
        ("prover2", "prover_chat"),
    )
    never_reads = ("protocol_common.verifier_first",)

    class Parameters(MessageRounds):
        """How long conversations are."""

        min_message_rounds: int = Field(default=2, ge=1, le=10_000)
        """Rounds that must be played, that of the decision included, before a decision counts."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return (agent_name, channel_name) in TURNS[round_index % 3]
