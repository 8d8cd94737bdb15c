"""The body of agents that read pairs of graphs.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, D width, F message places
(rounds x channels x positions, or channels x positions of the last round).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.scenario_base.protocol.message_space import AgentShape
from nip_astra.scenario_base.protocol.tensordict_agents import AgentBody, Observation
from nip_astra.scenarios.graphs.agent_parameters import GraphIsomorphismAgentParameters
from nip_astra.scenarios.graphs.layers import AttentionLayer, GinLayers
from nip_astra.scenarios.graphs.network import Network
from nip_astra.scenarios.graphs.pairs import Pairs

GRAPHS, NODES = "graphs", "nodes"
"""Names in a representation: [B, 2, D] and [B, S, D]."""
MOMENTUM = 0.1
"""Share of the latest minibatch in the statistics that agents play by, once there are ten."""


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

    Nodes carry what was said about them; see `pairs.py` for what attends to what.
    """

    def __init__(self, parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> None:
        super().__init__(shape)
        space = shape.message_space
        self.num_places = shape.num_visible * space.message_size
        num_said = shape.num_rounds * self.num_places
        self.num_linear = num_said * space.num_linear_symbols
        d_gnn, d_token = parameters.d_gnn, parameters.d_transformer
        self.is_dual = parameters.use_dual_gnn
        self.has_hidden_state = bool(
            parameters.use_batch_norm or parameters.noise_sigma or parameters.transformer_dropout
        )
        # The last input is 1 at every node: without it nothing of a graph is seen before
        # something was said.
        self.node_input = nn.Linear(num_said + 1, d_gnn, bias=False)
        self.gnn_layers = GinLayers(
            parameters.num_gnn_layers,
            d_gnn,
            parameters.d_gin_mlp,
            parameters.activation_function,
            digits=parameters.gnn_output_digits,
        )
        d_pooled = d_gnn * (1 + self.is_dual)
        self.pooling = PairPooling(parameters, d_pooled)
        # Of a token: the graph network's output, which of the two graph tokens it is, the last
        # message, and the linear messages so far.
        self._token_sizes = [d_pooled, 2, self.num_places, self.num_linear]
        self.token_input = nn.Linear(sum(self._token_sizes), d_token)
        self.attention_layers = nn.ModuleList(
            AttentionLayer(
                d_token,
                parameters.num_heads,
                parameters.d_transformer_mlp,
                parameters.activation_function,
                dropout=parameters.transformer_dropout,
            )
            for _ in range(parameters.num_transformer_layers)
        )
        self.output = nn.Linear(d_token, shape.d_representation)

    def gnn_parameters(self) -> list[nn.Parameter]:
        """The weights whose learning rate `gnn_lr_factor` multiplies."""
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
        pairs = Pairs(*self._tokens(observation), observation["node_mask"])
        *layers, last = self.attention_layers
        for layer in layers:
            reading = layer(pairs)
            pairs = pairs._replace(graphs_B2D=reading.graphs(), nodes_BSD=reading.nodes())
        reading = last(pairs)
        return GraphRepresentation(
            self.output(reading.graphs()),
            lambda: self.output(reading.nodes()),
            lambda graph_B: self.output(reading.nodes_of(graph_B)),
        )

    def _tokens(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """The tokens of the graphs, [B, 2, D], and of the nodes, [B, S, D]."""
        node, flag, message, linear = torch.split(self.token_input.weight, self._token_sizes, dim=1)
        network = Network(
            said_BFS=self.history(observation).flatten(1, 3),
            adjacency_B2nn=observation["adjacency"],
            is_node_B2n=observation["node_mask"],
            last_BLS=self.last_message(observation).flatten(1, 2),
            input_DF=self.node_input.weight,
            node_ED=node[:, : self.node_input.out_features],
            bias_E=self.token_input.bias,
            message_EL=message,
        )
        nodes_BSD, sums_B2D = self.gnn_layers(network)
        if self.is_dual:
            unsaid = network.unsaid(node[:, self.node_input.out_features :])
            more_nodes_BSD, more_sums_B2D = self.gnn_layers(unsaid)
            nodes_BSD = nodes_BSD + more_nodes_BSD
            sums_B2D = torch.cat([sums_B2D, more_sums_B2D], dim=2)
        sums_B2D = self.pooling(sums_B2D)
        graphs_B2D = functional.linear(sums_B2D, node) + (flag.t() + self.token_input.bias)
        if self.num_linear:
            heard = functional.linear(self.linear_history(observation).flatten(1), linear)
            graphs_B2D, nodes_BSD = graphs_B2D + heard[:, None], nodes_BSD + heard[:, None]
        return graphs_B2D, nodes_BSD


class SumsNorm(nn.BatchNorm1d):
    """Batch normalisation over frames and both graphs (arXiv:1502.03167).

    While learning, by the minibatch's mean and variance; in play by their running means, or those
    of the frames at hand as long as nothing was learnt.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, sums_B2D: Tensor) -> Tensor:
        rows_RD = sums_B2D.flatten(0, 1)
        if self.training:
            self.num_batches_tracked.add_(1)
        num_batches = int(self.num_batches_tracked)
        normed_RD = functional.batch_norm(
            rows_RD,
            # Where torch may not write them, it would not use them either.
            self.running_mean if num_batches else None,
            self.running_var if num_batches else None,
            self.weight,
            self.bias,
            training=self.training or not num_batches,
            # A plain mean at first: there is nothing yet that the minibatch could be blended with.
            momentum=max(MOMENTUM, 1 / max(num_batches, 1)),
            eps=self.eps,
        )
        return normed_RD.view(sums_B2D.shape)


class PairPooling(nn.Module):
    """Normalises the sums, disturbs them, and makes them blind to which graph is the first.

    Parameters
    ----------
    width : int
        D.
    """

    def __init__(self, parameters: GraphIsomorphismAgentParameters, width: int) -> None:
        super().__init__()
        self.norm = SumsNorm(width) if parameters.use_batch_norm else None
        self.noise_sigma = parameters.noise_sigma
        self.is_pair_invariant = parameters.use_pair_invariant_pooling

    def forward(self, sums_B2D: Tensor) -> Tensor:
        """What the two graph tokens are made of, [B, 2, D]."""
        if self.norm is not None:
            sums_B2D = self.norm(sums_B2D)
        if self.noise_sigma and self.training:
            # The same for both graphs: equal ones stay equal.
            noise_B1D = torch.randn_like(sums_B2D[:, :1]) * self.noise_sigma
            sums_B2D = sums_B2D + noise_B1D * sums_B2D.detach()
        if self.is_pair_invariant:
            first, second = sums_B2D.unbind(1)
            sums_B2D = torch.stack([(first + second) / 2, (first - second).abs()], dim=1)
        return sums_B2D
