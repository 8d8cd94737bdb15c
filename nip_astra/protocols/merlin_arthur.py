"""One of two provers, drawn by the episode's seed, speaks once."""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import (
    ACCEPT,
    REJECT,
    DeterministicSingleVerifierProtocolHandler,
)
from nip_astra.protocols.registry import register_protocol_handler


@register_protocol_handler(InteractionProtocolType.MERLIN_ARTHUR)
class MerlinArthurProtocol(DeterministicSingleVerifierProtocolHandler):
    """One of two provers sends a message, and the verifier decides in the round after it.

    `prover0` argues for 0 and speaks in episodes with an even seed; `prover1` argues for 1 and
    speaks in the others.
    """

    agent_names = ("prover0", "prover1", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover0", "main"), ("prover1", "main"), ("verifier", "main"))
    favoured_decisions = {"prover0": REJECT, "prover1": ACCEPT}
    never_reads = ("protocol_common.verifier_first", "protocol_common.verifier_no_guess_reward")
    max_message_rounds = 2
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return agent_name == ("prover0", "verifier")[round_index]

    def active_table(self) -> Tensor:
        even_ORAC = super().active_table()
        return torch.cat([even_ORAC, even_ORAC[:, :, [1, 0, 2]]])
