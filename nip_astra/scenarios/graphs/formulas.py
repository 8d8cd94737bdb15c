"""Layers of the graph networks as functions of their weights.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, G groups (graphs or frames),
T tokens, D width, E width of a token, R = G n or G T rows, F hidden width, H heads, d = D / H,
J = H D, Q queries (T x H), K keys, P and L message places (all, and the last message's). Weights
have outputs first, as torch's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

NORM_EPS = 1e-5
"""Added to variances by layer normalisation, torch's own default."""


def gin_formula(nodes_GnD: Tensor, closed_Gnn: Tensor, *weights: Tensor) -> Tensor:
    """Compute `tanh(C tanh(X) W1' + b1) W2' + b2`, where `C` sums each node and its neighbours."""
    inner_FD, inner_bias_F, outer_DF, outer_bias_D = weights
    sums_GnD = torch.bmm(closed_Gnn, torch.tanh(nodes_GnD))
    hidden_GnF = torch.tanh(functional.linear(sums_GnD, inner_FD, inner_bias_F))
    return functional.linear(hidden_GnF, outer_DF, outer_bias_D)


def residual_formula(values_RD: Tensor, *weights: Tensor) -> Tensor:
    """Compute `norm(X + tanh(X W1' + b1) W2' + b2)`."""
    inner_FD, inner_bias_F, outer_DF, outer_bias_D, gain_D, shift_D = weights
    hidden_RF = torch.tanh(functional.linear(values_RD, inner_FD, inner_bias_F))
    sum_RD = values_RD + functional.linear(hidden_RF, outer_DF, outer_bias_D)
    return functional.layer_norm(sum_RD, sum_RD.shape[1:], gain_D, shift_D, NORM_EPS)


