"""The shipped protocols, from a single verifier to three provers."""

from __future__ import annotations

from itertools import product

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.parameters.types import InteractionProtocolType
from nip_astra.protocols.protocol_base import (
    ACCEPT,
    REJECT,
    DeterministicSingleVerifierProtocolHandler,
    MessageRounds,
)
from nip_astra.protocols.registry import register_protocol_handler


@register_protocol_handler(InteractionProtocolType.SOLO_VERIFIER)
class SoloVerifierProtocol(DeterministicSingleVerifierProtocolHandler):
    """The verifier decides in the only round, without messages."""

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


@register_protocol_handler(InteractionProtocolType.ADP)
class AdpProtocol(DeterministicSingleVerifierProtocolHandler):
    """The prover sends one message; the verifier decides in the next round."""

    agent_names = ("prover", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover", "main"), ("verifier", "main"))
    never_reads = ("protocol_common.verifier_first", "protocol_common.verifier_no_guess_reward")
    max_message_rounds = 2
    min_message_rounds = 1

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return agent_name == ("prover", "verifier")[round_index]


@register_protocol_handler(InteractionProtocolType.NIP)
class NipProtocol(DeterministicSingleVerifierProtocolHandler):
    """A verifier and a prover alternate; the verifier may decide in each of its turns."""

    agent_names = ("prover", "verifier")
    message_channel_names = ("main",)
    agent_channel_visibility = (("prover", "main"), ("verifier", "main"))

    class Parameters(MessageRounds):
        """Length of conversations."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        # Both are true for the verifier that moves first, and false for the prover that does.
        is_first_mover = (agent_name == "verifier") == self.common.verifier_first
        first_round = 0 if is_first_mover else 1
        return round_index % 2 == first_round


@register_protocol_handler(InteractionProtocolType.MERLIN_ARTHUR)
class MerlinArthurProtocol(DeterministicSingleVerifierProtocolHandler):
    """One of two provers sends a message; the verifier decides in the next round.

    `prover0` argues for 0 and sends in episodes with an even seed; `prover1` argues for 1 and sends
    in the others.
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
        # An order for even seeds, and one for odd seeds with the provers swapped.
        even_ORAC = super().active_table()
        odd_ORAC = even_ORAC[:, :, [1, 0, 2]]
        return torch.cat([even_ORAC, odd_ORAC])


TWO_PROVER_AGENTS = ("prover0", "prover1", "verifier")
TWO_PROVER_CHANNELS = ("prover0_channel", "prover1_channel")


class TwoProverParameters(MessageRounds):
    """Length of conversations and order of the provers."""

    sequential: bool = False
    """Whether provers send one after the other, so that the second sees the first one's message,
    instead of in the same round. The verifier then has fewer turns."""
    prover0_first: bool = True
    """Whether prover0 sends before prover1, if `sequential`."""


class TwoProverProtocol(DeterministicSingleVerifierProtocolHandler):
    """A verifier and two provers, each with its own channel, alternate."""

    agent_names = TWO_PROVER_AGENTS
    message_channel_names = TWO_PROVER_CHANNELS

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        turns: list[tuple[str, ...]] = [("prover0", "prover1")]
        if self.parameters.sequential:
            turns = [("prover0",), ("prover1",)]
            if not self.parameters.prover0_first:
                turns.reverse()
        turns.insert(0 if self.common.verifier_first else len(turns), ("verifier",))
        is_turn = agent_name in turns[round_index % len(turns)]
        # The verifier asks both; a prover sends in its own channel only.
        channel_owner = channel_name.removesuffix("_channel")
        return is_turn and agent_name in ("verifier", channel_owner)


@register_protocol_handler(InteractionProtocolType.DEBATE)
class DebateProtocol(TwoProverProtocol):
    """`prover0` argues for 0 and `prover1` for 1; the verifier may decide in its turns.

    Each prover sends in its own channel, simultaneously or sequentially; all see both channels.
    """

    agent_channel_visibility = tuple(product(TWO_PROVER_AGENTS, TWO_PROVER_CHANNELS))
    favoured_decisions = {"prover0": REJECT, "prover1": ACCEPT}

    class Parameters(TwoProverParameters):
        """Length of conversations and order of the provers."""


@register_protocol_handler(InteractionProtocolType.MNIP)
class MnipProtocol(TwoProverProtocol):
    """Both provers argue for 1, each in a channel that the other does not see.

    The verifier sees both, can compare the provers' answers, and may decide in its turns.
    """

    agent_channel_visibility = (
        ("prover0", "prover0_channel"),
        ("prover1", "prover1_channel"),
        ("verifier", "prover0_channel"),
        ("verifier", "prover1_channel"),
    )

    class Parameters(TwoProverParameters):
        """Length of conversations and order of the provers."""


MULTI_CHANNEL_TURNS = (
    {("verifier", "main"), ("verifier", "prover0_verifier")},
    {("prover0", "prover0_verifier"), ("prover1", "prover_chat")},
    {("prover1", "main"), ("prover2", "prover_chat")},
)
"""Active pairs of agent and channel, by round index modulo 3."""


@register_protocol_handler(InteractionProtocolType.MULTI_CHANNEL_TEST)
class MultiChannelTestProtocol(DeterministicSingleVerifierProtocolHandler):
    """A protocol for tests: several senders per round, and a channel hidden from the verifier."""

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
        """Length of conversations."""

        min_message_rounds: int = Field(default=2, ge=1, le=10_000)
        """First round in which a decision counts, from 1."""

    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        return (agent_name, channel_name) in MULTI_CHANNEL_TURNS[round_index % 3]


NipProtocolParameters = NipProtocol.Parameters
DebateProtocolParameters = DebateProtocol.Parameters
MnipProtocolParameters = MnipProtocol.Parameters
