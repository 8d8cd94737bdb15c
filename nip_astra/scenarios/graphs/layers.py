"""Layers for small graphs and few tokens, made of matrix products that can be derived twice.

Shapes: G graphs (two a frame), n nodes (padded), D width, H heads, Q queries, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from nip_astra.scenario_base.tensordict_agents import ACTIVATIONS
from nip_astra.scenarios.graphs import native
from nip_astra.scenarios.graphs.network import Network

MASKED_KEY = -1e9
"""What is added to the score of a key that is padding."""


class GinLayer(nn.Module):
    """An activation, a sum over each node and its neighbours, and a perceptron.

    The graph isomorphism network of arXiv:1810.00826, eq. 4.1, with epsilon 0.
    """

    def __init__(self, d_node: int, d_hidden: int, activation: str) -> None:
        super().__init__()
        self.inner = nn.Linear(d_node, d_hidden)
        self.outer = nn.Linear(d_hidden, d_node)
        self.activation = activation
        self.activate = ACTIVATIONS[activation]()

    def weights(self) -> list[Tensor]:
        """Give weights and biases, from the input on."""
        inner, outer = self.inner, self.outer
        return [inner.weight, inner.bias, outer.weight, outer.bias]

    def forward(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        """Give the nodes after the layer.

        Parameters
        ----------
        closed_Gnn : Tensor
            The adjacency, with every node a neighbour of itself.
        """
        sums_GnD = torch.bmm(closed_Gnn, self.activate(nodes_GnD))
        result: Tensor = self.outer(self.activate(self.inner(sums_GnD)))
        return result


class GinLayers(nn.ModuleList):
    """A graph network: layers of one activation function, and what it does before and after."""

    def __init__(self, num_layers: int, d_node: int, d_hidden: int, activation: str) -> None:
        super().__init__(GinLayer(d_node, d_hidden, activation) for _ in range(num_layers))
        self.activation = activation

    def forward(self, network: Network) -> tuple[Tensor, Tensor]:
        """Give a token of each node, [B, S, E], and the sums of each graph's nodes, [B, 2, D]."""
        if self.activation == "tanh":
            layers = cast(Iterable[GinLayer], self)
            weights = [weight for layer in layers for weight in layer.weights()]
            return native.tanh_network(network, weights)
        return network.apply(self._passed)

    def _passed(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        for layer in self:
            nodes_GnD = layer(nodes_GnD, closed_Gnn)
        return nodes_GnD


class AttentionLayer(nn.Module):
    """Attention and a perceptron, each added to its input and normalised (arXiv:1706.03762).

    What is asked and what answers are given apart, so that queries whose result nobody reads cost
    nothing. The products of each head's query and key matrices, and of its value and output
    matrices, are taken first: keys and values are then the tokens themselves, uncopied.
    """

    def __init__(self, d_token: int, num_heads: int, d_hidden: int, activation: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_token, d_token)
        # A bias of keys would add the same to all scores of a query, and one of values is in
        # the output's.
        self.key = nn.Linear(d_token, d_token, bias=False)
        self.value = nn.Linear(d_token, d_token, bias=False)
        self.output = nn.Linear(d_token, d_token)
        self.attention_norm = nn.LayerNorm(d_token)
        self.inner = nn.Linear(d_token, d_hidden)
        self.outer = nn.Linear(d_hidden, d_token)
        self.norm = nn.LayerNorm(d_token)
        self.activation = activation
        self.activate = ACTIVATIONS[activation]()

    def joint_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Give the weight and bias of queries, [H D, D] and [H D], and of outputs, [H D, D]."""
        heads, d = self.num_heads, self.query.in_features
        query_HdD = self.query.weight.view(heads, -1, d)
        key_HDd = self.key.weight.view(heads, -1, d).transpose(1, 2) / math.sqrt(d / heads)
        weight = torch.bmm(key_HDd, query_HdD).flatten(0, 1)
        bias = torch.bmm(key_HDd, self.query.bias.view(heads, -1, 1)).flatten()
        value_HDd = self.value.weight.view(heads, -1, d).transpose(1, 2)
        output_HdD = self.output.weight.t().reshape(heads, -1, d)
        return weight, bias, torch.bmm(value_HDd, output_HdD).flatten(0, 1)

    def forward(
        self,
        tokens_GQD: Tensor,
        keys_GKD: Tensor,
        mask_GK1: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Give the tokens after having attended to the keys.

        Parameters
        ----------
        mask_GK1 : Tensor
            Added to scores: 0, or `MASKED_KEY` at padding.
        weights : tuple
            From `joint_weights`, once for all calls of a pass.
        """
        query, query_bias, output = weights
        attended_GQD = native.attention(
            *(tokens_GQD, keys_GKD, mask_GK1, query, query_bias, output, self.output.bias),
            *(self.attention_norm.weight, self.attention_norm.bias),
        )
        inner, outer, norm = self.inner, self.outer, self.norm
        tokens = attended_GQD.flatten(0, 1)
        if self.activation == "tanh":
            perceptron = (inner.weight, inner.bias, outer.weight, outer.bias)
            result = native.residual(tokens, *perceptron, norm.weight, norm.bias)
        else:
            result = norm(tokens + outer(self.activate(inner(tokens))))
        return result.view_as(tokens_GQD)
