"""The layers of `derivatives.py`, each a call of C that takes its rows block by block.

What stands between two products never leaves the cache, and is computed again for derivatives. Used
on CPUs where there is a C compiler, for small matrices in float32 with widths that are multiples of
16; elsewhere the layers are those of `derivatives.py`, with the same values up to rounding.

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
TILE = 16
"""Widths are multiples of it."""
MOST_WEIGHTS = 4096
"""Of one matrix: C reads all weights again for each block of rows, on one core, and is slower than
torch from about four times as many on."""

Layer = Callable[..., Tensor]


def tanh_network(network: Network, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Give tokens and sums of a network with layers of `gin_formula`, by C where that can be.

    Parameters
    ----------
    weights : Sequence[Tensor]
        Those of each layer, one layer after the other.
    """
    inputs = (*network, *weights)
    if NativeNetwork.takes(inputs):
        tokens_BSE, sums_B2D = NativeNetwork.run(inputs)
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
    inputs = (values_RD, *weights)
    if NativeResidual.takes(inputs):
        return NativeResidual.run(inputs)[0]
    return derivatives.apply(TanhResidual, *inputs)


def attention(tokens_GTD: Tensor, keys_GKD: Tensor, mask_GK1: Tensor, *weights: Tensor) -> Tensor:
    """Give `attention_formula`, by C where that can be."""
    inputs = (tokens_GTD, keys_GKD, mask_GK1, *weights)
    if NativeAttention.takes(inputs):
        return NativeAttention.run(inputs)[0]
    return derivatives.apply(Attention, *inputs)


class _Native(torch.autograd.Function):
    """A formula by C: `NAME_forward(*sizes, *inputs, *results)` and
    `NAME_backward(*sizes, *gradients, *inputs, *of_inputs)`, all contiguous.

    Where derivatives are to be derived, they are those of the formula.
    """

    name: ClassVar[str]
    formula: ClassVar[Callable[..., Tensor | tuple[Tensor, ...]]]
    constants: ClassVar[tuple[int, ...]] = ()
    """Which inputs have no derivatives."""
    are_bool: ClassVar[tuple[int, ...]] = ()
    """Which inputs are bool; all others are float32."""

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        """Give what C is told of the shapes."""
        raise NotImplementedError

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        """Give the outputs and inputs of matrices."""
        raise NotImplementedError

    @staticmethod
    def shapes(inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        """Give the shape that each input is to have, from some of them."""
        raise NotImplementedError

    @classmethod
    def takes(cls, inputs: Sequence[Tensor]) -> bool:
        """Say whether C computes this; torch does what it does not, or says what is wrong."""
        are_small = all(
            rows * columns <= MOST_WEIGHTS and rows % TILE == columns % TILE == 0
            for rows, columns in cls.widths(inputs)
        )
        return (
            are_small
            and takes(*(x for i, x in enumerate(inputs) if i not in cls.are_bool))
            and all(inputs[i].dtype == torch.bool for i in cls.are_bool)
            and not any(inputs[i].requires_grad for i in cls.constants)
            and [tuple(x.shape) for x in inputs] == list(cls.shapes(inputs))
            and CODE.library() is not None
        )

    @classmethod
    def run(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Give the results, with derivatives where they are asked for."""
        inputs = [tensor.contiguous() for tensor in inputs]
        if not torch.is_grad_enabled():
            return cls.compute(inputs)
        results: tuple[Tensor, ...] = cls.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's
        return results

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
    are_bool = (2,)

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        said_BFS, _, _, last_BLS, input_DF, node_ED, *_ = inputs
        weights = inputs[len(Network._fields) :]
        num_frames, num_said, num_nodes = said_BFS.shape
        widths = (len(input_DF), len(weights[0]), len(node_ED))
        num_graphs, num_layers = 2 * num_frames, len(weights) // 4
        return num_layers, num_graphs, num_nodes // 2, *widths, num_said, last_BLS.shape[1]

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        _, _, _, _, input_DF, node_ED, _, _, inner_FD, *_ = inputs
        return (len(inner_FD), len(input_DF)), (len(node_ED), len(input_DF))

    @staticmethod
    def shapes(inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        num_layers, _, n, d, f, e, num_said, num_last = NativeNetwork.sizes(inputs)
        num_frames, num_nodes = len(inputs[0]), 2 * n
        frames = [(num_said, num_nodes), (2, n, n), (2, n), (num_last, num_nodes)]
        ends = [(d, num_said + 1), (e, d), (e,), (e, num_last)]
        layers = num_layers * [(f, d), (f,), (d, f), (d,)]
        return [*((num_frames, *shape) for shape in frames), *ends, *layers]

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

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        _, d, f = NativeResidual.sizes(inputs)
        return [(f, d)]

    @staticmethod
    def shapes(inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        r, d, f = NativeResidual.sizes(inputs)
        return (r, d), (f, d), (f,), (d, f), (d,), (d,), (d,)


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
        # C takes keys in whole tiles.
        return groups, num_tokens, num_keys, -(-num_keys // TILE) * TILE, d, len(query_JD)

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        *_, d, j = NativeAttention.sizes(inputs)
        return [(j, d)]

    @staticmethod
    def shapes(inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        g, t, k, _, d, j = NativeAttention.sizes(inputs)
        return (g, t, d), (g, k, d), (g, k, 1), (j, d), (j,), (j, d), (d,), (d,), (d,)
