"""Layers of the graph networks as functions of their weights.

Autograd takes more calls and memory than matrices this small are worth, so derivatives are written
out: each `torch.autograd.Function` computes the plain formula beside it in fewer calls, and its
second derivatives are those of the formula. Hyperbolic tangents are `tanh(x) = 2 sigmoid(2 x) - 1`,
with factors and shift moved to the weights.

Shapes: B frames, n nodes of a graph (padded), S = 2 n nodes of both, G groups (graphs or frames),
T tokens, D width, E width of a token, R = G n or G T rows, F hidden width, H heads, d = D / H,
J = H D, Q queries (T x H), K keys, P and L message places (all, and the last message's). Weights
have outputs first, as torch's do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

NORM_EPS = 1e-5
"""Added to variances by layer normalisation, torch's own default."""

_aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


def apply(layer: type[torch.autograd.Function], *inputs: Tensor) -> Tensor:
    """Apply a function of this file."""
    if not torch.is_grad_enabled():
        # Nothing is saved, so that memory still in the cache is used again.
        context = SimpleNamespace(save_for_backward=lambda *tensors: None)
        return cast(Tensor, layer.forward(context, *inputs))
    result: Tensor = layer.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's own
    return result


def of_plain_formula(
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
) -> Gradients:
    """Differentiable derivatives of a formula in all its inputs, from those in its results."""
    with torch.enable_grad():
        # Views, so that an input from which another was computed gets only its own part.
        views = [tensor.view_as(tensor) for tensor in inputs]
        results = formula(*views)
        pairs = [
            (result, gradient)
            for result, gradient in zip(_several(results), _several(gradients), strict=True)
            # Where some weights do not learn, one of several results may be a constant.
            if result.requires_grad
        ]
        derivatives = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                [view for view in views if view.requires_grad],
                [gradient for _, gradient in pairs],
                create_graph=True,
                # Weights of absent message places are in no result.
                allow_unused=True,
            )
        )
    return tuple(next(derivatives) if view.requires_grad else None for view in views)


