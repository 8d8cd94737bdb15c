"""The body of agents that read pairs of graphs.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, D width, F message places
(rounds x channels x positions, or channels x positions of the last round), K keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.scenario_base.message_space import AgentShape
from nip_astra.scenario_base.tensordict_agents import AgentBody, Observation
from nip_astra.scenarios.graphs.agent_parameters import GraphIsomorphismAgentParameters
from nip_astra.scenarios.graphs.layers import MASKED_KEY, AttentionLayer, GinLayers
from nip_astra.scenarios.graphs.network import Network

GRAPHS, NODES = "graphs", "nodes"
"""Names in a representation: [B, 2, D] and [B, S, D]."""


class GraphRepresentation(dict[str, Tensor]):
    """A representation whose nodes are computed when they are first asked for.

    A value function and a solo head read only the graphs, a prover often the nodes of one.

    Attributes
    ----------
    nodes_of : Callable
        Gives the nodes of one graph a frame, [B, n, D], from its number, 0 or 1, [B] long.
    """

    def __init__(
        self,
        graphs_B2D: Tensor,
        nodes: Callable[[], Tensor],
        nodes_of: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__({GRAPHS: graphs_B2D})
        self._nodes = nodes
        self.nodes_of = nodes_of

    def __missing__(self, key: str) -> Tensor:
        if key != NODES:
            raise KeyError(key)
        self[NODES] = self._nodes()
        return self[NODES]


class GraphBody(AgentBody):
    """A graph isomorphism network, whose sums become a token a graph, and a transformer.

    Nodes carry what was said about them. Nodes of one graph do not attend to one another, but to
    those of the other graph and to the two graphs; the graphs attend to all.
    """

    def __init__(self, parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> None:
        super().__init__(shape)
        space = shape.message_space
        self.num_places = shape.num_visible * space.message_size
        num_said = shape.num_rounds * self.num_places
        self.num_linear = num_said * space.num_linear_symbols
        d_gnn, d_token = parameters.d_gnn, parameters.d_transformer
        self.is_pair_invariant = parameters.use_pair_invariant_pooling
        # The last input is 1 at every node: without it nothing of a graph is seen before
        # something was said.
        self.node_input = nn.Linear(num_said + 1, d_gnn, bias=False)
        self.gnn_layers = GinLayers(
            parameters.num_gnn_layers, d_gnn, parameters.d_gin_mlp, parameters.activation_function
        )
        # Of a token: the graph network's output, which of the two graph tokens it is, the last
        # message, and the linear messages so far.
        self._token_sizes = [d_gnn, 2, self.num_places, self.num_linear]
        self.token_input = nn.Linear(sum(self._token_sizes), d_token)
        self.attention_layers = nn.ModuleList(
            AttentionLayer(
                d_token,
                parameters.num_heads,
                parameters.d_transformer_mlp,
                parameters.activation_function,
            )
            for _ in range(parameters.num_transformer_layers)
        )
        self.output = nn.Linear(d_token, shape.d_representation)

    def gnn_parameters(self) -> list[nn.Parameter]:
        """Give the weights whose learning rate `gnn_lr_factor` multiplies."""
        return [*self.node_input.parameters(), *self.gnn_layers.parameters()]

    @torch.no_grad()
    def after_initialisation(self) -> None:
        # A node named in one round looks at first as one named in any other. So where a question
        # and its answer name nodes that correspond, isomorphic graphs still look the same.
        said = self.node_input.weight[:, :-1]
        said.copy_(said[:, :1].expand_as(said))

    def set_statistics(self, histories: Tensor, linear_histories: Tensor | None = None) -> None:
        # One mean and deviation for all nodes: with their own, nodes could be told by their number.
        of_any_node = histories.movedim(-1, 1).flatten(0, 1)[..., None]
        super().set_statistics(of_any_node, linear_histories)

    def forward(self, observation: Observation) -> GraphRepresentation:
        graphs_B2D, nodes_BSD = self._tokens(observation)
        masks = _key_masks(observation["node_mask"], nodes_BSD.dtype)
        *layers, last = self.attention_layers
        for layer in layers:
            attention = _Attention(layer, graphs_B2D, nodes_BSD, *masks)
            graphs_B2D, nodes_BSD = attention.graphs(), attention.nodes()
        attention = _Attention(last, graphs_B2D, nodes_BSD, *masks)
        return GraphRepresentation(
            self.output(attention.graphs()),
            lambda: self.output(attention.nodes()),
            lambda graph_B: self.output(attention.nodes_of(graph_B)),
        )

    def _tokens(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Give the tokens of the graphs, [B, 2, D], and of the nodes, [B, S, D]."""
        node, flag, message, linear = torch.split(self.token_input.weight, self._token_sizes, dim=1)
        network = Network(
            said_BFS=self.history(observation).flatten(1, 3),
            adjacency_B2nn=observation["adjacency"],
            is_node_B2n=observation["node_mask"],
            last_BLS=self.last_message(observation).flatten(1, 2),
            input_DF=self.node_input.weight,
            node_ED=node,
            bias_E=self.token_input.bias,
            message_EL=message,
        )
        nodes_BSD, sums_B2D = self.gnn_layers(network)
        if self.is_pair_invariant:
            first, second = sums_B2D.unbind(1)
            sums_B2D = torch.stack([(first + second) / 2, (first - second).abs()], dim=1)
        graphs_B2D = functional.linear(sums_B2D, node) + (flag.t() + self.token_input.bias)
        if self.num_linear:
            heard = functional.linear(self.linear_history(observation).flatten(1), linear)
            graphs_B2D, nodes_BSD = graphs_B2D + heard[:, None], nodes_BSD + heard[:, None]
        return graphs_B2D, nodes_BSD


