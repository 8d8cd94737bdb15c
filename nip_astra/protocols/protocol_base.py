"""Interaction protocols: agents, channels, turns, termination and rewards.

In every round all agents move simultaneously: each sends messages in the channels in which it is
active, and decides. A subclass of `DeterministicSingleVerifierProtocolHandler` declares the agents,
the channels, their visibility, and `is_agent_active`; the rest follows.

Everything is vectorised over environments, returns new tensors and does not modify its inputs.

Shape suffixes: `E` environment, `A` agent, `C` channel, `P` message position, `S` message symbol,
`R` round, `O` order of turns, `X` result, `3` the decisions reject, accept and continue.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.deadlines import limit_hooks
from nip_astra.errors import ConfigurationError
from nip_astra.parameters.hyper_parameters import HyperParameters
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
    """Moves of all agents in one round."""

    decision_EA: Tensor
    """long; 0 reject, 1 accept, 2 continue. Read only if the agent may decide."""
    message_logits_EACPS: Tensor | None = None
    """float; unnormalised log-probabilities of message symbols, -1e9 for impossible ones. Required
    by `needs_logits`; read only where the agent is active."""
    decision_logits_EA3: Tensor | None = None
    """float; those of decisions. Required by `needs_logits`."""


@dataclass(frozen=True)
class ProtocolStep:
    """Result of a round."""

    reward_EA: Tensor
    """float32, no grad; reward of each agent."""
    has_decided_E: Tensor
    """bool; True if the episode ends with this round by a decision."""
    is_out_of_rounds_E: Tensor
    """bool; True if it ends with this round without a decision. Excludes `has_decided_E`."""
    agent_decided_EA: Tensor
    """bool; True if an agent has decided, in this round or before: it no longer acts or gets
    rewards. Pass it to the next step."""
    decision_E: Tensor
    """long; the verifier's decision in the round in which it counts, else 2."""

    @property
    def is_done(self) -> Tensor:
        """Whether the episode terminates with this round (never a truncation), bool `[E]`."""
        return self.has_decided_E | self.is_out_of_rounds_E


class ProtocolTables(NamedTuple):
    """Lookup tables of a protocol, with an extra row after the last round, when none acts."""

    active_ORAC: Tensor
    """bool; whether an agent may send in a channel."""
    can_decide_ORA: Tensor
    """bool; whether an agent's decision counts."""
    has_turn_ORA: Tensor
    """bool; whether an agent may send in any channel."""
    is_prover_A: Tensor
    is_verifier_A: Tensor
    question_round_ORC: Tensor
    """long; the round of the message to answer, 0 if there is none."""

    def to(self, device: torch.device) -> ProtocolTables:
        """Move the tables to a device."""
        return ProtocolTables(*(table.to(device) for table in self))


def _refuse(handler: ProtocolHandler, faults: Iterable[str]) -> None:
    lines = "\n".join(f"  {fault}" for fault in faults)
    if lines:
        name = type(handler).__name__
        raise ConfigurationError(f"the protocol {name} is invalid:\n{lines}")


