"""What agents of a protocol do in a round, and what that leads to.

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
    """How long the conversations of a protocol are."""

    max_message_rounds: int = Field(default=8, ge=1, le=10_000)
    """Rounds after which a conversation ends without a decision. Larger lets agents say more."""
    min_message_rounds: int = Field(default=1, ge=1, le=10_000)
    """Rounds that must be played, that of the decision included, before a decision counts."""


@dataclass(frozen=True)
class Moves:
    """What all agents do in one round.

    Attributes
    ----------
    decision_EA : Tensor
        long; 0 reject, 1 accept, 2 continue. Read only where the agent may decide.
    message_logits_EACPS : Tensor or None
        float; unnormalised log-probabilities of each message symbol, impossible ones at -1e9.
        Needed where `needs_logits`, and read only where the agent is active.
    decision_logits_EA3 : Tensor or None
        float; those of the decisions. Needed where `needs_logits`.
    """

    decision_EA: Tensor
    message_logits_EACPS: Tensor | None = None
    decision_logits_EA3: Tensor | None = None


@dataclass(frozen=True)
class ProtocolStep:
    """What a round leads to.

    Attributes
    ----------
    reward_EA : Tensor
        float32, no grad; what the round is worth to each agent.
    has_decided_E : Tensor
        bool; True where the episode ends with this round, by decision.
    is_out_of_rounds_E : Tensor
        bool; True where it ends with this round without one. Never together with `has_decided_E`.
    agent_decided_EA : Tensor
        bool; True where an agent has come to its own end, in this round or before: it has decided,
        acts no more and is rewarded no more. To be given to the next step.
    decision_E : Tensor
        long; the verifier's decision, in the round in which it counts; 2 in all others.
    """

    reward_EA: Tensor
    has_decided_E: Tensor
    is_out_of_rounds_E: Tensor
    agent_decided_EA: Tensor
    decision_E: Tensor

    @property
    def is_done(self) -> Tensor:
        """Bool `[E]`; True where the episode ends with this round: a true end, never a cut."""
        return self.has_decided_E | self.is_out_of_rounds_E