def attention_formula(
    tokens_GTD: Tensor,
    keys_GKD: Tensor,
    mask_GK1: Tensor,
    *weights: Tensor,
    drop_out: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """Compute `norm(X + softmax(M + (X Wq' + bq) K') K Wo + bo)`, a query per head and row of X."""
    query_JD, query_bias_J, output_JD, output_bias_D, gain_D, shift_D = weights
    num_groups, num_tokens, d = tokens_GTD.shape
    queries_GTJ = functional.linear(tokens_GTD, query_JD, query_bias_J)
    queries_GQD = queries_GTJ.view(num_groups, -1, d)
    shares_GQK = drop_out(_shares(queries_GQD, keys_GKD, mask_GK1))
    read_GTJ = torch.bmm(shares_GQK, keys_GKD).view(num_groups, num_tokens, -1)
    output_GTD = functional.linear(read_GTJ, output_JD.t(), output_bias_D)
    sum_GTD = tokens_GTD + drop_out(output_GTD)
    return functional.layer_norm(sum_GTD, sum_GTD.shape[2:], gain_D, shift_D, NORM_EPS)


def _shares(queries_GQD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> Tensor:
    """Return attention weights, [G, Q, K]: the softmax of scores over keys."""
    if queries_GQD.shape[1] <= keys_GKD.shape[1]:
        mask_G1K = mask_GK1.transpose(1, 2)
        return torch.baddbmm(mask_G1K, queries_GQD, keys_GKD.transpose(1, 2)).softmax(dim=2)
    # The longer dimension is the last one: softmax is slow over a short one.
    scores_GKQ = torch.baddbmm(mask_GK1, keys_GKD, queries_GQD.transpose(1, 2))
    return scores_GKQ.softmax(dim=1).transpose(1, 2)


# ---- a pair of graphs

MASKED_KEY = -1e9
"""Added to the score of a key that is padding."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes tokens, [G, T, D], from tokens, keys, [G, K, D], and additions to scores, [G, K, 1]."""


class Pairs(NamedTuple):
    """Tokens that attend to one another.

    Nodes of one graph do not attend to one another, but to those of the other graph and to both
    graphs; the graphs attend to all.
    """

    graphs_B2D: Tensor
    nodes_BSD: Tensor
    """Tokens of the graphs and of their nodes."""
    is_node_B2n: Tensor
    """bool; False at padding, which comes last."""


class PairReading:
    """A transformer layer applied to pairs; each method computes only what it returns.

    Tokens of padding are undefined.
    """

    def __init__(self, pairs: Pairs, attend: Attend) -> None:
        self.pairs = pairs
        self.attend = attend
        first, second = pairs.nodes_BSD.chunk(2, dim=1)
        # The first half is what the first graph's nodes read, the second half the second's.
        self._keys_BKD = torch.cat([second, pairs.graphs_B2D, first, pairs.graphs_B2D], dim=1)

    def graphs(self) -> Tensor:
        """Return tokens of the graphs, [B, 2, D]."""
        return self.attend(self.pairs.graphs_B2D, self._keys_BKD, self._masks[0])

    def nodes(self) -> Tensor:
        """Return tokens of the nodes, [B, S, D]."""
        num_frames, num_keys, d = self._keys_BKD.shape
        nodes_GTD = self.pairs.nodes_BSD.reshape(2 * num_frames, -1, d)
        keys_GKD = self._keys_BKD.view(2 * num_frames, num_keys // 2, d)
        return self.attend(nodes_GTD, keys_GKD, self._masks[1]).view_as(self.pairs.nodes_BSD)

    @cached_property
    def _masks(self) -> tuple[Tensor, Tensor]:
        """Return additions to the scores of the graphs' keys, [B, K, 1], and of the nodes' keys."""
        graphs_B2D, _, is_node_B2n = self.pairs
        num_frames, _, n = is_node_B2n.shape
        graph_mask = graphs_B2D.new_zeros(num_frames, 2, n + 2)
        graph_mask[:, :, :n].masked_fill_(~is_node_B2n.flip(1), MASKED_KEY)
        node_mask = graph_mask.view(2 * num_frames, n + 2, 1).clone()
        # Graphs read each of themselves once.
        graph_mask[:, 1, n:] = MASKED_KEY
        return graph_mask.view(num_frames, -1, 1), node_mask


class LayerWeights(NamedTuple):
    """Weights of a transformer layer (arXiv:1706.03762): attention, norm, perceptron, norm.

    Keys and values have no bias: one of keys would add the same to all scores of a query, and one
    of values is in the output's.
    """

    query_HdD: Tensor
    query_bias_D: Tensor
    key_DD: Tensor
    value_DD: Tensor
    output_DD: Tensor
    output_bias_D: Tensor
    gain_D: Tensor
    shift_D: Tensor
    inner_FD: Tensor
    inner_bias_F: Tensor
    outer_DF: Tensor
    outer_bias_D: Tensor
    last_gain_D: Tensor
    last_shift_D: Tensor


def joint_weights(weights: LayerWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `query_JD, query_bias_J, output_JD, output_bias_D` of `attention_formula`.

    The products of each head's query and key matrices, with the scale of scores, and of its value
    and output matrices: keys and values are then the tokens themselves, uncopied.
    """
    heads, of_head, d = weights.query_HdD.shape
    key_HDd = weights.key_DD.view(heads, of_head, d).transpose(1, 2) / math.sqrt(of_head)
    value_HDd = weights.value_DD.view(heads, of_head, d).transpose(1, 2)
    query_bias_Hd1 = weights.query_bias_D.view(heads, of_head, 1)
    output_HdD = weights.output_DD.t().reshape(heads, of_head, d)
    query_JD = torch.bmm(key_HDd, weights.query_HdD).flatten(0, 1)
    query_bias_J = torch.bmm(key_HDd, query_bias_Hd1).flatten()
    output_JD = torch.bmm(value_HDd, output_HdD).flatten(0, 1)
    return query_JD, query_bias_J, output_JD, weights.output_bias_D


def read(
    pairs: Pairs,
    weights: LayerWeights,
    perceptron: Callable[..., Tensor],
    attention: Callable[..., Tensor] = attention_formula,
) -> PairReading:
    """Apply a layer to pairs; `perceptron` computes rows, [R, D], from those after attention."""
    joint = joint_weights(weights)

    def attend(tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> Tensor:
        norm = (weights.gain_D, weights.shift_D)
        attended_GTD = attention(tokens_GTD, keys_GKD, mask_GK1, *joint, *norm)
        return perceptron(attended_GTD.flatten(0, 1)).view_as(tokens_GTD)

    return PairReading(pairs, attend)


def tanh_reading(pairs: Pairs, weights: LayerWeights) -> PairReading:
    """Apply a layer with hyperbolic tangents."""
    return read(pairs, weights, lambda rows_RD: residual_formula(rows_RD, *weights[-6:]))


# ---- a graph network, before and after its layers


class Network(NamedTuple):
    """Inputs of a graph network, and its weights except those of its layers."""

    sent_BPS: Tensor
    adjacency_B2nn: Tensor
    """1 for an edge, without loops."""
    is_node_B2n: Tensor
    """bool; False at padding, which comes last."""
    last_BLS: Tensor
    """Messages about each node, by place: all previous ones, and those of the last round."""
    input_DP: Tensor
    """Weights of `sent_BPS`; one further column is added to every node."""
    node_ED: Tensor
    bias_E: Tensor
    message_EL: Tensor
    """Weights of tokens: of nodes after all layers, the bias, and of `last_BLS`."""

    def without_messages(self, node_ED: Tensor) -> Network:
        """Return the network without messages, for tokens that are added to others."""
        return self._replace(
            sent_BPS=self.sent_BPS[:, :0],
            last_BLS=self.last_BLS[:, :0],
            input_DP=self.input_DP[:, -1:],
            node_ED=node_ED,
            bias_E=torch.zeros_like(self.bias_E),
            message_EL=self.message_EL[:, :0],
        )

    def apply(
        self, layers: Callable[[Tensor, Tensor], Tensor], *, digits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return node tokens, [B, S, E], undefined at padding, and sums over each graph's nodes.

        Parameters
        ----------
        layers : Callable
            Nodes after all layers, [G, n, D], from those before, and the adjacency with every node
            a neighbour of itself, [G, n, n].
        digits : int, optional
            Decimal places to which nodes are rounded after all layers.
        """
        num_frames, num_sent, num_nodes = self.sent_BPS.shape
        # The further column, of every node, is a bias.
        sent_BSP = self.sent_BPS.transpose(1, 2)
        weight_DP = self.input_DP[:, :num_sent]
        bias_D = self.input_DP[:, num_sent]
        nodes = functional.linear(sent_BSP, weight_DP, bias_D)
        adjacency_Gnn = self.adjacency_B2nn.flatten(0, 1)
        # Every node is a neighbour of itself: epsilon is 0.
        closed_Gnn = adjacency_Gnn + torch.eye(num_nodes // 2, device=adjacency_Gnn.device)
        nodes_GnD = layers(nodes.reshape(2 * num_frames, num_nodes // 2, -1), closed_Gnn)
        if digits is not None:
            # Derivatives are those without rounding.
            rounded_GnD = nodes_GnD.detach().round(decimals=digits)
            nodes_GnD = rounded_GnD + (nodes_GnD - nodes_GnD.detach())
        is_node_Gn1 = self.is_node_B2n.flatten(0, 1)[..., None].to(nodes_GnD.dtype)
        sums_B2D = (nodes_GnD * is_node_Gn1).sum(1).view(num_frames, 2, -1)
        nodes_BSD = nodes_GnD.view(num_frames, num_nodes, -1)
        tokens_BSE = functional.linear(nodes_BSD, self.node_ED, self.bias_E)
        # Few places: one product of two vectors each is faster than one of narrow matrices.
        messages = zip(self.last_BLS.unbind(1), self.message_EL.unbind(1), strict=True)
        for sent_BS, weight_E in messages:
            tokens_BSE = torch.addcmul(tokens_BSE, sent_BS[..., None], weight_E)
        return tokens_BSE, sums_B2D