def _faults_of_names(handler: ProtocolHandler) -> Iterator[str]:
    agents, channels = handler.agent_names, handler.message_channel_names
    for attribute, names in (("agent_names", agents), ("message_channel_names", channels)):
        if isinstance(names, str) or not names:
            yield f"{attribute} is {names!r}. Give a tuple with at least one name."
        elif len(set(names)) < len(names):
            yield f"{attribute} {tuple(names)} has a duplicate. Give unique names."
    for name in agents:
        is_file_name = isinstance(name, str) and name and not {".", "/"} & set(name)
        if not is_file_name:
            yield f"agent_names has {name!r}. Files have this name: omit dots and slashes."
    for pair in handler.agent_channel_visibility:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            yield f"agent_channel_visibility holds {pair!r}. Give pairs (agent, channel)."
            continue
        agent, channel = pair
        if agent not in agents:
            yield _unknown("agent_channel_visibility", "agent", agent, agents)
        if channel not in channels:
            yield _unknown("agent_channel_visibility", "channel", channel, channels)
    for agent, decision in handler.favoured_decisions.items():
        if agent not in handler.prover_names:
            yield _unknown("favoured_decisions", "prover", agent, handler.prover_names)
        if decision not in (0, 1):
            yield f"favoured_decisions[{agent!r}] is {decision!r}. Give REJECT (0) or ACCEPT (1)."
    if not handler.verifier_names:
        yield (
            f"none of the agents {tuple(agents)} decides. Begin one name with 'verifier', or give "
            "verifier_names."
        )
    elif handler.num_verifiers not in (None, len(handler.verifier_names)):
        yield (
            f"verifier_names is {tuple(handler.verifier_names)}, but step supports "
            f"{handler.num_verifiers}. Use one verifier, or subclass ProtocolHandler and implement "
            "step for several."
        )
    for agent in handler.verifier_names:
        if agent not in agents:
            yield _unknown("verifier_names", "agent", agent, agents)

    min_rounds = handler.min_message_rounds
    max_rounds = handler.max_message_rounds
    are_counts = isinstance(min_rounds, int) and isinstance(max_rounds, int)
    if not (are_counts and 1 <= min_rounds <= max_rounds):
        yield (
            f"min_message_rounds={min_rounds!r} and max_message_rounds={max_rounds!r}. Give "
            "integers, 1 <= min <= max."
        )


def _unknown(attribute: str, kind: str, name: str, valid_names: Sequence[str]) -> str:
    return f"{attribute} names the {kind} {name!r}. Known: {', '.join(valid_names) or 'none'}."


def _faults_of_turns(handler: ProtocolHandler, active_ORAC: Tensor) -> Iterator[str]:
    """Yield agents that send in channels they cannot see, and verifiers that cannot decide."""
    shape = (handler.max_message_rounds, handler.num_agents, handler.num_channels)
    has_orders = active_ORAC.dim() == 4 and len(active_ORAC) > 0
    if not has_orders or tuple(active_ORAC.shape[1:]) != shape:
        yield (
            f"active_table has the shape {list(active_ORAC.shape)}. Return [orders, rounds, "
            f"agents, channels], here [at least 1, {', '.join(map(str, shape))}]."
        )
        return
    # An agent would send without reading the answers.
    sends_AC = active_ORAC.any(0).any(0)
    sends_unseen_AC = sends_AC & ~handler.visibility_AC
    for agent_index, channel_index in sends_unseen_AC.nonzero().tolist():
        agent = handler.agent_names[agent_index]
        channel = handler.message_channel_names[channel_index]
        yield (
            f"{agent!r} sends in the channel {channel!r}, which it does not see. Add "
            f"({agent!r}, {channel!r}) to agent_channel_visibility, or make it inactive there."
        )
    for name in handler.verifier_names:
        has_turn_OR = active_ORAC[:, :, handler.agent_names.index(name)].any(-1)
        # Rounds in which a decision counts; in each order of turns there must be one.
        can_decide_O = has_turn_OR[:, handler.min_message_rounds - 1 :].any(-1)
        if not can_decide_O.all():
            yield (
                f"{name!r} cannot decide: it is inactive in the rounds "
                f"{handler.min_message_rounds} to {handler.max_message_rounds}. Raise "
                "max_message_rounds or lower min_message_rounds."
            )


def _faults_of_rewards(
    handler: ProtocolHandler, rewards_XA: Sequence[Sequence[object]]
) -> Iterator[str]:
    rewards_AX = list(zip(*rewards_XA, strict=True))
    for name, rewards_X in zip(handler.agent_names, rewards_AX, strict=True):
        for round_result, reward in zip(RoundResult, rewards_X, strict=True):
            if not isinstance(reward, Real) or not math.isfinite(reward):
                yield f"reward({name!r}, {round_result.name}) is {reward!r}. Give a finite number."
                # The first one of an agent shows the mistake.
                break


