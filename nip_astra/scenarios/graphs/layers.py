"""Layers for small graphs and few tokens, made of matrix products that can be derived twice.

Shapes: G graphs (two a frame), n nodes (padded), D width, H heads, Q queries, K keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from nip_astra.scenario_base.tensordict_agents import ACTIVATIONS

MASKED_KEY = -1e9
"""What is added to the score of a key that is padding."""


def perceptron(values: Tensor, inner: nn.Linear, outer: nn.Linear, activation: str) -> Tensor:
    """Apply two linear layers with an activation between them to `values`, [rows, width]."""
    if activation != "tanh":
        hidden = inner(values)
        hidden = torch.relu(hidden) if activation == "relu" else functional.gelu(hidden)
        result: Tensor = outer(hidden)
        return result
    # As tanh(x) is 2 sigmoid(2 x) - 1, its factors and its shift are left to the weights.
    hidden = torch.sigmoid(functional.linear(values, 2 * inner.weight, 2 * inner.bias))
    # The weight of the second product in rows: its gradient is then the faster of two products.
    weight = (2 * outer.weight).t().contiguous()
    return torch.addmm(outer.bias - outer.weight.sum(1), hidden, weight)


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

    def forward(self, nodes_GnD: Tensor, adjacency_Gnn: Tensor) -> Tensor:
        nodes_GnD = self.activate(nodes_GnD)
        sums_GnD = torch.baddbmm(nodes_GnD, adjacency_Gnn, nodes_GnD)
        result = perceptron(sums_GnD.flatten(0, 1), self.inner, self.outer, self.activation)
        return result.view_as(nodes_GnD)


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
        groups, num_queries, d = tokens_GQD.shape
        weight, bias, output = weights
        tokens = tokens_GQD.reshape(-1, d)
        queries = functional.linear(tokens, weight, bias).view(groups, -1, d)
        shares_GQK = _shares(queries, keys_GKD, mask_GK1)
        read = torch.bmm(shares_GQK, keys_GKD).view(groups * num_queries, -1)
        attended = torch.addmm(self.output.bias, read, output)
        tokens = self.attention_norm(tokens + attended)
        changed = perceptron(tokens, self.inner, self.outer, self.activation)
        result: Tensor = self.norm(tokens + changed).view(groups, num_queries, d)
        return result


def _shares(queries_GQD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> Tensor:
    """Give how much of each key a query reads, [G, Q, K]."""
    # The longer dimension last: softmax is many times slower where that is short.
    if queries_GQD.shape[1] > keys_GKD.shape[1]:
        scores_GKQ = torch.baddbmm(mask_GK1, keys_GKD, queries_GQD.transpose(1, 2))
        return torch.softmax(scores_GKQ, dim=1).transpose(1, 2)
    scores_GQK = torch.baddbmm(mask_GK1.transpose(1, 2), queries_GQD, keys_GKD.transpose(1, 2))
    return torch.softmax(scores_GQK, dim=2)