def _several(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


# ---- a perceptron of two layers


def tanh_perceptron(values_RD: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    """`h = sigmoid(2 (X W1' + b1))` and `tanh(X W1' + b1) W2' + b2 = 2 h W2' + (b2 - W2 1)`."""
    inner_FD, inner_bias_F, outer_DF, outer_bias_D = weights
    # Factors go to the weights: a product with a factor takes a sixth longer.
    hidden_RF = torch.addmm(inner_bias_F * 2, values_RD, inner_FD.t() * 2).sigmoid_()
    bias_D = outer_bias_D - outer_DF.sum(1)
    return hidden_RF, torch.addmm(bias_D, hidden_RF, outer_DF.t() * 2)


def tanh_perceptron_gradients(
    gradient_RD: Tensor, values_RD: Tensor, hidden_RF: Tensor, inner_FD: Tensor, outer_DF: Tensor
) -> tuple[Tensor, ...]:
    """Derivatives in X, W1, b1, W2 and b2 from that in the result, `g`.

    The derivative in `X W1' + b1` is `4 (g W2) h (1 - h)`. Products have the narrower matrix first,
    which is faster.
    """
    sum_D = gradient_RD.sum(0)
    of_outer_DF = torch.mm(gradient_RD.t(), hidden_RF).mul_(2).sub_(sum_D[:, None])
    of_inner_RF = torch.mm(gradient_RD, outer_DF * 4)
    _aten.sigmoid_backward.grad_input(of_inner_RF, hidden_RF, grad_input=of_inner_RF)
    return (
        torch.mm(of_inner_RF, inner_FD),
        torch.mm(values_RD.t(), of_inner_RF).t(),
        of_inner_RF.sum(0),
        of_outer_DF,
        sum_D,
    )


# ---- message passing


class Rounded(torch.autograd.Function):
    """Rounds to some decimal places, with derivatives as if it did not."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, digits: int) -> Tensor:
        return torch.round(values, decimals=digits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def gin_formula(nodes_GnD: Tensor, closed_Gnn: Tensor, *weights: Tensor) -> Tensor:
    """`tanh(C tanh(X) W1' + b1) W2' + b2`, where `C` adds up each node and its neighbours."""
    inner_FD, inner_bias_F, outer_DF, outer_bias_D = weights
    sums_GnD = torch.bmm(closed_Gnn, torch.tanh(nodes_GnD))
    hidden_GnF = torch.tanh(functional.linear(sums_GnD, inner_FD, inner_bias_F))
    return functional.linear(hidden_GnF, outer_DF, outer_bias_D)


class TanhGin(torch.autograd.Function):
    """`gin_formula`."""

    @staticmethod
    def forward(ctx: Any, nodes_GnD: Tensor, closed_Gnn: Tensor, *weights: Tensor) -> Tensor:
        active_GnD = torch.mul(nodes_GnD, 2).sigmoid_().mul_(2).sub_(1)
        sums_RD = torch.bmm(closed_Gnn, active_GnD).flatten(0, 1)
        hidden_RF, result_RD = tanh_perceptron(sums_RD, *weights)
        ctx.save_for_backward(nodes_GnD, closed_Gnn, *weights, active_GnD, sums_RD, hidden_RF)
        return result_RD.view(nodes_GnD.shape)

    @staticmethod
    def backward(ctx: Any, gradient_GnD: Tensor) -> Gradients:
        *inputs, active_GnD, sums_RD, hidden_RF = ctx.saved_tensors
        if torch.is_grad_enabled():
            return of_plain_formula(gin_formula, inputs, gradient_GnD)
        _, closed_Gnn, inner_FD, _, outer_DF, _ = inputs
        of_sums_RD, *of_weights = tanh_perceptron_gradients(
            gradient_GnD.reshape(sums_RD.shape), sums_RD, hidden_RF, inner_FD, outer_DF
        )
        of_active_GnD = torch.bmm(closed_Gnn.transpose(1, 2), of_sums_RD.view(gradient_GnD.shape))
        _aten.tanh_backward.grad_input(of_active_GnD, active_GnD, grad_input=of_active_GnD)
        return of_active_GnD, None, *of_weights


# ---- a transformer layer, in two halves


def residual_formula(values_RD: Tensor, *weights: Tensor) -> Tensor:
    """`norm(X + tanh(X W1' + b1) W2' + b2)`."""
    inner_FD, inner_bias_F, outer_DF, outer_bias_D, gain_D, shift_D = weights
    hidden_RF = torch.tanh(functional.linear(values_RD, inner_FD, inner_bias_F))
    sum_RD = values_RD + functional.linear(hidden_RF, outer_DF, outer_bias_D)
    return functional.layer_norm(sum_RD, sum_RD.shape[1:], gain_D, shift_D, NORM_EPS)


class TanhResidual(torch.autograd.Function):
    """`residual_formula`."""

    @staticmethod
    def forward(ctx: Any, values_RD: Tensor, *weights: Tensor) -> Tensor:
        *of_perceptron, gain_D, shift_D = weights
        hidden_RF, sum_RD = tanh_perceptron(values_RD, *of_perceptron)
        normed = torch.native_layer_norm(
            sum_RD.add_(values_RD), sum_RD.shape[1:], gain_D, shift_D, NORM_EPS
        )
        ctx.save_for_backward(values_RD, *weights, hidden_RF, sum_RD, *normed[1:])
        return normed[0]

    @staticmethod
    def backward(ctx: Any, gradient_RD: Tensor) -> Gradients:
        *inputs, hidden_RF, sum_RD, mean_R, scale_R = ctx.saved_tensors
        if torch.is_grad_enabled():
            return of_plain_formula(residual_formula, inputs, gradient_RD)
        values_RD, inner_FD, _, outer_DF, _, gain_D, shift_D = inputs
        of_sum_RD, *of_norm = _norm_gradients(gradient_RD, sum_RD, mean_R, scale_R, gain_D, shift_D)
        of_values_RD, *of_weights = tanh_perceptron_gradients(
            of_sum_RD, values_RD, hidden_RF, inner_FD, outer_DF
        )
        return of_values_RD.add_(of_sum_RD), *of_weights, *of_norm


def attention_formula(
    tokens_GTD: Tensor,
    keys_GKD: Tensor,
    mask_GK1: Tensor,
    *weights: Tensor,
    drop_out: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """`norm(X + softmax(M + (X Wq' + bq) K') K Wo + bo)`, each row of X one query per head."""
    query_JD, query_bias_J, output_JD, output_bias_D, gain_D, shift_D = weights
    queries_GQD = functional.linear(tokens_GTD, query_JD, query_bias_J).view(
        len(tokens_GTD), -1, tokens_GTD.shape[2]
    )
    shares_GQK = drop_out(_Shares.of(queries_GQD, keys_GKD, mask_GK1).by_query())
    read_GTJ = torch.bmm(shares_GQK, keys_GKD).view(*tokens_GTD.shape[:2], -1)
    sum_GTD = tokens_GTD + drop_out(functional.linear(read_GTJ, output_JD.t(), output_bias_D))
    return functional.layer_norm(sum_GTD, sum_GTD.shape[2:], gain_D, shift_D, NORM_EPS)


class Attention(torch.autograd.Function):
    """`attention_formula`."""

    @staticmethod
    def forward(
        ctx: Any, tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor, *weights: Tensor
    ) -> Tensor:
        query_JD, query_bias_J, output_JD, output_bias_D, gain_D, shift_D = weights
        num_groups, _, width = tokens_GTD.shape
        tokens_RD = tokens_GTD.reshape(-1, width)
        queries_RJ = torch.addmm(query_bias_J, tokens_RD, query_JD.t())
        shares = _Shares.of(queries_RJ.view(num_groups, -1, width), keys_GKD, mask_GK1)
        read_RJ = torch.bmm(shares.by_query(), keys_GKD).view(queries_RJ.shape)
        sum_RD = torch.addmm(output_bias_D, read_RJ, output_JD).add_(tokens_RD)
        normed = torch.native_layer_norm(sum_RD, (width,), gain_D, shift_D, NORM_EPS)
        ctx.save_for_backward(
            *(tokens_GTD, keys_GKD, mask_GK1, *weights),
            *(queries_RJ, shares.values, read_RJ, sum_RD, *normed[1:]),
        )
        ctx.dim = shares.dim
        return normed[0].view(tokens_GTD.shape)

    @staticmethod
    def backward(ctx: Any, gradient_GTD: Tensor) -> Gradients:
        *inputs, queries_RJ, shares, read_RJ, sum_RD, mean_R, scale_R = ctx.saved_tensors
        if torch.is_grad_enabled():
            return of_plain_formula(attention_formula, inputs, gradient_GTD)
        tokens_GTD, keys_GKD, _, query_JD, _, output_JD, _, gain_D, shift_D = inputs
        num_groups, _, width = tokens_GTD.shape
        of_sum_RD, *of_norm = _norm_gradients(
            gradient_GTD.reshape(sum_RD.shape), sum_RD, mean_R, scale_R, gain_D, shift_D
        )
        of_read_GQD = torch.mm(of_sum_RD, output_JD.t()).view(num_groups, -1, width)
        of_shares = _Shares.product(of_read_GQD, keys_GKD, ctx.dim)
        of_scores = _Shares(
            _aten._softmax_backward_data(of_shares, shares, ctx.dim, shares.dtype), ctx.dim
        )
        queries_GQD = queries_RJ.view(of_read_GQD.shape)
        of_keys_GKD = torch.bmm(_Shares(shares, ctx.dim).by_key(), of_read_GQD)
        of_keys_GKD.baddbmm_(of_scores.by_key(), queries_GQD)
        of_queries_RJ = torch.bmm(of_scores.by_query(), keys_GKD).view(queries_RJ.shape)
        of_tokens_RD = torch.mm(of_queries_RJ, query_JD).add_(of_sum_RD)
        return (
            *(of_tokens_RD.view(tokens_GTD.shape), of_keys_GKD, None),
            torch.mm(tokens_GTD.reshape(sum_RD.shape).t(), of_queries_RJ).t(),
            of_queries_RJ.sum(0),
            torch.mm(of_sum_RD.t(), read_RJ).t(),
            of_sum_RD.sum(0),
            *of_norm,
        )


class _Shares(NamedTuple):
    """Attention weights, [G, Q, K] or [G, K, Q]; `dim` is that of keys.

    The longer dimension is the last one: softmax is slow over a short one.
    """

    values: Tensor
    dim: int

    @classmethod
    def of(cls, queries_GQD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> _Shares:
        """The softmax of scores over keys."""
        if queries_GQD.shape[1] > keys_GKD.shape[1]:
            scores_GKQ = torch.baddbmm(mask_GK1, keys_GKD, queries_GQD.transpose(1, 2))
            return cls(torch.softmax(scores_GKQ, dim=1), 1)
        mask_G1K = mask_GK1.transpose(1, 2)
        scores_GQK = torch.baddbmm(mask_G1K, queries_GQD, keys_GKD.transpose(1, 2))
        return cls(torch.softmax(scores_GQK, dim=2), 2)

    @staticmethod
    def product(queries_GQD: Tensor, keys_GKD: Tensor, dim: int) -> Tensor:
        """The products of all queries and keys, in the layout of `dim`."""
        if dim == 1:
            return torch.bmm(keys_GKD, queries_GQD.transpose(1, 2))
        return torch.bmm(queries_GQD, keys_GKD.transpose(1, 2))

    def by_query(self) -> Tensor:
        return self.values if self.dim == 2 else self.values.transpose(1, 2)

    def by_key(self) -> Tensor:
        return self.values if self.dim == 1 else self.values.transpose(1, 2)


def _norm_gradients(gradient_RD: Tensor, sum_RD: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """Derivatives of a layer normalisation in its input, gain and shift."""
    gradients: tuple[Tensor, ...] = _aten.native_layer_norm_backward(
        gradient_RD, sum_RD, sum_RD.shape[1:], *saved, [True] * 3
    )
    return gradients


# ---- a pair of graphs

MASKED_KEY = -1e9
"""Added to the score of a key that is padding."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens, [G, T, D], from tokens, keys, [G, K, D], and what is added to scores, [G, K, 1]."""


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
        self.pairs, self.attend = pairs, attend
        first, second = pairs.nodes_BSD.chunk(2, dim=1)
        # The first half is what the first graph's nodes read, the second half the second's.
        self._keys_BKD = torch.cat([second, pairs.graphs_B2D, first, pairs.graphs_B2D], dim=1)

    def graphs(self) -> Tensor:
        """Tokens of the graphs, [B, 2, D]."""
        return self.attend(self.pairs.graphs_B2D, self._keys_BKD, self._masks[0])

    def nodes(self) -> Tensor:
        """Tokens of the nodes, [B, S, D]."""
        num_frames, num_keys, d = self._keys_BKD.shape
        nodes_GTD = self.pairs.nodes_BSD.reshape(2 * num_frames, -1, d)
        keys_GKD = self._keys_BKD.view(2 * num_frames, num_keys // 2, d)
        return self.attend(nodes_GTD, keys_GKD, self._masks[1]).view_as(self.pairs.nodes_BSD)

    @cached_property
    def _masks(self) -> tuple[Tensor, Tensor]:
        """Additions to the scores of the graphs' keys, [B, K, 1], and of the nodes' keys."""
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
    """`query_JD, query_bias_J, output_JD, output_bias_D` of `attention_formula`.

    The products of each head's query and key matrices, with the scale of scores, and of its value
    and output matrices: keys and values are then the tokens themselves, uncopied.
    """
    heads, of_head, d = weights.query_HdD.shape
    key_HDd = weights.key_DD.view(heads, of_head, d).transpose(1, 2) / math.sqrt(of_head)
    value_HDd = weights.value_DD.view(heads, of_head, d).transpose(1, 2)
    return (
        torch.bmm(key_HDd, weights.query_HdD).flatten(0, 1),
        torch.bmm(key_HDd, weights.query_bias_D.view(heads, of_head, 1)).flatten(),
        torch.bmm(value_HDd, weights.output_DD.t().reshape(heads, of_head, d)).flatten(0, 1),
        weights.output_bias_D,
    )


def read(
    pairs: Pairs,
    weights: LayerWeights,
    perceptron: Callable[..., Tensor],
    attention: Callable[..., Tensor] | None = None,
) -> PairReading:
    """A layer applied to pairs.

    Parameters
    ----------
    perceptron : Callable
        Rows after the layer, [R, D], from those after attention.
    attention : Callable, optional
        Replaces `Attention`, for instance `attention_formula`.
    """
    attention = attention or partial(apply, Attention)
    joint = joint_weights(weights)

    def attend(tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> Tensor:
        norm = (weights.gain_D, weights.shift_D)
        attended_GTD = attention(tokens_GTD, keys_GKD, mask_GK1, *joint, *norm)
        return perceptron(attended_GTD.flatten(0, 1)).view_as(tokens_GTD)

    return PairReading(pairs, attend)


def tanh_reading(pairs: Pairs, weights: LayerWeights, *, is_formula: bool = False) -> PairReading:
    """A layer with hyperbolic tangents, by plain formulas or with written derivatives."""
    of_perceptron = weights[-6:]
    residual = residual_formula if is_formula else partial(apply, TanhResidual)
    return read(
        pairs,
        weights,
        lambda rows_RD: residual(rows_RD, *of_perceptron),
        attention_formula if is_formula else None,
    )


# ---- a graph network, before and after its layers


class Network(NamedTuple):
    """Inputs of a graph network, and its weights except those of its layers."""

    said_BPS: Tensor
    adjacency_B2nn: Tensor
    """1 for an edge, without loops."""
    is_node_B2n: Tensor
    """bool; False at padding, which comes last."""
    last_BLS: Tensor
    """Messages about each node, by place: all so far, and those of the last round."""
    input_DP: Tensor
    """Weights of `said_BPS`; one further column is added to every node."""
    node_ED: Tensor
    bias_E: Tensor
    message_EL: Tensor
    """Weights of tokens: of nodes after all layers, the bias, and of `last_BLS`."""

    def unsaid(self, node_ED: Tensor) -> Network:
        """The network without messages, for tokens that are added to others."""
        return self._replace(
            said_BPS=self.said_BPS[:, :0],
            last_BLS=self.last_BLS[:, :0],
            input_DP=self.input_DP[:, -1:],
            node_ED=node_ED,
            bias_E=torch.zeros_like(self.bias_E),
            message_EL=self.message_EL[:, :0],
        )

    def apply(
        self, layers: Callable[[Tensor, Tensor], Tensor], *, digits: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the nodes, [B, S, E], undefined at padding, and sums over each graph's nodes.

        Parameters
        ----------
        layers : Callable
            Nodes after all layers, [G, n, D], from those before, and the adjacency with every node
            a neighbour of itself, [G, n, n].
        digits : int, optional
            Decimal places to which nodes are rounded after all layers.
        """
        num_frames, num_said, num_nodes = self.said_BPS.shape
        nodes = functional.linear(
            self.said_BPS.transpose(1, 2), self.input_DP[:, :num_said], self.input_DP[:, num_said]
        )
        adjacency_Gnn = self.adjacency_B2nn.flatten(0, 1)
        # Every node is a neighbour of itself: epsilon is 0.
        closed_Gnn = adjacency_Gnn + torch.eye(num_nodes // 2, device=adjacency_Gnn.device)
        nodes_GnD = layers(nodes.reshape(2 * num_frames, num_nodes // 2, -1), closed_Gnn)
        if digits is not None:
            nodes_GnD = Rounded.apply(nodes_GnD, digits)  # type: ignore[no-untyped-call]  # torch's
        is_node_Gn1 = self.is_node_B2n.flatten(0, 1)[..., None].to(nodes_GnD.dtype)
        sums_B2D = (nodes_GnD * is_node_Gn1).sum(1).view(num_frames, 2, -1)
        nodes_BSD = nodes_GnD.view(num_frames, num_nodes, -1)
        tokens_BSE = functional.linear(nodes_BSD, self.node_ED, self.bias_E)
        # Few places: one product of two vectors each is faster than one of narrow matrices.
        for said_BS, weight_E in zip(
            self.last_BLS.unbind(1), self.message_EL.unbind(1), strict=True
        ):
            tokens_BSE = torch.addcmul(tokens_BSE, said_BS[..., None], weight_E)
        return tokens_BSE, sums_B2D