def _build_tables(handler: ProtocolHandler, active_ORAC: Tensor) -> ProtocolTables:
    # The row after the last round: episodes that have ended look it up until all have.
    ended_O1AC = torch.zeros_like(active_ORAC[:, :1])
    active_ORAC = torch.cat([active_ORAC, ended_O1AC], dim=1)
    is_prover_A = torch.tensor([name in handler.prover_names for name in handler.agent_names])
    is_verifier_A = torch.tensor([name in handler.verifier_names for name in handler.agent_names])
    decision_counts_R = torch.arange(active_ORAC.shape[1]) >= handler.min_message_rounds - 1
    has_turn_ORA = active_ORAC.any(-1)
    can_decide_ORA = has_turn_ORA & is_verifier_A & decision_counts_R[:, None]
    # A prover answers the verifier's last message; before that, any last message.
    question_ORC = _last_before(active_ORAC[:, :, is_verifier_A].any(2))
    message_ORC = _last_before(active_ORAC.any(2))
    question_round_ORC = torch.where(question_ORC < 0, message_ORC, question_ORC)
    return ProtocolTables(
        active_ORAC,
        can_decide_ORA,
        has_turn_ORA,
        is_prover_A,
        is_verifier_A,
        question_round_ORC.clamp(min=0),
    )


def _last_before(happens_ORC: Tensor) -> Tensor:
    """Return the last True round before each round, -1 if there is none."""
    rounds_R1 = torch.arange(happens_ORC.shape[1])[:, None]
    latest_ORC = torch.where(happens_ORC, rounds_R1, -1).cummax(1).values
    # Shifted by a round: the round itself is not before it.
    none_before_O1C = torch.full_like(latest_ORC[:, :1], -1)
    return torch.cat([none_before_O1C, latest_ORC[:, :-1]], 1)


def _describe_tables(handler: ProtocolHandler, tables: ProtocolTables) -> str:
    channel_names = handler.message_channel_names
    visibility_lines = []
    for agent in handler.agent_names:
        channels = [channel_names[index] for index in handler.visible_channels(agent)]
        visibility_lines.append(f"{agent} sees {', '.join(channels) or 'nothing'}")
    blocks = ["\n".join(visibility_lines)]
    num_orders = len(tables.active_ORAC)
    for order in range(num_orders):
        rows = [["round", *handler.agent_names]]
        for round_index in range(handler.max_message_rounds):
            row = [str(round_index)]
            for agent_index in range(handler.num_agents):
                active_C = tables.active_ORAC[order, round_index, agent_index]
                actions = [channel_names[index] for index in active_C.nonzero().flatten().tolist()]
                if tables.can_decide_ORA[order, round_index, agent_index]:
                    actions.append("decides")
                row.append(", ".join(actions) or "-")
            rows.append(row)
        lines = _align_columns(rows)
        if num_orders > 1:
            lines.insert(0, f"episodes with seed % {num_orders} = {order}:")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


