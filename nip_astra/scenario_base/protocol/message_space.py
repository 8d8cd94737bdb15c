"""What agents of a protocol can say, and what their networks must know of the game."""

from __future__ import annotations

from dataclasses import dataclass

from nip_astra.protocols.protocol_base import ProtocolHandler

MASKED = -1e9
"""Logit of a symbol that cannot be sent; finite, so that entropies have no 0 times infinity."""


@dataclass(frozen=True)
class MessageSpace:
    """The symbols of a message.

    Attributes
    ----------
    num_symbols : int
        S, symbols of the scenario: nodes of both graphs, or parts of an image.
    message_size : int
        P, symbols that an agent sends in a channel at once.
    num_linear_symbols : int
        L, symbols without a meaning in the scenario, sent beside the others; 0 for none.
    """

    num_symbols: int
    message_size: int = 1
    num_linear_symbols: int = 0


@dataclass(frozen=True)
class AgentShape:
    """What the networks of one agent must know of the game.

    Attributes
    ----------
    name : str
        The agent's name in the protocol.
    is_verifier : bool
        Whether the agent is a verifier or, as a simulator does, plays one: it is no prover.
    has_decision : bool
        Whether the agent needs logits over reject, accept and continue.
    num_rounds : int
        R, rounds of the longest conversation.
    num_channels : int
        C, channels of the protocol.
    visible_channels : tuple[int, ...]
        Numbers of the channels that the agent sees, in order; Cv of them.
    message_space : MessageSpace
        What is sent.
    d_representation : int
        Width of what a body gives to its heads.
    """

    name: str
    is_verifier: bool
    has_decision: bool
    num_rounds: int
    num_channels: int
    visible_channels: tuple[int, ...]
    message_space: MessageSpace
    d_representation: int

    @property
    def num_visible(self) -> int:
        """Cv, the number of channels that the agent sees."""
        return len(self.visible_channels)


def shape_of_agent(
    name: str, protocol: ProtocolHandler, space: MessageSpace, d_representation: int
) -> AgentShape:
    """What the networks of an agent must fit, of a protocol and its messages."""
    number = protocol.agent_names.index(name)
    seen = protocol.visibility_AC[number].nonzero().flatten().tolist()
    return AgentShape(
        name=name,
        is_verifier=name not in protocol.prover_names,
        has_decision=protocol.has_decision_logits(name),
        num_rounds=protocol.max_message_rounds,
        num_channels=protocol.num_channels,
        visible_channels=tuple(seen),
        message_space=space,
        d_representation=d_representation,
    )
