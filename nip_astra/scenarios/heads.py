"""Heads that read a summary of the datapoint, for scenarios whose symbols are its parts.

Shapes: B frames, V channels that the agent sees, P positions, S symbols, L linear symbols, X width
of the summary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentPolicyHead,
    AgentShape,
    AgentValueHead,
    ImpossibleSymbols,
    Observation,
    PolicyOutput,
    Representation,
    SoloAgentHead,
    mlp,
    round_one_hot,
    start_from,
)


def _summary(
    representation: Representation, key: str, observation: Observation, shape: AgentShape | None
) -> Tensor:
    """Return the summary, [B, X], followed by the one-hot round if a shape is given."""
    summary_BX = representation[key].flatten(1)
    if shape is None:
        return summary_BX
    return torch.cat([summary_BX, round_one_hot(observation, shape)], dim=1)


class SummaryPolicyHead(AgentPolicyHead):
    """Scores symbols one by one; decides and chooses linear symbols from the summary.

    A subclass sets `key` and `names` and implements `symbol_logits`.

    Parameters
    ----------
    d_symbol, d_summary : int
        Widths of the inputs for a symbol and for decisions.
    d_selector, num_selector_layers : int
        Width and number of the layers that score a symbol.
    """

    key: ClassVar[str]
    """Name of the summary in the representation."""
    names: ClassVar[tuple[str, str, str]]
    """Names, in checkpoints, of the networks for symbols, decisions and linear symbols."""

    def __init__(
        self,
        agent: Any,
        shape: AgentShape,
        impossible: ImpossibleSymbols | None,
        *,
        d_symbol: int,
        d_selector: int,
        num_selector_layers: int,
        d_summary: int,
    ) -> None:
        super().__init__(shape, impossible)
        activation = agent.activation_function
        num_linear = shape.message_space.num_linear_symbols
        num_places = shape.num_visible * shape.message_space.message_size
        self.round_shape = shape if agent.include_round_in_decider else None
        networks: list[nn.Module | None] = [
            mlp(d_symbol, d_selector, num_selector_layers, num_places, activation),
            None,
            None,
        ]
        if shape.has_decision:
            d_decider = d_summary + (shape.num_rounds if self.round_shape else 0)
            networks[1] = mlp(d_decider, agent.d_decider, agent.num_decider_layers, 3, activation)
        if num_linear:
            networks[2] = mlp(
                d_summary,
                agent.d_linear_message_selector,
                agent.num_linear_message_selector_layers,
                num_places * num_linear,
                activation,
            )
        for name, network in zip(self.names, networks, strict=True):
            setattr(self, name, network)

    @abstractmethod
    def symbol_logits(self, representation: Representation, observation: Observation) -> Tensor:
        """Return logits of symbols, [B, V, P, S]."""

    def decide_as(self, solo_head: SoloAgentHead) -> None:
        decider = getattr(self, self.names[1])
        if decider is not None and isinstance(solo_head, SummarySoloHead):
            start_from(decider, solo_head.network)

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        decider, linear_selector = (getattr(self, name) for name in self.names[1:])
        message_logits_BVPS = self.symbol_logits(representation, observation)
        decision_logits_B3: Tensor | None = None
        linear_logits_BVPL: Tensor | None = None
        if decider is not None:
            summary = _summary(representation, self.key, observation, self.round_shape)
            decision_logits_B3 = decider(summary)
        if linear_selector is not None:
            summary = _summary(representation, self.key, observation, None)
            linear_logits = linear_selector(summary)
            linear_logits_BVPL = linear_logits.view(*message_logits_BVPS.shape[:3], -1)
        return PolicyOutput(message_logits_BVPS, decision_logits_B3, linear_logits_BVPL)

    def by_place(self, logits_BSF: Tensor) -> Tensor:
        """Reshape logits by symbol, with all message places last, to [B, V, P, S]."""
        num_channels = self.shape.num_visible
        message_size = self.shape.message_space.message_size
        logits_BFS = logits_BSF.transpose(1, 2)
        return logits_BFS.reshape(len(logits_BSF), num_channels, message_size, -1)


class SummaryValueHead(AgentValueHead):
    """Values from the summary, and from the round if the agent's parameters include it."""

    def __init__(self, agent: Any, shape: AgentShape, key: str, d_summary: int) -> None:
        super().__init__()
        self.key = key
        self.round_shape = shape if agent.include_round_in_value else None
        self.network = mlp(
            d_summary + (shape.num_rounds if self.round_shape else 0),
            agent.d_value,
            agent.num_value_layers,
            1,
            agent.activation_function,
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        values_B1: Tensor = self.network(
            _summary(representation, self.key, observation, self.round_shape)
        )
        return values_B1.squeeze(-1)


class SummarySoloHead(SoloAgentHead):
    """Predicts the label from the summary."""

    def __init__(self, agent: Any, key: str, d_summary: int) -> None:
        super().__init__()
        self.key = key
        self.network = mlp(
            d_summary, agent.d_decider, agent.num_decider_layers, 2, agent.activation_function
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        logits_B2: Tensor = self.network(_summary(representation, self.key, observation, None))
        return logits_B2
