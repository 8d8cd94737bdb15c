"""Layers whose derivatives are written out, because those of autograd take more calls and memory.

On matrices this small, to start an operation takes as long as many of them do. Each class is a
plain formula, given beside it, in fewer calls; derivatives of its derivatives are those of the
formula. Hyperbolic tangents are `tanh(x) = 2 sigmoid(2 x) - 1`, which is faster, with factors and
shift left to the weights.

Shapes: G groups (graphs or frames), n nodes (padded), D width, R = G n rows, F hidden width,
H heads, Q queries (tokens x heads), K keys, J = H D. Weights have outputs first, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

NORM_EPS = 1e-5
"""Added to variances by layer normalisation, torch's own default."""

_aten = torch.ops.aten
Gradients = tuple[Tensor | None, ...]


def apply(layer: type[torch.autograd.Function], *inputs: Tensor) -> Tensor:
    """What a layer of this file makes of its inputs."""
    if not torch.is_grad_enabled():
        return cast(Tensor, layer.forward(_Forgets(), *inputs))
    result: Tensor = layer.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's own
    return result


class _Forgets:
    """Stands for a context where nothing will be derived."""

    dim = 0

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing, so that memory still in the cache is used again."""


def of_plain_formula(
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
) -> Gradients:
    """The derivatives of a formula in all of its inputs, so that they can be derived again.

    Parameters
    ----------
    gradients : Tensor or Sequence[Tensor]
        Those in its result, or in each of its results.
    """
    with torch.enable_grad():
        # Views: an input that another was computed from gets its own part alone.
        views = [tensor.view_as(tensor) for tensor in inputs]
        asked = [view for view in views if view.requires_grad]
        results = formula(*views)
        pairs = [
            (result, gradient)
            for result, gradient in zip(_several(results), _several(gradients), strict=True)
            # Where some weights do not learn, one of several results may be a constant.
            if result.requires_grad
        ]
        found = iter(
            torch.autograd.grad(
                [result for result, _ in pairs],
                asked,
                [gradient for _, gradient in pairs],
                create_graph=True,
                # Weights for what there is none of, as places of messages, are in no result.
                allow_unused=True,
            )
        )
    return tuple(next(found) if view.requires_grad else None for view in views)


def _several(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


# ---- a perceptron of two layers


class PerceptronGradients(NamedTuple):
    """Derivatives of `tanh(X W1' + b1) W2' + b2`."""

    values_RD: Tensor
    inner_FD: Tensor
    inner_bias_F: Tensor
    outer_DF: Tensor
    outer_bias_D: Tensor


def tanh_perceptron(
    values_RD: Tensor,
    inner_FD: Tensor,
    inner_bias_F: Tensor,
    outer_DF: Tensor,
    outer_bias_D: Tensor,
) -> tuple[Tensor, Tensor]:
    """`h = sigmoid(2 (X W1' + b1))` and the result, `2 h W2' + (b2 - W2 1)`, without grad."""
    # Factors go to the weights: a product with a factor of its own takes a sixth longer.
    hidden_RF = torch.addmm(inner_bias_F * 2, values_RD, inner_FD.t() * 2).sigmoid_()
    bias_D = outer_bias_D - outer_DF.sum(1)
    return hidden_RF, torch.addmm(bias_D, hidden_RF, outer_DF.t() * 2)


def tanh_perceptron_gradients(
    gradient_RD: Tensor, values_RD: Tensor, hidden_RF: Tensor, inner_FD: Tensor, outer_DF: Tensor
) -> PerceptronGradients:
    """Derivatives from that of the result, `g`; that of `X W1' + b1` is `4 (g W2) h (1 - h)`.

    Products are written with the narrower matrix first, the faster of two ways.
    """
    sum_D = gradient_RD.sum(0)
    of_outer_DF = torch.mm(gradient_RD.t(), hidden_RF).mul_(2).sub_(sum_D[:, None])
    of_inner_RF = torch.mm(gradient_RD, outer_DF * 4)
    _aten.sigmoid_backward.grad_input(of_inner_RF, hidden_RF, grad_input=of_inner_RF)
    return PerceptronGradients(
        torch.mm(of_inner_RF, inner_FD),
        torch.mm(values_RD.t(), of_inner_RF).t(),
        of_inner_RF.sum(0),
        of_outer_DF,
        sum_D,
    )


# ---- message passing


class Rounded(torch.autograd.Function):
    """Numbers to some decimal places, with derivatives as if they were not rounded.

    Those of rounding are 0, with which nothing before it would learn.
    """

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


# ---- a transformer's layer, in two halves


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


def _whole(values: Tensor) -> Tensor:
    """Values without leaving any out."""
    return values


def attention_formula(
    tokens_GTD: Tensor,
    keys_GKD: Tensor,
    mask_GK1: Tensor,
    *weights: Tensor,
    drop_out: Callable[[Tensor], Tensor] = _whole,
) -> Tensor:
    """`norm(X + softmax(M + (X Wq' + bq) K') K Wo + bo)`, each row of X a query a head.

    Parameters
    ----------
    drop_out : Callable
        Leaves out some of what each query reads, and of what is added to tokens.
    """
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
    """Numbers of queries and keys, the longer dimension last: where that is short, softmax is slow.

    Attributes
    ----------
    values : Tensor
        [G, Q, K], or [G, K, Q].
    dim : int
        That of keys.
    """

    values: Tensor
    dim: int

    @classmethod
    def of(cls, queries_GQD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> _Shares:
        """How much of each key a query reads."""
        if queries_GQD.shape[1] > keys_GKD.shape[1]:
            scores_GKQ = torch.baddbmm(mask_GK1, keys_GKD, queries_GQD.transpose(1, 2))
            return cls(torch.softmax(scores_GKQ, dim=1), 1)
        mask_G1K = mask_GK1.transpose(1, 2)
        scores_GQK = torch.baddbmm(mask_G1K, queries_GQD, keys_GKD.transpose(1, 2))
        return cls(torch.softmax(scores_GQK, dim=2), 2)

    @staticmethod
    def product(queries_GQD: Tensor, keys_GKD: Tensor, dim: int) -> Tensor:
        """The products of all queries and keys, laid out for `dim`."""
        if dim == 1:
            return torch.bmm(keys_GKD, queries_GQD.transpose(1, 2))
        return torch.bmm(queries_GQD, keys_GKD.transpose(1, 2))

    def by_query(self) -> Tensor:
        return self.values if self.dim == 2 else self.values.transpose(1, 2)

    def by_key(self) -> Tensor:
        return self.values if self.dim == 1 else self.values.transpose(1, 2)


def _norm_gradients(
    gradient_RD: Tensor,
    sum_RD: Tensor,
    mean_R: Tensor,
    scale_R: Tensor,
    gain_D: Tensor,
    shift_D: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The derivatives of a layer normalisation in what it normalises, its gain and shift."""
    of_sum_RD, of_gain_D, of_shift_D = _aten.native_layer_norm_backward(
        gradient_RD, sum_RD, sum_RD.shape[1:], mean_R, scale_R, gain_D, shift_D, [True] * 3
    )
    return of_sum_RD, of_gain_D, of_shift_D
