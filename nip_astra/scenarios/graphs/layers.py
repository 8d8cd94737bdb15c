"""Layers for small graphs and few tokens, made of matrix products that can be derived twice.

Shapes: G graphs (two a frame), n nodes (padded), D width, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from nip_astra.scenarios.graphs import transformer
from nip_astra.scenarios.graphs.derivatives import attention_formula
from nip_astra.scenarios.graphs.native import network as native
from nip_astra.scenarios.graphs.network import Network
from nip_astra.scenarios.graphs.pairs import Pairs, Reading
from nip_astra.scenarios.graphs.transformer import LayerWeights
from nip_astra.utils.activations import ACTIVATIONS


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
        """Weights and biases, from the input on."""
        inner, outer = self.inner, self.outer
        return [inner.weight, inner.bias, outer.weight, outer.bias]

    def forward(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        """The nodes after the layer.

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
        """A token of each node, [B, S, E], and the sums of each graph's nodes, [B, 2, D]."""
        if self.activation == "tanh":
            layers = cast(Iterable[GinLayer], self)
            weights = [weight for layer in layers for weight in layer.weights()]
            return native.tanh_network(network, weights, digits=self.digits)
        return network.apply(self._passed, digits=self.digits)

    def _passed(self, nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
        for layer in self:
            nodes_GnD = layer(nodes_GnD, closed_Gnn)
        return nodes_GnD


class AttentionLayer(nn.Module):
    """Attention and a perceptron, each added to its input and normalised (arXiv:1706.03762).

    What comes of graphs and of nodes is given apart, so that what nobody reads costs nothing.
    """

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
        """All weights, in the order of the formula."""
        norm, last = self.attention_norm, self.norm
        return LayerWeights(
            self.query.weight.view(self.num_heads, -1, self.query.in_features),
            *(self.query.bias, self.key.weight, self.value.weight),
            *(self.output.weight, self.output.bias, norm.weight, norm.bias),
            *(self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias),
            *(last.weight, last.bias),
        )

    def forward(self, pairs: Pairs) -> Reading:
        """What can be asked of the tokens after the layer."""
        weights = self.weights()
        if self.training and self.drop_out.p:
            attention = partial(attention_formula, drop_out=self.drop_out)
            return transformer.read(pairs, weights, self._perceptron, attention)
        if self.activation == "tanh":
            return native.read(pairs, weights)
        return transformer.read(pairs, weights, self._perceptron)

    def _perceptron(self, rows_RD: Tensor) -> Tensor:
        hidden_RF = self.drop_out(self.activate(self.inner(rows_RD)))
        result: Tensor = self.norm(rows_RD + self.drop_out(self.outer(hidden_RF)))
        return result
