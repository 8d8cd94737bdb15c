"""The layers of `derivatives.py`, each a call of C that takes its rows block by block.

What stands between two products never leaves the cache, and is computed again for derivatives. Used
on CPUs where there is a C compiler, for float32 and widths that are multiples of 16; elsewhere the
layers are those of `derivatives.py`, with the same values up to rounding.

Shapes: those of `derivatives.py` and `network.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.scenarios.graphs import derivatives
from nip_astra.scenarios.graphs.derivatives import (
    Attention,
    Gradients,
    TanhGin,
    TanhResidual,
    attention_formula,
    gin_formula,
    of_plain_formula,
    residual_formula,
)
from nip_astra.scenarios.graphs.network import Network
from nip_astra.utils.native_code import NativeCode, takes

CODE = NativeCode(Path(__file__).with_name("layers.c"))
LANES = 16
"""Widths are multiples of it."""


Layer = Callable[..., Tensor]


def tanh_network(network: Network, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Give tokens and sums of a network with layers of `gin_formula`, by C where that can be.

    Parameters
    ----------
    weights : Sequence[Tensor]
        Those of each layer, one layer after the other.
    """
    read = (network.said_BFS, network.last_BLS, network.adjacency_B2nn)
    widths = (len(network.input_DF), len(network.node_ED), len(weights[0]))
    numbers = [*read, network.input_DF, network.node_ED, *weights]
    if _is_taken(widths, numbers) and not any(tensor.requires_grad for tensor in read):
        tokens_BSE, sums_B2D = _run(NativeNetwork, *network, *weights)
        return tokens_BSE, sums_B2D
    return network.apply(partial(_passed, partial(derivatives.apply, TanhGin), weights))


def _passed(
    layer: Layer, weights: Sequence[Tensor], nodes_GnD: Tensor, closed_Gnn: Tensor
) -> Tensor:
    for start in range(0, len(weights), 4):
        nodes_GnD = layer(nodes_GnD, closed_Gnn, *weights[start : start + 4])
    return nodes_GnD


def _network_formula(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    num_read = len(Network._fields)
    network, weights = Network(*inputs[:num_read]), inputs[num_read:]
    return network.apply(partial(_passed, gin_formula, weights))


def residual(values_RD: Tensor, *weights: Tensor) -> Tensor:
    """Give `residual_formula`, by C where that can be."""
    if _is_taken((values_RD.shape[1], len(weights[0])), (values_RD, *weights)):
        return _run(NativeResidual, values_RD, *weights)[0]
    return derivatives.apply(TanhResidual, values_RD, *weights)


def attention(tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor, *weights: Tensor) -> Tensor:
    """Give `attention_formula`, by C where that can be."""
    inputs = (tokens_GTD, keys_GKD, mask_GK1, *weights)
    if _is_taken((tokens_GTD.shape[2], len(weights[0])), inputs):
        return _run(NativeAttention, *inputs)[0]
    return derivatives.apply(Attention, *inputs)


def _is_taken(widths: Sequence[int], inputs: Sequence[Tensor]) -> bool:
    has_whole_lanes = all(width % LANES == 0 for width in widths)
    return has_whole_lanes and takes(*inputs) and CODE.library() is not None


def _run(layer: type[_Native], *inputs: Tensor) -> tuple[Tensor, ...]:
    inputs = tuple(tensor.contiguous() for tensor in inputs)
    if not torch.is_grad_enabled():
        return layer.compute(inputs)
    results: tuple[Tensor, ...] = layer.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's
    return results


class _Native(torch.autograd.Function):
    """A formula by C: `NAME_forward(*sizes, *inputs, *results)` and
    `NAME_backward(*sizes, *gradients, *inputs, *of_inputs)`, all contiguous.

    Where derivatives are to be derived, they are those of the formula.
    """

    name: ClassVar[str]
    formula: ClassVar[Callable[..., Tensor | tuple[Tensor, ...]]]
    constants: ClassVar[tuple[int, ...]] = ()
    """Numbers of the inputs without derivatives."""

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        """Give what C is told of the shapes."""
        raise NotImplementedError

    @staticmethod
    def empty_results(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Give tensors for the results, which have not their values yet."""
        return (torch.empty_like(inputs[0]),)

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        """Give inputs, or their derivatives, as C takes them."""
        return tensors

    @classmethod
    def compute(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Give the results without derivatives."""
        results = cls.empty_results(inputs)
        CODE.call(f"{cls.name}_forward", *cls.sizes(inputs), *cls.grouped(inputs), *results)
        return results

    @classmethod
    def forward(cls, ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.save_for_backward(*inputs)
        return cls.compute(inputs)

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> Gradients:  # type: ignore[override]
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():
            return of_plain_formula(cls.formula, inputs, gradients)
        of_inputs = [
            None if i in cls.constants else torch.empty_like(x) for i, x in enumerate(inputs)
        ]
        found = [x for x in cls.grouped(of_inputs) if x is not None]
        given = (*cls.sizes(inputs), *(x.contiguous() for x in gradients), *cls.grouped(inputs))
        CODE.call(f"{cls.name}_backward", *given, *found)
        return tuple(of_inputs)


class NativeNetwork(_Native):
    """`Network.apply` with layers of `gin_formula`; the layers' weights stand last."""

    name = "network"
    formula = staticmethod(_network_formula)
    constants = (0, 1, 2, 3)

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        said_BFS, _, _, last_BLS, input_DF, node_ED, *_ = inputs
        weights = inputs[len(Network._fields) :]
        num_frames, num_said, num_nodes = said_BFS.shape
        widths = (len(input_DF), len(weights[0]), len(node_ED))
        num_graphs, num_layers = 2 * num_frames, len(weights) // 4
        return num_layers, num_graphs, num_nodes // 2, *widths, num_said, last_BLS.shape[1]

    @staticmethod
    def empty_results(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        said_BFS, _, _, _, input_DF, node_ED, *_ = inputs
        num_frames, _, num_nodes = said_BFS.shape
        return (
            said_BFS.new_empty(num_frames, num_nodes, len(node_ED)),
            said_BFS.new_empty(num_frames, 2, len(input_DF)),
        )

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[: len(Network._fields)], tensors[len(Network._fields) :]


class NativeResidual(_Native):
    """`residual_formula`."""

    name = "residual"
    formula = staticmethod(residual_formula)

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        values_RD, inner_FD, *_ = inputs
        return *values_RD.shape, len(inner_FD)


class NativeAttention(_Native):
    """`attention_formula`."""

    name = "attention"
    formula = staticmethod(attention_formula)
    constants = (2,)

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        tokens_GTD, keys_GKD, _, query_JD, *_ = inputs
        groups, num_tokens, d = tokens_GTD.shape
        num_keys = keys_GKD.shape[1]
        # C takes keys in whole lanes.
        return groups, num_tokens, num_keys, -(-num_keys // LANES) * LANES, d, len(query_JD)
