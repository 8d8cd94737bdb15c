"""Agents that read pairs of graphs: parameters, layers, body and policy head.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, G = 2 B graphs, D width,
F message places (rounds x channels x positions, or channels x positions of the last round),
V visible channels, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.parameters.agents import HeadParameters, LrFactors
from nip_astra.parameters.conditions import where_above
from nip_astra.scenario_base.protocol.tensordict_agents import (
    AgentBody,
    AgentShape,
    ImpossibleSymbols,
    Observation,
    Representation,
)
from nip_astra.scenarios.graphs import native_layers as native
from nip_astra.scenarios.graphs.formulas import (
    LayerWeights,
    Network,
    PairReading,
    Pairs,
    attention_formula,
    read,
)
from nip_astra.scenarios.heads import SummaryPolicyHead
from nip_astra.utils.activations import ACTIVATIONS

GRAPHS, NODES = "graphs", "nodes"
"""Names in a representation: [B, 2, D] and [B, S, D]."""
MOMENTUM = 0.1
"""Weight of the latest minibatch in running means, after the first ten."""


class GraphIsomorphismAgentParameters(HeadParameters):
    """An agent with a graph network and a transformer."""

    activation_function: Literal["tanh", "relu", "gelu", "sigmoid"] = "tanh"
    """Activation between layers; tanh is the fastest if layers are compiled (see `doctor`)."""
    num_gnn_layers: int = Field(default=5, ge=1, le=1000)
    """Rounds of message passing; the agent cannot distinguish pairs that need more rounds of
    Weisfeiler-Lehman refinement."""
    d_gnn: int = Field(default=16, ge=1, le=1_000_000)
    """Width of a node between layers. Larger keeps more colours apart."""
    d_gin_mlp: int = Field(default=64, ge=1, le=1_000_000)
    """Width of the hidden layer within each layer of message passing."""
    gnn_output_digits: int | None = Field(default=None, ge=0)
    """Decimal places of the graph network's output, so that isomorphic graphs give equal numbers;
    null does not round. Derivatives are those without rounding. Not compiled."""
    use_dual_gnn: bool = False
    """Whether the graph network also reads the graphs without messages; up to twice as slow."""
    num_transformer_layers: int = Field(default=1, ge=1, le=1000)
    """Layers of attention between the graphs. Larger compares them more thoroughly."""
    num_heads: int = Field(default=4, ge=1)
    """Heads of attention; they divide d_transformer."""
    d_transformer: int = Field(default=16, ge=1, le=1_000_000)
    """Width of a token."""
    d_transformer_mlp: int = Field(default=64, ge=1, le=1_000_000)
    """Width of the hidden layer within each layer of attention."""
    transformer_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout in attention and perceptrons during training, not in rollouts. Larger overfits less.
    PPO's ratios then differ from 1 at once; not compiled in training, and by one process."""
    d_node_selector: Annotated[int, where_above("num_node_selector_layers", 1)] = Field(
        default=16, ge=1, le=1_000_000
    )
    """Width of the hidden layers that score a node."""
    num_node_selector_layers: int = Field(default=2, ge=1, le=1000)
    """Linear layers that score a node."""
    use_pair_invariant_pooling: bool = True
    """Whether the two graphs become their mean and difference, which hides their order."""
    use_batch_norm: bool = False
    """Whether the sums over each graph's nodes are normalised: by minibatch in training, which one
    process does, and by running means in rollouts."""
    noise_sigma: float = Field(default=0.0, ge=0)
    """Standard deviation of noise on these sums in training, relative to each, equal for both
    graphs. Larger overfits less; training is by one process."""
    gnn_lr_factor: LrFactors = LrFactors()
    """Learning rate of the graph network, as a multiple of the body's."""

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.d_transformer % self.num_heads:
            raise ValueError(f"num_heads must divide d_transformer, which is {self.d_transformer}")
        return self


# ---- layers


