"""A layer of a transformer as a function of its weights (arXiv:1706.03762).

The products of each head's query and key matrices, and of its value and output matrices, are taken
first: keys and values are then the tokens themselves, uncopied.

Shapes: G groups, T tokens, R = G T rows, K keys, D width, F hidden width, H heads, d = D / H,
J = H D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.scenarios.graphs import derivatives
from nip_astra.scenarios.graphs.derivatives import (
    Attention,
    TanhResidual,
    attention_formula,
    residual_formula,
)
from nip_astra.scenarios.graphs.pairs import PairReading, Pairs

Layer = Callable[..., Tensor]


class LayerWeights(NamedTuple):
    """Weights of attention, of its norm, of a perceptron, and of the last norm.

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


class JointWeights(NamedTuple):
    """Weights of attention as `attention_formula` takes them, without its norm."""

    query_JD: Tensor
    query_bias_J: Tensor
    output_JD: Tensor
    output_bias_D: Tensor


def joint_weights(weights: LayerWeights) -> JointWeights:
    """The products of each head's matrices, with the scale of scores in the queries."""
    heads, of_head, d = weights.query_HdD.shape
    key_HDd = weights.key_DD.view(heads, of_head, d).transpose(1, 2) / math.sqrt(of_head)
    value_HDd = weights.value_DD.view(heads, of_head, d).transpose(1, 2)
    return JointWeights(
        torch.bmm(key_HDd, weights.query_HdD).flatten(0, 1),
        torch.bmm(key_HDd, weights.query_bias_D.view(heads, of_head, 1)).flatten(),
        torch.bmm(value_HDd, weights.output_DD.t().reshape(heads, of_head, d)).flatten(0, 1),
        weights.output_bias_D,
    )


def read(
    pairs: Pairs, weights: LayerWeights, perceptron: Layer, attention: Layer | None = None
) -> PairReading:
    """What pairs read in the layer.

    Parameters
    ----------
    perceptron : Callable
        Gives rows, [R, D], from those after attention.
    attention : Callable, optional
        Stands for `attention_formula`; by default the same with written derivatives.
    """
    attention = attention or partial(derivatives.apply, Attention)
    joint = joint_weights(weights)

    def attend(tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor) -> Tensor:
        norm = (weights.gain_D, weights.shift_D)
        attended_GTD = attention(tokens_GTD, keys_GKD, mask_GK1, *joint, *norm)
        return perceptron(attended_GTD.flatten(0, 1)).view_as(tokens_GTD)

    return PairReading(pairs, attend)


def tanh_reading(pairs: Pairs, weights: LayerWeights, *, is_formula: bool = False) -> PairReading:
    """What pairs read in a layer whose perceptron has hyperbolic tangents.

    Parameters
    ----------
    is_formula : bool
        Whether by operations that can all be derived twice, rather than with written derivatives.
    """
    *_, inner, inner_bias, outer, outer_bias, gain, shift = weights
    of_perceptron = (inner, inner_bias, outer, outer_bias, gain, shift)
    residual = residual_formula if is_formula else partial(derivatives.apply, TanhResidual)
    return read(
        pairs,
        weights,
        lambda rows_RD: residual(rows_RD, *of_perceptron),
        attention_formula if is_formula else None,
    )
