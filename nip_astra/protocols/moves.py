"""Moves of a protocol's agents in a round, and their result.

Shape suffixes: `E` environment, `A` agent, `C` channel, `P` message position, `S` message symbol,
`3` the decisions reject, accept and continue.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from nip_astra.parameters.parameters_base import SubParameters

REJECT = 0
"""The decision that the label is 0."""
ACCEPT = 1
"""The decision that the label is 1."""
CONTINUE = 2
"""No decision yet."""

FORCED_DECISIONS = {"zero": REJECT, "one": ACCEPT}


class MessageRounds(SubParameters):
    """Length of conversations."""

    max_message_rounds: int = Field(default=8, ge=1, le=10_000)
    """Rounds after which a conversation ends without a decision. Larger allows more messages."""
    min_message_rounds: int = Field(default=1, ge=1, le=10_000)
    """First round in which a decision counts, from 1."""


@dataclass(frozen=True)
class Moves:
    """Moves of all agents in one round.

    Attributes
    ----------
    decision_EA : Tensor
        long; 0 reject, 1 accept, 2 continue. Read only if the agent may decide.
    message_logits_EACPS : Tensor or None
        float; unnormalised log-probabilities of message symbols, -1e9 for impossible ones.
        Required by `needs_logits`; read only where the agent is active.
    decision_logits_EA3 : Tensor or None
        float; those of decisions. Required by `needs_logits`.
    """

    decision_EA: Tensor
    message_logits_EACPS: Tensor | None = None
    decision_logits_EA3: Tensor | None = None


@dataclass(frozen=True)
class ProtocolStep:
    """Result of a round.

    Attributes
    ----------
    reward_EA : Tensor
        float32, no grad; reward of each agent.
    has_decided_E : Tensor
        bool; True if the episode ends with this round by a decision.
    is_out_of_rounds_E : Tensor
        bool; True if it ends with this round without a decision. Excludes `has_decided_E`.
    agent_decided_EA : Tensor
        bool; True if an agent has decided, in this round or before: it no longer acts or gets
        rewards. Pass it to the next step.
    decision_E : Tensor
        long; the verifier's decision in the round in which it counts, else 2.
    """

    reward_EA: Tensor
    has_decided_E: Tensor
    is_out_of_rounds_E: Tensor
    agent_decided_EA: Tensor
    decision_E: Tensor

    @property
    def is_done(self) -> Tensor:
        """Bool `[E]`; True if the episode terminates with this round (never a truncation)."""
        return self.has_decided_E | self.is_out_of_rounds_E