class ProtocolHandler(ABC):
    """Base of all protocols.

    A subclass defines the abstract properties (also as class attributes), `active_table` and
    `step`. The declaration is checked on construction.

    Parameters
    ----------
    hyper_params : HyperParameters
        `protocol_common` holds rewards and order.
    parameters : ProtocolHandler.Parameters
        The section named after the protocol.

    Attributes
    ----------
    visibility_AC : Tensor
        bool; True if an agent sees a channel.

    Raises
    ------
    ConfigurationError
        If the declaration is inconsistent; lists all faults.
    """

    needs_logits: ClassVar[bool] = False
    """Whether `step` reads the logits of the moves."""
    num_verifiers: ClassVar[int | None] = None
    """Number of verifiers that `step` supports; None for any."""
    never_reads: ClassVar[tuple[str, ...]] = ()
    """Shared parameters that the protocol does not use, such as `protocol_common.verifier_first`
    with a fixed order of turns; setting them is an error."""
    favoured_decisions: Mapping[str, int] = {}
    """Rewarded decision by prover name; accept for provers not listed."""

    class Parameters(SubParameters):
        """The protocol's parameters; a subclass adds its own."""

    def __init__(self, hyper_params: HyperParameters, parameters: Any) -> None:
        self.hyper_params = hyper_params
        self.common = hyper_params.protocol_common
        self.parameters = parameters
        _refuse(self, _faults_of_names(self))
        visible_pairs = set(self.agent_channel_visibility)
        visibility_AC = []
        for agent in self.agent_names:
            visibility_AC.append(
                [(agent, channel) in visible_pairs for channel in self.message_channel_names]
            )
        self.visibility_AC = torch.tensor(visibility_AC)
        # After the names, which the table is checked against.
        active_ORAC = self.active_table()
        _refuse(self, _faults_of_turns(self, active_ORAC))
        self._tables = {active_ORAC.device: _build_tables(self, active_ORAC)}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        limit_hooks(cls, ("step", "reward", "active_mask", "can_decide", "logit_reward"))

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
        """Pairs of an agent and a channel that it sees. An agent sends only in visible channels."""

    @property
    def max_message_rounds(self) -> int:
        """Rounds after which an episode ends without a decision."""
        return int(self.parameters.max_message_rounds)

    @property
    def min_message_rounds(self) -> int:
        """First round in which a decision counts, from 1."""
        return int(self.parameters.min_message_rounds)

    @property
    def verifier_names(self) -> tuple[str, ...]:
        """Agents that decide: names beginning with "verifier"."""
        return tuple(name for name in self.agent_names if name.startswith("verifier"))

    @property
    def prover_names(self) -> tuple[str, ...]:
        """All other agents."""
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
        """Maximum number of rounds in which a verifier is active, including its decision."""
        tables = next(iter(self._tables.values()))
        return int((tables.has_turn_ORA & tables.is_verifier_A).sum(1).max())

    @property
    def stackelberg_sequence(self) -> tuple[tuple[str, ...], ...]:
        """Groups of agents, leaders first: the verifiers, then all others."""
        followers = tuple(name for name in self.agent_names if name not in self.verifier_names)
        return (self.verifier_names, followers) if followers else (self.verifier_names,)

    def visible_channels(self, agent_name: str) -> list[int]:
        """Return the indices of the channels that an agent sees, in order."""
        visibility_C = self.visibility_AC[self.agent_names.index(agent_name)]
        return visibility_C.nonzero().flatten().tolist()

    def has_decision_logits(self, agent_name: str) -> bool:
        """Return whether an agent's policy has a distribution over decisions."""
        return agent_name in self.verifier_names

    @abstractmethod
    def active_table(self) -> Tensor:
        """Return whether an agent may send in a channel, bool `[O, R, A, C]`.

        An episode uses the order `seed % O`.
        """

    def active_mask(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Return whether an agent may send in a channel, bool `[E, A, C]`; False after the end.

        Parameters
        ----------
        round_E : Tensor
            long; index of the round, from 0.
        seed_E : Tensor
            long, >= 0; seed of the episode.
        agent_decided_EA : Tensor, optional
            bool; agents that have decided and no longer act.
        """
        active_ORAC = self._tables_on(round_E.device).active_ORAC
        active_EAC = self._look_up(active_ORAC, round_E, seed_E)
        return active_EAC if agent_decided_EA is None else active_EAC & ~agent_decided_EA[..., None]

    def can_decide(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Return whether an agent's decision counts, bool `[E, A]`.

        True for a verifier that is active in any channel, from round `min_message_rounds` on.
        Parameters as in `active_mask`.
        """
        can_decide_ORA = self._tables_on(round_E.device).can_decide_ORA
        can_decide_EA = self._look_up(can_decide_ORA, round_E, seed_E)
        return can_decide_EA if agent_decided_EA is None else can_decide_EA & ~agent_decided_EA

    def question_round(self, round_E: Tensor, seed_E: Tensor) -> Tensor:
        """Return the round of the message to answer in each channel, long `[E, C]`.

        The last round in which a verifier sent a message there; before that, the last in which any
        agent did, or 0. Parameters as in `active_mask`.
        """
        question_round_ORC = self._tables_on(round_E.device).question_round_ORC
        return self._look_up(question_round_ORC, round_E, seed_E)

    @property
    def forced_names(self) -> tuple[str, ...]:
        """Agents whose decisions are forced instead of sampled from their policies."""
        return () if self.common.force_guess is None else self.verifier_names

    def chooses(
        self, round_E: Tensor, seed_E: Tensor, agent_decided_EA: Tensor | None = None
    ) -> Tensor:
        """Return whether an agent's policy makes a counting decision, bool `[E, A]`."""
        can_decide_EA = self.can_decide(round_E, seed_E, agent_decided_EA)
        if not self.forced_names:
            return can_decide_EA
        is_free_A = [name not in self.forced_names for name in self.agent_names]
        return can_decide_EA & torch.tensor(is_free_A, device=can_decide_EA.device)

    @abstractmethod
    def step(
        self, round_E: Tensor, seed_E: Tensor, y_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> ProtocolStep:
        """Return the result of the moves of a round.

        Parameters
        ----------
        round_E, seed_E : Tensor
            As in `active_mask`.
        y_E : Tensor
            long; the true labels, 0 or 1.
        agent_decided_EA : Tensor
            bool; from the previous step, False at first.
        """

    def logit_reward(
        self, agent_name: str, round_E: Tensor, seed_E: Tensor, decided_EA: Tensor, moves: Moves
    ) -> Tensor | None:
        """Return the differentiable reward on an agent's logits, `[E]`, or None.

        It does not depend on the sampled action, so it has no policy gradient; an objective
        maximises it directly. Parameters as in `step`.
        """
        return None

    def reward_mid_point_estimate(self, agent_name: str) -> float:
        """Return the midpoint between an agent's rewards for a good and a bad outcome."""
        if agent_name in self.verifier_names or self.common.shared_reward:
            return (self.common.verifier_reward + self.common.verifier_incorrect_penalty) / 2
        return self.common.prover_reward / 2

    def describe(self) -> str:
        """Describe the visible channels, and by round the active channels and deciding agents."""
        return _describe_tables(self, next(iter(self._tables.values())))

    def _tables_on(self, device: torch.device) -> ProtocolTables:
        if device not in self._tables:
            self._tables[device] = next(iter(self._tables.values())).to(device)
        return self._tables[device]

    def _look_up(self, table: Tensor, round_E: Tensor, seed_E: Tensor) -> Tensor:
        return table[seed_E % len(table), round_E.clamp(max=self.max_message_rounds)]


class RoundResult(IntEnum):
    """Result of a round of a protocol with one verifier."""

    NOTHING = 0
    """It is not the verifier's turn, or the verifier has already decided."""
    PASSED = 1
    """The verifier has a turn but makes no counting decision."""
    OUT_OF_ROUNDS = 2
    """The last round ends without a decision."""
    WRONG_REJECT = 3
    """The verifier rejects although the label is 1."""
    RIGHT_REJECT = 4
    """The verifier rejects, and the label is 0."""
    WRONG_ACCEPT = 5
    """The verifier accepts although the label is 0."""
    RIGHT_ACCEPT = 6
    """The verifier accepts, and the label is 1."""


class DeterministicSingleVerifierProtocolHandler(ProtocolHandler):
    """A protocol with one verifier whose turns depend on the round alone.

    The verifier is rewarded for a correct decision and penalised for a wrong one or for running out
    of rounds; provers are rewarded for the decision that they favour. See
    `CommonProtocolParameters`; `reward` may be overridden.
    """

    num_verifiers: ClassVar[int | None] = 1

    def __init__(self, hyper_params: HyperParameters, parameters: Any) -> None:
        super().__init__(hyper_params, parameters)
        self._verifier = self.agent_names.index(self.verifier_names[0])
        rewards_XA = []
        for round_result in RoundResult:
            rewards_XA.append([self.reward(name, round_result) for name in self.agent_names])
        _refuse(self, _faults_of_rewards(self, rewards_XA))
        self._reward_XA = torch.tensor(rewards_XA, dtype=torch.float32)

    @abstractmethod
    def is_agent_active(self, agent_name: str, round_index: int, channel_name: str) -> bool:
        """Return whether an agent may send in a channel in a round, from 0."""

    def reward(self, agent_name: str, result: RoundResult) -> float:
        """Return an agent's reward for a round's result; evaluated once, on construction."""
        common = self.common
        is_prover = agent_name in self.prover_names
        if agent_name in self.verifier_names or (is_prover and common.shared_reward):
            verifier_rewards = {
                RoundResult.NOTHING: 0.0,
                RoundResult.PASSED: common.verifier_no_guess_reward,
                RoundResult.OUT_OF_ROUNDS: common.verifier_terminated_penalty,
                RoundResult.WRONG_REJECT: common.verifier_incorrect_penalty,
                RoundResult.RIGHT_REJECT: common.verifier_reward,
                RoundResult.WRONG_ACCEPT: common.verifier_incorrect_penalty,
                RoundResult.RIGHT_ACCEPT: common.verifier_reward,
            }
            return verifier_rewards[result]
        # A prover gains by the decision alone, whether or not it is right.
        rewarded_results = [RoundResult.WRONG_ACCEPT, RoundResult.RIGHT_ACCEPT]
        if self.favoured_decisions.get(agent_name, ACCEPT) == REJECT:
            rewarded_results = [RoundResult.WRONG_REJECT, RoundResult.RIGHT_REJECT]
        return common.prover_reward if is_prover and result in rewarded_results else 0.0

    def active_table(self) -> Tensor:
        active_RAC: list[list[list[bool]]] = []
        for round_index in range(self.max_message_rounds):
            active_AC = []
            for agent in self.agent_names:
                active_C = [
                    bool(self.is_agent_active(agent, round_index, channel))
                    for channel in self.message_channel_names
                ]
                active_AC.append(active_C)
            active_RAC.append(active_AC)
        # One order of turns for all episodes.
        return torch.tensor([active_RAC])

    def step(
        self, round_E: Tensor, seed_E: Tensor, y_E: Tensor, agent_decided_EA: Tensor, moves: Moves
    ) -> ProtocolStep:
        verifier = self._verifier
        tables = self._tables_on(round_E.device)
        had_decided_E = agent_decided_EA[:, verifier]
        can_decide_E = self.can_decide(round_E, seed_E, agent_decided_EA)[:, verifier]
        chosen_E = moves.decision_EA[:, verifier]
        forced = self.common.force_guess
        if forced == "y":
            chosen_E = y_E
        elif forced is not None:
            chosen_E = torch.full_like(chosen_E, FORCED_DECISIONS[forced])
        # A decision in a round in which it does not count is ignored.
        decision_E = torch.where(can_decide_E, chosen_E, CONTINUE)
        is_made_E = decision_E != CONTINUE
        has_decided_E = is_made_E | had_decided_E
        is_last_E = round_E == self.max_message_rounds - 1
        is_out_of_rounds_E = is_last_E & ~has_decided_E
        has_turn_EA = self._look_up(tables.has_turn_ORA, round_E, seed_E)
        is_passed_E = has_turn_EA[:, verifier] & ~had_decided_E
        # By the order of `RoundResult`: NOTHING is 0 and PASSED 1; then come both results of a
        # rejection (decision 0), then those of an acceptance, the wrong one first.
        undecided_result_E = torch.where(
            is_out_of_rounds_E, RoundResult.OUT_OF_ROUNDS, is_passed_E.long()
        )
        is_right_E = decision_E == y_E
        decided_result_E = RoundResult.WRONG_REJECT + 2 * decision_E + is_right_E
        result_E = torch.where(is_made_E, decided_result_E, undecided_result_E)
        self._reward_XA = self._reward_XA.to(round_E.device)
        decides_now_EA = is_made_E[:, None] & tables.is_verifier_A
        return ProtocolStep(
            reward_EA=self._reward_XA[result_E],
            has_decided_E=has_decided_E,
            is_out_of_rounds_E=is_out_of_rounds_E,
            agent_decided_EA=agent_decided_EA | decides_now_EA,
            decision_E=decision_E,
        )
