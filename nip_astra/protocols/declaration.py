"""Validation, tables and display of a protocol's declaration.

Shape suffixes: `A` agent, `C` channel, `R` round, `O` order of turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError

if TYPE_CHECKING:
    from nip_astra.protocols.protocol_base import ProtocolHandler


class ProtocolTables(NamedTuple):
    """Lookup tables of a protocol, with one row after the last round, in which nobody acts.

    Attributes
    ----------
    active_ORAC : Tensor
        bool; whether an agent may send in a channel.
    can_decide_ORA : Tensor
        bool; whether an agent's decision counts.
    has_turn_ORA : Tensor
        bool; whether an agent may send in any channel.
    is_prover_A, is_verifier_A : Tensor
        bool.
    question_round_ORC : Tensor
        long; the round of the message to answer, 0 if there is none.
    """

    active_ORAC: Tensor
    can_decide_ORA: Tensor
    has_turn_ORA: Tensor
    is_prover_A: Tensor
    is_verifier_A: Tensor
    question_round_ORC: Tensor

    def to(self, device: torch.device) -> ProtocolTables:
        """The tables on a device."""
        return ProtocolTables(*(table.to(device) for table in self))


def check_names(handler: ProtocolHandler) -> None:
    """Refuse a protocol with inconsistent names or round limits.

    Raises
    ------
    ConfigurationError
        Lists all faults.
    """
    _refuse(handler, [*_faults_of_names(handler), *_faults_of_limits(handler)])


def check_turns(handler: ProtocolHandler, active_ORAC: Tensor) -> None:
    """Refuse a protocol in which an agent sends in a channel that it does not see, or a verifier
    cannot decide.

    Raises
    ------
    ConfigurationError
        Lists all faults.
    """
    _refuse(handler, list(_faults_of_shape(handler, active_ORAC)))
    _refuse(handler, list(_faults_of_turns(handler, active_ORAC)))


def _refuse(handler: ProtocolHandler, faults: list[str]) -> None:
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        name = type(handler).__name__
        raise ConfigurationError(f"the protocol {name} is invalid:\n{lines}")


def _faults_of_names(handler: ProtocolHandler) -> Iterator[str]:
    agents, channels = handler.agent_names, handler.message_channel_names
    for what, names in (("agent_names", agents), ("message_channel_names", channels)):
        if isinstance(names, str) or not names:
            yield f"{what} is {names!r}. Give a tuple with at least one name."
        elif len(set(names)) < len(names):
            yield f"{what} {tuple(names)} has a duplicate. Give unique names."
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


def _unknown(where: str, what: str, name: str, known: Sequence[str]) -> str:
    return f"{where} names the {what} {name!r}. Known: {', '.join(known) or 'none'}."


def _faults_of_limits(handler: ProtocolHandler) -> Iterator[str]:
    longest, shortest = handler.max_message_rounds, handler.min_message_rounds
    if not 1 <= shortest <= longest:
        yield (
            f"min_message_rounds={shortest} and max_message_rounds={longest}. Give 1 <= min <= max."
        )


def _faults_of_shape(handler: ProtocolHandler, active_ORAC: Tensor) -> Iterator[str]:
    shape = (handler.max_message_rounds, handler.num_agents, handler.num_channels)
    if active_ORAC.dim() != 4 or not len(active_ORAC) or tuple(active_ORAC.shape[1:]) != shape:
        yield (
            f"active_table has the shape {list(active_ORAC.shape)}. Return [orders, rounds, "
            f"agents, channels], here [at least 1, {', '.join(map(str, shape))}]."
        )


def _faults_of_turns(handler: ProtocolHandler, active_ORAC: Tensor) -> Iterator[str]:
    sends_AC = active_ORAC.any(0).any(0)
    blind_AC = sends_AC & ~handler.visibility_AC
    for a, c in blind_AC.nonzero().tolist():
        agent, channel = handler.agent_names[a], handler.message_channel_names[c]
        yield (
            f"{agent!r} sends in the channel {channel!r}, which it does not see. Add "
            f"({agent!r}, {channel!r}) to agent_channel_visibility, or make it inactive there."
        )
    for name in handler.verifier_names:
        has_turn_OR = active_ORAC[:, :, handler.agent_names.index(name)].any(-1)
        if not has_turn_OR[:, handler.min_message_rounds - 1 :].any(-1).all():
            yield (
                f"{name!r} cannot decide: it is inactive in the rounds "
                f"{handler.min_message_rounds} to {handler.max_message_rounds}. Raise "
                "max_message_rounds or lower min_message_rounds."
            )


def build_tables(handler: ProtocolHandler, active_ORAC: Tensor) -> ProtocolTables:
    """Build the lookup tables.

    Parameters
    ----------
    active_ORAC : Tensor
        bool; whether an agent may send in a channel, for all rounds.
    """
    active_ORAC = torch.cat([active_ORAC, torch.zeros_like(active_ORAC[:, :1])], dim=1)
    is_prover_A = torch.tensor([name in handler.prover_names for name in handler.agent_names])
    is_verifier_A = torch.tensor([name in handler.verifier_names for name in handler.agent_names])
    counts_R = torch.arange(active_ORAC.shape[1]) >= handler.min_message_rounds - 1
    has_turn_ORA = active_ORAC.any(-1)
    return ProtocolTables(
        active_ORAC,
        has_turn_ORA & is_verifier_A & counts_R[:, None],
        has_turn_ORA,
        is_prover_A,
        is_verifier_A,
        _question_rounds(active_ORAC, is_verifier_A),
    )


def _question_rounds(active_ORAC: Tensor, is_verifier_A: Tensor) -> Tensor:
    question_ORC = _last_before(active_ORAC[:, :, is_verifier_A].any(2))
    message_ORC = _last_before(active_ORAC.any(2))
    return torch.where(question_ORC < 0, message_ORC, question_ORC).clamp(min=0)


def _last_before(happens_ORC: Tensor) -> Tensor:
    """The last True round before each round, -1 if there is none."""
    rounds_R1 = torch.arange(happens_ORC.shape[1])[:, None]
    latest_ORC = torch.where(happens_ORC, rounds_R1, -1).cummax(1).values
    return torch.cat([torch.full_like(latest_ORC[:, :1], -1), latest_ORC[:, :-1]], 1)


def describe_table(handler: ProtocolHandler, active_ORAC: Tensor, can_decide_ORA: Tensor) -> str:
    """Visible channels, and by round the active channels and deciding agents, as text."""
    seen = [
        f"{agent} sees {', '.join(_names(handler, handler.visible_channels(agent))) or 'nothing'}"
        for agent in handler.agent_names
    ]
    blocks = ["\n".join(seen)]
    num_orders = len(active_ORAC)
    for order in range(num_orders):
        rows = [["round", *handler.agent_names]]
        for r in range(handler.max_message_rounds):
            cells = []
            for a in range(handler.num_agents):
                words = _names(handler, active_ORAC[order, r, a].nonzero().flatten().tolist())
                decides = ["decides"] if can_decide_ORA[order, r, a] else []
                cells.append(", ".join([*words, *decides]) or "-")
            rows.append([str(r), *cells])
        head = [f"episodes with seed % {num_orders} = {order}:"] if num_orders > 1 else []
        blocks.append("\n".join([*head, *_aligned(rows)]))
    return "\n\n".join(blocks)


def _names(handler: ProtocolHandler, channels: list[int]) -> list[str]:
    return [handler.message_channel_names[c] for c in channels]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