class _Attention:
    """One layer of attention, for the graphs and for the nodes apart."""

    def __init__(
        self,
        layer: nn.Module,
        graphs_B2D: Tensor,
        nodes_BSD: Tensor,
        graph_mask_BK1: Tensor,
        node_mask_GK1: Tensor,
    ) -> None:
        assert isinstance(layer, AttentionLayer)
        self.layer, self.graphs_B2D, self.nodes_BSD = layer, graphs_B2D, nodes_BSD
        self.graph_mask_BK1, self.node_mask_GK1 = graph_mask_BK1, node_mask_GK1
        self.weights = layer.joint_weights()
        first, second = nodes_BSD.chunk(2, dim=1)
        # The first half is what the first graph's nodes read, the second half the second's.
        self.keys_BKD = torch.cat([second, graphs_B2D, first, graphs_B2D], dim=1)

    def graphs(self) -> Tensor:
        """Give the tokens of the graphs, [B, 2, D]."""
        tokens: Tensor = self.layer(
            self.graphs_B2D, self.keys_BKD, self.graph_mask_BK1, self.weights
        )
        return tokens

    def nodes(self) -> Tensor:
        """Give the tokens of the nodes, [B, S, D]."""
        tokens: Tensor = self.layer(*self._by_graph(), self.node_mask_GK1, self.weights)
        return tokens.view_as(self.nodes_BSD)

    def nodes_of(self, graph_B: Tensor) -> Tensor:
        """Give the tokens of the nodes of one graph a frame, [B, n, D]."""
        rows_B = 2 * torch.arange(len(graph_B), device=graph_B.device) + graph_B
        tokens_GnD, keys_GKD = self._by_graph()
        tokens: Tensor = self.layer(
            tokens_GnD.index_select(0, rows_B),
            keys_GKD.index_select(0, rows_B),
            self.node_mask_GK1.index_select(0, rows_B),
            self.weights,
        )
        return tokens

    def _by_graph(self) -> tuple[Tensor, Tensor]:
        num_frames, num_keys, d = self.keys_BKD.shape
        return (
            self.nodes_BSD.reshape(2 * num_frames, -1, d),
            self.keys_BKD.view(2 * num_frames, num_keys // 2, d),
        )


def _key_masks(node_mask_B2n: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Give what is added to the scores of the graphs' keys, [B, K, 1], and the nodes', [G, K, 1].

    Keys are ordered as `_Attention` has them; graphs read each of themselves once.
    """
    num_frames, _, n = node_mask_B2n.shape
    graph_mask = torch.zeros(num_frames, 2, n + 2, dtype=dtype, device=node_mask_B2n.device)
    graph_mask[:, :, :n].masked_fill_(~node_mask_B2n.flip(1), MASKED_KEY)
    node_mask = graph_mask.view(2 * num_frames, n + 2, 1).clone()
    graph_mask[:, 1, n:] = MASKED_KEY
    return graph_mask.view(num_frames, -1, 1), node_mask
