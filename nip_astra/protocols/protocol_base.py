"""What an interaction protocol is: agents, channels, who acts in which round, ends and rewards.

In every round each agent makes one move at the same time as all others: messages in the channels in
which it is active, and a decision. A subclass of `DeterministicSingleVerifierProtocolHandler`
declares the agents, the channels, who sees which, and `is_agent_active`; the rest follows.

Everything here is vectorised over environments, gives new tensors, and leaves its inputs alone.

Shape suffixes: `E` environment, `A` agent, `C` channel, `P` message position, `S` message symbol,
`R` round, `O` order of play, `X` result, `3` the decisions reject, accept and continue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.protocols.declaration import (
    ProtocolTables,
    build_tables,
    check_names,
    check_turns,
    describe_table,
)
from nip_astra.protocols.moves import ACCEPT as ACCEPT
from nip_astra.protocols.moves import CONTINUE as CONTINUE
from nip_astra.protocols.moves import FORCED_DECISIONS as FORCED_DECISIONS
from nip_astra.protocols.moves import REJECT as REJECT
from nip_astra.protocols.moves import MessageRounds as MessageRounds
from nip_astra.protocols.moves import Moves as Moves
from nip_astra.protocols.moves import ProtocolStep as ProtocolStep


class ProtocolHandler(ABC):
    """Base of all protocols.

    A subclass gives the abstract properties as class attributes or properties, `active_table`, and
    `step`. All is checked when it is built.

    Parameters
    ----------
    hyper_params : HyperParameters
        Its `protocol_common` holds rewards and order.
    parameters : ProtocolHandler.Parameters
        The section of the protocol's name.

    Attributes
    ----------
    visibility_AC : Tensor
        bool; True where an agent sees a channel.

    Raises
    ------
    ConfigurationError
        When the declaration contradicts itself; tells every fault.
    """

    needs_logits: ClassVar[bool] = False
    """Whether `step` reads the logits of the moves."""
    num_verifiers: ClassVar[int | None] = None
    """How many verifiers `step` is for; None for any number."""
    never_reads: ClassVar[tuple[str, ...]] = ()
    """Shared parameters that mean nothing to the protocol, such as `protocol_common.verifier_first`
    where the order of play is fixed; values given to them are refused."""
    favoured_decisions: Mapping[str, int] = {}
    """The decision that pays a prover, by its name; accept for provers that are not named here."""

    class Parameters(SubParameters):
        """The protocol's own parameters; a subclass adds its own."""

    def __init__(self, hyper_params: HyperParameters, parameters: Any) -> None:
        self.hyper_params = hyper_params
        self.common = hyper_params.protocol_common
        self.parameters = parameters
        check_names(self)
        seen = set(self.agent_channel_visibility)
        self.visibility_AC = torch.tensor(
            [[(a, c) in seen for c in self.message_channel_names] for a in self.agent_names]
        )
        active_ORAC = self.active_table()
        check_turns(self, active_ORAC)
        self._tables = {active_ORAC.device: build_tables(self, active_ORAC)}

    @property
    @abstractmethod
    def agent_names(self) -> tuple[str, ...]:
        """Names of the agents, in the order of every dimension `A`."""

    @property
    @abstractmethod
    def message_channel_names(self) -> tuple[str, ...]:
        """Names of the channels, in the order of every dimension `C`."""

    @property
    @abstractmethod
    def agent_channel_visibility(self) -> tuple[tuple[str, str], ...]:
        """Pairs of an agent and a channel that it sees. An agent sends only where it sees."""

    @property
    def max_message_rounds(self) -> int:
        """Rounds after which an episode ends without a decision."""
        return int(self.parameters.max_message_rounds)

    @property
    def min_message_rounds(self) -> int:
        """Rounds that must be played, that of the decision included, before a decision counts."""
        return int(self.parameters.min_message_rounds)

    @property
    def verifier_names(self) -> tuple[str, ...]:
        """Names of the agents that decide: those that begin with "verifier"."""
        return tuple(name for name in self.agent_names if name.startswith("verifier"))

    @property
    def prover_names(self) -> tuple[str, ...]:
        """Names of the provers: all other agents."""
        return tuple(name for name in self.agent_names if name not in self.verifier_names)

    @property
    def num_agents(self) -> int:
        """Number of agents."""
        return len(self.agent_names)

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return len(self.message_channel_names)

    @property
    def max_verifier_questions(self) -> int:
        """Rounds in which a verifier is active, at most; the one of its decision included."""
        tables = next(iter(self._tables.values()))
        return int((tables.has_turn_ORA & tables.is_verifier_A).sum(1).max())

    @property
    def stackelberg_sequence(self) -> tuple[tuple[str, ...], ...]:
        """Groups of agents, leaders first: the verifiers, then all others."""
        others = tuple(name for name in self.agent_names if name not in self.verifier_names)
        return (self.verifier_names, others) if others else (self.verifier_names,)

    def visible_channels(self, agent_name: str) -> list[int]:
        """The indices of the channels that an agent sees, in order."""
        return self.visibility_AC[self.agent_names.index(agent_name)].nonzero().flatten().tolist()

    def has_decision_logits(self, agent_name: str) -> bool:
        """Say whether an agent's policy has a distribution of decisions."""
        return agent_name in self.verifier_names

    @abstractmethod
    def active_table(self) -> Tensor:
        """Who may send where, bool `[O, R, A, C]`.

        An episode is played in the order `seed % O`.
        """

    def active_mask(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Who may send in which channel, bool `[E, A, C]`; nobody after the last round.

        Parameters
        ----------
        round_E : Tensor
            long; rounds played before, 0 at first.
        seed_E : Tensor
            long, >= 0; of the episode.
        agent_decided_EA : Tensor, optional
            bool; who has come to its own end, and so acts no more.
        """
        active_ORAC = self._tables_on(round_E.device).active_ORAC
        active_EAC = self._look_up(active_ORAC, round_E, seed_E)
        return active_EAC if agent_decided_EA is None else active_EAC & ~agent_decided_EA[..., None]

    def can_decide(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Whose decision counts, bool `[E, A]`.

        It is that of a verifier that is active in any channel, from round `min_message_rounds`
        on. Parameters are those of `active_mask`.
        """
        can_decide_ORA = self._tables_on(round_E.device).can_decide_ORA
        can_decide_EA = self._look_up(can_decide_ORA, round_E, seed_E)
        return can_decide_EA if agent_decided_EA is None else can_decide_EA & ~agent_decided_EA

    def question_round(self, round_E: Tensor, seed_E: Tensor) -> Tensor:
        """The round of the message that is to be answered in each channel, long `[E, C]`.

        It is the last in which a verifier asked there; before any has, the last in which anyone
        spoke, and 0 where nobody did. Parameters are those of `active_mask`.
        """
        question_round_ORC = self._tables_on(round_E.device).question_round_ORC
        return self._look_up(question_round_ORC, round_E, seed_E)

    @property
    def forced_names(self) -> tuple[str, ...]:
        """Agents whose decisions are forced, so that their policies have none to make."""
        return () if self.common.force_guess is None else self.verifier_names

    def chooses(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Whose policy makes a decision that counts, bool `[E, A]`; see `can_decide`."""
        can_decide_EA = self.can_decide(round_E, seed_E, agent_decided_EA)
        if not self.forced_names:
            return can_decide_EA
        is_free_A = [name not in self.forced_names for name in self.agent_names]
        return can_decide_EA & torch.tensor(is_free_A, device=can_decide_EA.device)

    @abstractmethod
    def step(
        self, round_E: Tensor, seed_E: Tensor, y_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> ProtocolStep:
        """What the moves of a round lead to.

        Parameters
        ----------
        round_E, seed_E : Tensor
            As in `active_mask`.
        y_E : Tensor
            long; the true labels, 0 or 1.
        agent_decided_EA : Tensor
            bool; what the step before gave, False at first.
        """

    def logit_reward(
        self, agent_name: str, round_E: Tensor, seed_E: Tensor, decided_EA: Tensor, moves: Moves
    ) -> Tensor | None:
        """The part of an agent's reward that its logits earn, `[E]`, with grad, or None.

        A policy gradient learns nothing from it, as it is the same whatever is drawn from the
        logits; an objective maximises it as it stands. Parameters are those of `step`.
        """
        return None

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """A reward between what an agent gets when it does well and when it does not."""
        if agent_name in self.verifier_names or self.common.shared_reward:
            return (self.common.verifier_reward + self.common.verifier_incorrect_penalty) / 2
        return self.common.prover_reward / 2

    def describe(self) -> str:
        """Who sees what, and who sends where and decides in each round, as text."""
        tables = next(iter(self._tables.values()))
        return describe_table(self, tables.active_ORAC[:, :-1], tables.can_decide_ORA[:, :-1])

    def _tables_on(self, device: torch.device) -> ProtocolTables:
        if device not in self._tables:
            self._tables[device] = next(iter(self._tables.values())).to(device)
        return self._tables[device]

    def _look_up(self, table: Tensor, round_E: Tensor, seed_E: Tensor) -> Tensor:
        return table[seed_E % len(table), round_E.clamp(max=self.max_message_rounds)]


class RoundResult(IntEnum):
    """What a round of a protocol with one verifier comes to."""

    NOTHING = 0
    """It is not the verifier's turn, or the verifier has decided before."""
    PASSED = 1
    """The verifier has a turn and makes no decision that counts."""
    OUT_OF_ROUNDS = 2
    """The last round ends without a decision."""
    WRONG_REJECT = 3
    """The verifier rejects, and the label is 1."""
    RIGHT_REJECT = 4
    """The verifier rejects, and the label is 0."""
    WRONG_ACCEPT = 5
    """The verifier accepts, and the label is 0."""
    RIGHT_ACCEPT = 6
    """The verifier accepts, and the label is 1."""


class DeterministicSingleVerifierProtocolHandler(ProtocolHandler):
    """A protocol with one verifier in which who acts follows from the round.

    The verifier is rewarded for a right decision and charged for a wrong one, and for running out
    of rounds; provers are rewarded for the decision that favours them. See
    `CommonProtocolParameters`; `reward` may be overridden.
    """

    num_verifiers: ClassVar[int | None] = 1

    def __init__(self, hyper_params: HyperParameters, parameters: Any) -> None:
        super().__init__(hyper_params, parameters)
        self._verifier = self.agent_names.index(self.verifier_names[0])
        self._reward_XA = torch.tensor(
            [
                [float(self.reward(name, result)) for name in self.agent_names]
                for result in RoundResult
            ]
        )

    @abstractmethod
    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        """Say whether an agent may send in a channel in a round, the first being 0."""

    def reward(self, agent_name: str, result: RoundResult) -> float:
        """What a round's result is worth to an agent; asked once, when it is built."""
        common = self.common
        right, wrong = common.verifier_reward, common.verifier_incorrect_penalty
        is_prover = agent_name in self.prover_names
        if agent_name in self.verifier_names or (is_prover and common.shared_reward):
            passed, late = common.verifier_no_guess_reward, common.verifier_terminated_penalty
            return (0.0, passed, late, wrong, right, wrong, right)[result]
        paying = [RoundResult.WRONG_ACCEPT, RoundResult.RIGHT_ACCEPT]
        if self.favoured_decisions.get(agent_name, ACCEPT) == REJECT:
            paying = [RoundResult.WRONG_REJECT, RoundResult.RIGHT_REJECT]
        return common.prover_reward if is_prover and result in paying else 0.0

    def active_table(self) -> Tensor:
        active_RAC = [
            [
                [bool(self.is_agent_active(agent, r, c)) for c in self.message_channel_names]
                for agent in self.agent_names
            ]
            for r in range(self.max_message_rounds)
        ]
        return torch.tensor([active_RAC])

    def step(
        self, round_E: Tensor, seed_E: Tensor, y_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> ProtocolStep:
        verifier = self._verifier
        had_decided_E = agent_decided_EA[:, verifier]
        can_decide_E = self.can_decide(round_E, seed_E, agent_decided_EA)[:, verifier]
        chosen_E = self._decision_that_counts(moves.decision_EA[:, verifier], y_E)
        decision_E = torch.where(can_decide_E, chosen_E, CONTINUE)
        is_made_E = decision_E != CONTINUE
        is_decided_E = is_made_E | had_decided_E
        is_out_of_rounds_E = (round_E == self.max_message_rounds - 1) & ~is_decided_E
        has_turn_EA = self._look_up(self._tables_on(round_E.device).has_turn_ORA, round_E, seed_E)
        is_passed_E = has_turn_EA[:, verifier] & ~had_decided_E
        result_E = torch.where(
            is_made_E,
            RoundResult.WRONG_REJECT + 2 * decision_E + (decision_E == y_E),
            torch.where(is_out_of_rounds_E, RoundResult.OUT_OF_ROUNDS, is_passed_E.long()),
        )
        is_verifier_A = self._tables_on(round_E.device).is_verifier_A
        return ProtocolStep(
            reward_EA=self._rewards_on(round_E.device)[result_E],
            has_decided_E=is_decided_E,
            is_out_of_rounds_E=is_out_of_rounds_E,
            agent_decided_EA=agent_decided_EA | (is_made_E[:, None] & is_verifier_A),
            decision_E=decision_E,
        )

    def _decision_that_counts(self, decision_E: Tensor, y_E: Tensor) -> Tensor:
        forced = self.common.force_guess
        if forced is None or forced == "y":
            return decision_E if forced is None else y_E
        return torch.full_like(decision_E, FORCED_DECISIONS[forced])

    def _rewards_on(self, device: torch.device) -> Tensor:
        self._reward_XA = self._reward_XA.to(device)
        return self._reward_XA
