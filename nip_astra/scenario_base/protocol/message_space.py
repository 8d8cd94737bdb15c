"""The message space of a protocol, and the shapes of agents' networks."""

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
        P, symbols per message.
    num_linear_symbols : int
        L, additional symbols without a meaning in the scenario; 0 for none.
    """

    num_symbols: int
    message_size: int = 1
    num_linear_symbols: int = 0


@dataclass(frozen=True)
class AgentShape:
    """Sizes that an agent's networks depend on.

    Attributes
    ----------
    name : str
        The agent's name in the protocol.
    is_verifier : bool
        Whether the agent is a verifier or acts as one (a simulator), not a prover.
    has_decision : bool
        Whether the agent needs logits over reject, accept and continue.
    num_rounds : int
        R, rounds of the longest conversation.
    num_channels : int
        C, channels of the protocol.
    visible_channels : tuple[int, ...]
        Indices of the Cv visible channels, in order.
    message_space : MessageSpace
        The symbols of messages.
    d_representation : int
        Width of the body's representation.
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
        """Cv, the number of visible channels."""
        return len(self.visible_channels)


def shape_of_agent(
    name: str, protocol: ProtocolHandler, space: MessageSpace, d_representation: int
) -> AgentShape:
    """The sizes of an agent's networks for a protocol and its messages."""
    number = protocol.agent_names.index(name)
    visible = protocol.visibility_AC[number].nonzero().flatten().tolist()
    return AgentShape(
        name=name,
        is_verifier=name not in protocol.prover_names,
        has_decision=protocol.has_decision_logits(name),
        num_rounds=protocol.max_message_rounds,
        num_channels=protocol.num_channels,
        visible_channels=tuple(visible),
        message_space=space,
        d_representation=d_representation,
    )
