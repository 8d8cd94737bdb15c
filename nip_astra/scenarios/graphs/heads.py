"""What acts on the representation of a pair of graphs.

Shapes: B frames, V visible channels, P positions, n nodes of a graph (padded), S = 2 n symbols,
L linear symbols, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.scenario_base.protocol.message_space import AgentShape
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentPolicyHead,
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
from nip_astra.scenarios.graphs.agent_parameters import GraphIsomorphismAgentParameters
from nip_astra.scenarios.graphs.bodies import GRAPHS, NODES, GraphRepresentation


def impossible_symbols(observation: Observation, shape: AgentShape) -> Tensor:
    """The nodes that an agent cannot send, True, [B, V or 1, P or 1, S].

    Nobody sends padding, and a prover no node of a graph that is closed to it.
    """
    is_padding_BS = ~observation["node_mask"].flatten(1)
    if shape.is_verifier:
        return is_padding_BS[:, None, None]
    n = observation["node_mask"].shape[-1]
    is_closed_BVP2 = closed_graphs(observation, shape)
    return is_padding_BS[:, None, None] | is_closed_BVP2.repeat_interleave(n, dim=-1)


def closed_graphs(observation: Observation, shape: AgentShape) -> Tensor:
    """The graphs of which a prover cannot send a node, True, [B, V, P, 2].

    It answers with a node of the graph opposite to the one that the verifier's last question in the
    same channel and position is of, and of the first graph where there was no question. In a
    channel where no verifier has spoken, what was said last there is the question.
    """
    history_BRCPS, n = observation["message_history"], observation["node_mask"].shape[-1]
    visible_V = torch.tensor(shape.visible_channels, device=history_BRCPS.device)
    frames_B1 = torch.arange(len(history_BRCPS), device=history_BRCPS.device)[:, None]
    rounds_BV = observation["question_round"][:, visible_V]
    question_BVPS = history_BRCPS[frames_B1, rounds_BV, visible_V]
    is_said_BVP2 = question_BVPS.view(*question_BVPS.shape[:-1], 2, n).sum(-1) > 0
    is_first_said, is_second_said = is_said_BVP2.unbind(-1)
    return torch.stack([is_first_said & ~is_second_said, ~is_first_said], dim=-1)


class GraphPolicyHead(AgentPolicyHead):
    """Scores each node by itself, and decides on the two graphs."""

    def __init__(
        self,
        parameters: GraphIsomorphismAgentParameters,
        shape: AgentShape,
        impossible: ImpossibleSymbols | None = impossible_symbols,
    ) -> None:
        super().__init__(shape, impossible)
        space, d = shape.message_space, shape.d_representation
        num_places = shape.num_visible * space.message_size
        activation = parameters.activation_function
        self.node_selector = mlp(
            d,
            parameters.d_node_selector,
            parameters.num_node_selector_layers,
            num_places,
            activation,
        )
        self.sees_round = parameters.include_round_in_decider
        self.decider = None
        if shape.has_decision:
            self.decider = mlp(
                2 * d + shape.num_rounds * self.sees_round,
                parameters.d_decider,
                parameters.num_decider_layers,
                3,
                activation,
            )
        self.linear_message_selector = None
        if space.num_linear_symbols:
            self.linear_message_selector = mlp(
                2 * d,
                parameters.d_linear_message_selector,
                parameters.num_linear_message_selector_layers,
                num_places * space.num_linear_symbols,
                activation,
            )

    def decide_as(self, solo_head: SoloAgentHead) -> None:
        if self.decider is not None and isinstance(solo_head, GraphSoloHead):
            start_from(self.decider, solo_head.network)

    def logits(self, representation: Representation, observation: Observation) -> PolicyOutput:
        space = self.shape.message_space
        message_logits_BVPS = self._message_logits(representation, observation)
        places = message_logits_BVPS.shape[:3]
        decision_logits_B3, linear_logits_BVPL = None, None
        if self.decider is not None:
            decision_logits_B3 = self.decider(
                _graphs_and_round(representation, observation, self.shape, self.sees_round)
            )
        if self.linear_message_selector is not None:
            linear = self.linear_message_selector(representation[GRAPHS].flatten(1))
            linear_logits_BVPL = linear.view(*places, space.num_linear_symbols)
        return PolicyOutput(message_logits_BVPS, decision_logits_B3, linear_logits_BVPL)

    def _message_logits(self, representation: Representation, observation: Observation) -> Tensor:
        graph_B = self._only_open_graph(observation)
        if graph_B is None or not isinstance(representation, GraphRepresentation):
            nodes_BSF: Tensor = self.node_selector(representation[NODES])
            num_visible, space = self.shape.num_visible, self.shape.message_space
            places = (len(nodes_BSF), num_visible, space.message_size)
            return nodes_BSF.transpose(1, 2).reshape(*places, space.num_symbols)
        nodes_Bn1: Tensor = self.node_selector(representation.nodes_of(graph_B))
        # Both graphs get the logits of the open one: those of the other are masked.
        return nodes_Bn1.transpose(1, 2).repeat(1, 1, 2).unsqueeze(1)

    def _only_open_graph(self, observation: Observation) -> Tensor | None:
        """The number of the one graph whose nodes can be sent, [B], or None."""
        shape = self.shape
        num_places = shape.num_visible * shape.message_space.message_size
        if self.impossible is not impossible_symbols or shape.is_verifier or num_places > 1:
            return None
        if observation["message"].device.type != "cpu":
            # Elsewhere a host would wait for its device to learn which graphs are open.
            return None
        is_closed_B2 = closed_graphs(observation, shape).flatten(1)
        return is_closed_B2[:, 0].long() if bool(is_closed_B2.any(1).all()) else None


class GraphValueHead(AgentValueHead):
    """Values from the two graphs."""

    def __init__(self, parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> None:
        super().__init__()
        self.shape = shape
        self.sees_round = parameters.include_round_in_value
        self.network = mlp(
            2 * shape.d_representation + shape.num_rounds * self.sees_round,
            parameters.d_value,
            parameters.num_value_layers,
            1,
            parameters.activation_function,
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        values_B1: Tensor = self.network(
            _graphs_and_round(representation, observation, self.shape, self.sees_round)
        )
        return values_B1.squeeze(-1)


class GraphSoloHead(SoloAgentHead):
    """Tells the label from the two graphs."""

    def __init__(self, parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> None:
        super().__init__()
        self.network = mlp(
            2 * shape.d_representation,
            parameters.d_decider,
            parameters.num_decider_layers,
            2,
            parameters.activation_function,
        )

    def forward(self, representation: Representation, observation: Observation) -> Tensor:
        logits_B2: Tensor = self.network(representation[GRAPHS].flatten(1))
        return logits_B2


def _graphs_and_round(
    representation: Representation, observation: Observation, shape: AgentShape, sees_round: bool
) -> Tensor:
    graphs = representation[GRAPHS].flatten(1)
    return torch.cat([graphs, round_one_hot(observation, shape)], 1) if sees_round else graphs