class GinLayer(nn.Module):
    """An activation, a sum over each node and its neighbours, and a perceptron.

    The graph isomorphism network of arXiv:1810.00826, eq. 4.1, with epsilon 0.
    """

    def __init__(self, d_node: int, d_hidden: int, activation: str) -> None:
        super().__init__()
        self.inner = nn.Linear(d_node, d_hidden)
        self.outer = nn.Linear(d_hidden, d_node)
        self.activate = ACTIVATIONS[activation]()

    def forward(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        """Apply the layer; in the adjacency, every node is a neighbour of itself."""
        sums_GnD = torch.bmm(closed_Gnn, self.activate(nodes_GnD))
        result: Tensor = self.outer(self.activate(self.inner(sums_GnD)))
        return result


class GinLayers(nn.ModuleList):
    """A graph network: layers with one activation function."""

    def __init__(
        self,
        num_layers: int,
        d_node: int,
        d_hidden: int,
        activation: str,
        *,
        digits: int | None = None,
    ) -> None:
        super().__init__(GinLayer(d_node, d_hidden, activation) for _ in range(num_layers))
        self.activation = activation
        self.digits = digits

    def forward(self, network: Network) -> tuple[Tensor, Tensor]:
        """Return a token of each node, [B, S, E], and the sums of each graph's nodes, [B, 2, D]."""
        if self.activation == "tanh":
            weights: list[Tensor] = []
            for layer in cast(Iterable[GinLayer], self):
                for linear in (layer.inner, layer.outer):
                    weights += [linear.weight, linear.bias]
            return native.tanh_network(network, weights, digits=self.digits)
        return network.apply(self._layers, digits=self.digits)

    def _layers(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        for layer in self:
            nodes_GnD = layer(nodes_GnD, closed_Gnn)
        return nodes_GnD


class AttentionLayer(nn.Module):
    """Attention and a perceptron, each added to its input and normalised (arXiv:1706.03762)."""

    def __init__(
        self,
        d_token: int,
        num_heads: int,
        d_hidden: int,
        activation: str,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.drop_out = nn.Dropout(dropout)
        self.query = nn.Linear(d_token, d_token)
        self.key = nn.Linear(d_token, d_token, bias=False)
        self.value = nn.Linear(d_token, d_token, bias=False)
        self.output = nn.Linear(d_token, d_token)
        self.attention_norm = nn.LayerNorm(d_token)
        self.inner = nn.Linear(d_token, d_hidden)
        self.outer = nn.Linear(d_hidden, d_token)
        self.norm = nn.LayerNorm(d_token)
        self.activation = activation
        self.activate = ACTIVATIONS[activation]()

    def weights(self) -> LayerWeights:
        """Return all weights."""
        query_by_head = self.query.weight.view(self.num_heads, -1, self.query.in_features)
        return LayerWeights(
            query_by_head,
            self.query.bias,
            self.key.weight,
            self.value.weight,
            self.output.weight,
            self.output.bias,
            self.attention_norm.weight,
            self.attention_norm.bias,
            self.inner.weight,
            self.inner.bias,
            self.outer.weight,
            self.outer.bias,
            self.norm.weight,
            self.norm.bias,
        )

    def forward(self, pairs: Pairs) -> PairReading | native.NativeReading:
        """Return the tokens after the layer, computed on request."""
        weights = self.weights()
        if self.training and self.drop_out.p:
            attention = partial(attention_formula, drop_out=self.drop_out)
            return read(pairs, weights, self._perceptron, attention)
        if self.activation == "tanh":
            return native.read(pairs, weights)
        return read(pairs, weights, self._perceptron)

    def _perceptron(self, rows_RD: Tensor) -> Tensor:
        hidden_RF = self.drop_out(self.activate(self.inner(rows_RD)))
        result: Tensor = self.norm(rows_RD + self.drop_out(self.outer(hidden_RF)))
        return result


class SumsNorm(nn.BatchNorm1d):
    """Batch normalisation over frames and both graphs (arXiv:1502.03167).

    In training by the minibatch's mean and variance; in rollouts by their running means, or by the
    present frames before any training.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, sums_B2D: Tensor) -> Tensor:
        rows_RD = sums_B2D.flatten(0, 1)
        if self.training:
            self.num_batches_tracked.add_(1)
        num_batches = int(self.num_batches_tracked)
        has_statistics = num_batches > 0
        # At first such that the running mean is the plain mean of all minibatches so far.
        momentum = max(MOMENTUM, 1 / max(num_batches, 1))
        normed_RD = functional.batch_norm(
            rows_RD,
            # torch uses running statistics if given, even before any training.
            self.running_mean if has_statistics else None,
            self.running_var if has_statistics else None,
            self.weight,
            self.bias,
            training=self.training or not has_statistics,
            momentum=momentum,
            eps=self.eps,
        )
        return normed_RD.view(sums_B2D.shape)


class PairPooling(nn.Module):
    """Normalises the sums of the graphs, adds noise, and hides which graph is the first."""

    def __init__(self, parameters: GraphIsomorphismAgentParameters, width: int) -> None:
        super().__init__()
        self.norm = SumsNorm(width) if parameters.use_batch_norm else None
        self.noise_sigma = parameters.noise_sigma
        self.is_pair_invariant = parameters.use_pair_invariant_pooling

    def forward(self, sums_B2D: Tensor) -> Tensor:
        if self.norm is not None:
            sums_B2D = self.norm(sums_B2D)
        if self.noise_sigma and self.training:
            # The same for both graphs: equal ones stay equal.
            noise_B1D = torch.randn_like(sums_B2D[:, :1]) * self.noise_sigma
            sums_B2D = sums_B2D + noise_B1D * sums_B2D.detach()
        if self.is_pair_invariant:
            first_BD, second_BD = sums_B2D.unbind(1)
            mean_BD = (first_BD + second_BD) / 2
            difference_BD = (first_BD - second_BD).abs()
            sums_B2D = torch.stack([mean_BD, difference_BD], dim=1)
        return sums_B2D


# ---- body


class GraphRepresentation(dict[str, Tensor]):
    """A representation with nodes computed on first use; value and solo heads do not read them."""

    def __init__(self, graphs_B2D: Tensor, nodes: Callable[[], Tensor]) -> None:
        super().__init__({GRAPHS: graphs_B2D})
        self._nodes = nodes

    def __missing__(self, key: str) -> Tensor:
        if key != NODES:
            raise KeyError(key)
        self[NODES] = self._nodes()
        return self[NODES]


class GraphBody(AgentBody):
    """A graph isomorphism network, whose sums become one token per graph, and a transformer.

    Nodes carry the messages about them; `Pairs` describes the attention.
    """

    def __init__(self, parameters: GraphIsomorphismAgentParameters, shape: AgentShape) -> None:
        super().__init__(shape)
        space = shape.message_space
        self.num_places = shape.num_visible * space.message_size
        num_sent = shape.num_rounds * self.num_places
        self.num_linear = num_sent * space.num_linear_symbols
        d_gnn, d_token = parameters.d_gnn, parameters.d_transformer
        self.is_dual = parameters.use_dual_gnn
        self.has_hidden_state = bool(
            parameters.use_batch_norm or parameters.noise_sigma or parameters.transformer_dropout
        )
        # The last input is 1 at every node: without it, graphs without messages are invisible.
        self.node_input = nn.Linear(num_sent + 1, d_gnn, bias=False)
        self.gnn_layers = GinLayers(
            parameters.num_gnn_layers,
            d_gnn,
            parameters.d_gin_mlp,
            parameters.activation_function,
            digits=parameters.gnn_output_digits,
        )
        d_pooled = d_gnn * (1 + self.is_dual)
        self.pooling = PairPooling(parameters, d_pooled)
        # The graph network's output, which of the two graph tokens it is, the last message, and
        # the linear messages so far.
        self._token_sizes = [d_pooled, 2, self.num_places, self.num_linear]
        self.token_input = nn.Linear(sum(self._token_sizes), d_token)
        self.attention_layers = nn.ModuleList()
        for _ in range(parameters.num_transformer_layers):
            attention_layer = AttentionLayer(
                d_token,
                parameters.num_heads,
                parameters.d_transformer_mlp,
                parameters.activation_function,
                dropout=parameters.transformer_dropout,
            )
            self.attention_layers.append(attention_layer)
        self.output = nn.Linear(d_token, shape.d_representation)

    def gnn_parameters(self) -> list[nn.Parameter]:
        """Return the weights whose learning rate `gnn_lr_factor` multiplies."""
        return [*self.node_input.parameters(), *self.gnn_layers.parameters()]

    @torch.no_grad()
    def after_initialisation(self) -> None:
        # Initially, a node looks the same whichever round named it, so that isomorphic graphs stay
        # equal if question and answer name corresponding nodes.
        messages = self.node_input.weight[:, :-1]
        messages.copy_(messages[:, :1].expand_as(messages))

    def set_statistics(self, histories: Tensor, linear_histories: Tensor | None = None) -> None:
        # One mean and deviation for all nodes, so that they do not reveal a node's number.
        of_any_node = histories.movedim(-1, 1).flatten(0, 1)[..., None]
        super().set_statistics(of_any_node, linear_histories)

    def forward(self, observation: Observation) -> GraphRepresentation:
        graphs_B2D, nodes_BSD = self._tokens(observation)
        pairs = Pairs(graphs_B2D, nodes_BSD, observation["node_mask"])
        *layers, last_layer = self.attention_layers
        for layer in layers:
            reading = layer(pairs)
            pairs = pairs._replace(graphs_B2D=reading.graphs(), nodes_BSD=reading.nodes())
        # Of the last layer, the nodes are computed only for a policy head.
        reading = last_layer(pairs)
        return GraphRepresentation(
            self.output(reading.graphs()), lambda: self.output(reading.nodes())
        )

    def _tokens(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """Return the tokens of the graphs, [B, 2, D], and of the nodes, [B, S, D]."""
        # A product with the parts of a token side by side is the sum of the parts' products, which
        # are computed once per frame where they are equal for all nodes.
        node, flag, message, linear = torch.split(self.token_input.weight, self._token_sizes, dim=1)
        d_gnn = self.node_input.out_features
        network = Network(
            sent_BPS=self.history(observation).flatten(1, 3),
            adjacency_B2nn=observation["adjacency"],
            is_node_B2n=observation["node_mask"],
            last_BLS=self.last_message(observation).flatten(1, 2),
            input_DP=self.node_input.weight,
            node_ED=node[:, :d_gnn],
            bias_E=self.token_input.bias,
            message_EL=message,
        )
        nodes_BSD, sums_B2D = self.gnn_layers(network)
        if self.is_dual:
            silent_network = network.without_messages(node[:, d_gnn:])
            silent_nodes_BSD, silent_sums_B2D = self.gnn_layers(silent_network)
            nodes_BSD = nodes_BSD + silent_nodes_BSD
            sums_B2D = torch.cat([sums_B2D, silent_sums_B2D], dim=2)
        sums_B2D = self.pooling(sums_B2D)
        graphs_B2D = functional.linear(sums_B2D, node) + (flag.t() + self.token_input.bias)
        if self.num_linear > 0:
            linear_history = self.linear_history(observation).flatten(1)
            linear_BD = functional.linear(linear_history, linear)
            graphs_B2D = graphs_B2D + linear_BD[:, None]
            nodes_BSD = nodes_BSD + linear_BD[:, None]
        return graphs_B2D, nodes_BSD


# ---- policy head


def impossible_symbols(observation: Observation, shape: AgentShape) -> Tensor:
    """Return nodes that an agent cannot send, bool [B, V or 1, P or 1, S].

    Padding, and for a prover the nodes of a closed graph.
    """
    is_padding_BS = ~observation["node_mask"].flatten(1)
    if shape.is_verifier:
        return is_padding_BS[:, None, None]
    n = observation["node_mask"].shape[-1]
    is_closed_BVP2 = closed_graphs(observation, shape)
    return is_padding_BS[:, None, None] | is_closed_BVP2.repeat_interleave(n, dim=-1)


def closed_graphs(observation: Observation, shape: AgentShape) -> Tensor:
    """Return graphs whose nodes a prover cannot send, bool [B, V, P, 2].

    It answers with a node of the graph opposite to that of the verifier's last question in the same
    channel and position, or of the first graph without a question. In a channel without messages of
    a verifier, the last message is the question.
    """
    history_BRCPS = observation["message_history"]
    device = history_BRCPS.device
    num_nodes = observation["node_mask"].shape[-1]
    visible_V = torch.tensor(shape.visible_channels, device=device)
    frames_B1 = torch.arange(len(history_BRCPS), device=device)[:, None]
    rounds_BV = observation["question_round"][:, visible_V]
    question_BVPS = history_BRCPS[frames_B1, rounds_BV, visible_V]
    # The symbols are the nodes of the first graph, then those of the second.
    question_BVP2n = question_BVPS.view(*question_BVPS.shape[:-1], 2, num_nodes)
    is_sent_BVP2 = question_BVP2n.sum(-1) > 0
    is_first_sent, is_second_sent = is_sent_BVP2.unbind(-1)
    is_first_closed = is_first_sent & ~is_second_sent
    is_second_closed = ~is_first_sent
    return torch.stack([is_first_closed, is_second_closed], dim=-1)


class GraphPolicyHead(SummaryPolicyHead):
    """Scores each node by itself, and decides from the two graphs."""

    key = GRAPHS
    names = ("node_selector", "decider", "linear_message_selector")
    node_selector: nn.Sequential

    def __init__(
        self,
        parameters: GraphIsomorphismAgentParameters,
        shape: AgentShape,
        impossible: ImpossibleSymbols | None = impossible_symbols,
    ) -> None:
        super().__init__(
            parameters,
            shape,
            impossible,
            d_symbol=shape.d_representation,
            d_selector=parameters.d_node_selector,
            num_selector_layers=parameters.num_node_selector_layers,
            d_summary=2 * shape.d_representation,
        )

    def symbol_logits(self, representation: Representation, observation: Observation) -> Tensor:
        return self.by_place(self.node_selector(representation[NODES]))
