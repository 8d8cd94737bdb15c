"""Networks of graphs, each a call of C that takes its rows block by block.

What stands between two products never leaves the cache, and most of it is computed again for
derivatives. Used on CPUs where there is a C compiler, for small matrices in float32 with widths
that are multiples of 16; elsewhere the layers are those of `derivatives.py`, with the same values
up to rounding.

Shapes: those of `network.py`, `pairs.py` and `transformer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.scenarios.graphs import derivatives
from nip_astra.scenarios.graphs.derivatives import (
    Gradients,
    TanhGin,
    gin_formula,
    of_plain_formula,
)
from nip_astra.scenarios.graphs.native.compiled import NativeCode, can_read
from nip_astra.scenarios.graphs.network import Network
from nip_astra.scenarios.graphs.pairs import PairReading, Pairs, Reading
from nip_astra.scenarios.graphs.transformer import LayerWeights, tanh_reading

CODES = {
    name: NativeCode(Path(__file__).with_name(f"{name}.c")) for name in ("network", "transformer")
}

TILE = 16
"""Widths are multiples of it."""
MOST_WEIGHTS = 4096
"""Of one matrix: C reads all weights again for each block of rows, on one core, and is slower than
torch from about four times as many on."""

IS_NODE = 2
"""Where among the inputs of each function it stands which nodes are there, [B, 2, n]."""

Layer = Callable[..., Tensor]


def why_absent() -> str | None:
    """Say why layers are left to torch, or None where they need not be."""
    reasons = (code.why_absent() for code in CODES.values())
    return next((reason for reason in reasons if reason), None)


def computed_by() -> str:
    """Say whether layers are compiled, and what, or why they are left to torch."""
    reason = why_absent()
    if reason is not None:
        return f"torch ({reason})"
    return "compiled: " + ", ".join(code.described() for code in CODES.values())


def tanh_network(
    network: Network, weights: Sequence[Tensor], *, digits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and sums of a network with layers of `gin_formula`, by C where that can be.

    Parameters
    ----------
    weights : Sequence[Tensor]
        Those of each layer, one layer after the other.
    digits : int, optional
        Decimal places to which nodes are rounded after all layers, which C does not do.
    """
    inputs = (*network, *weights)
    if digits is None and NativeNetwork.takes(inputs):
        tokens_BSE, sums_B2D = NativeNetwork.run(inputs)
        return tokens_BSE, sums_B2D
    passing = partial(_passed, partial(derivatives.apply, TanhGin), weights)
    return network.apply(passing, digits=digits)


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


def read(pairs: Pairs, weights: LayerWeights) -> Reading:
    """What pairs read in a layer with hyperbolic tangents, by C where that can be."""
    if NativeGraphTokens.takes((*pairs, *weights)):
        return _NativeReading(pairs, weights)
    return tanh_reading(pairs, weights)


class _NativeReading:
    """`tanh_reading` by C."""

    def __init__(self, pairs: Pairs, weights: LayerWeights) -> None:
        self.pairs, self.weights = pairs, weights

    def graphs(self) -> Tensor:
        return NativeGraphTokens.run((*self.pairs, *self.weights))[0]

    def nodes(self) -> Tensor:
        return NativeNodeTokens.run((*self.pairs, *self.weights))[0]

    def nodes_of(self, graph_B: Tensor) -> Tensor:
        inputs = (*self.pairs, graph_B, *self.weights)
        if NativeChosenTokens.takes(inputs):
            return NativeChosenTokens.run(inputs)[0]
        return tanh_reading(self.pairs, self.weights).nodes_of(graph_B)


class _Native(torch.autograd.Function):
    """A formula by C: `NAME_forward(*sizes, *inputs, *kept, *results)` and
    `NAME_backward(*sizes, *gradients, *inputs, *kept, *of_inputs)`, all contiguous.

    Where derivatives are to be derived, they are those of the formula.
    """

    name: ClassVar[str]
    formula: ClassVar[Callable[..., Tensor | tuple[Tensor, ...]]]
    constants: ClassVar[tuple[int, ...]] = ()
    """Which inputs have no derivatives."""
    dtypes: ClassVar[Mapping[int, torch.dtype]] = {}
    """Of the inputs that are not float32."""
    num_kept: ClassVar[int] = 0
    """How many tensors `forward` leaves to `backward` besides the inputs."""

    @staticmethod
    def sizes(inputs: Sequence[Tensor]) -> Sequence[int]:
        """What C is told of the shapes."""
        raise NotImplementedError

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        """The outputs and inputs of matrices."""
        raise NotImplementedError

    @staticmethod
    def shapes(inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        """The shape that each input is to have, from some of them."""
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
            and can_read(*inputs)
            and all(x.dtype == cls.dtypes.get(i, torch.float32) for i, x in enumerate(inputs))
            and not any(inputs[i].requires_grad for i in cls.constants)
            and [tuple(x.shape) for x in inputs] == list(cls.shapes(inputs))
            and _has_padding_last(inputs[IS_NODE])
            and CODES[cls.name].library() is not None
        )

    @classmethod
    def run(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results, with derivatives where they are asked for."""
        inputs = [tensor.contiguous() for tensor in inputs]
        if not torch.is_grad_enabled():
            return cls.compute(inputs, cls.num_kept * [None])
        results: tuple[Tensor, ...] = cls.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's
        return results

    @staticmethod
    def empty_results(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Tensors for the results, which have not their values yet."""
        return (torch.empty_like(inputs[0]),)

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        """Inputs, or their derivatives, as C takes them."""
        return tensors

    @staticmethod
    def empty_kept(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """`num_kept` tensors, which have not their values yet."""
        return ()

    @classmethod
    def compute(cls, inputs: Sequence[Tensor], kept: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return the results, and write what is kept unless that is None."""
        results = cls.empty_results(inputs)
        given = (*cls.sizes(inputs), *cls.grouped(inputs), *kept)
        CODES[cls.name].call(f"{cls.name}_forward", *given, *results)
        return results

    @classmethod
    def forward(cls, ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        kept = cls.empty_kept(inputs)
        results = cls.compute(inputs, kept)
        ctx.save_for_backward(*inputs, *kept)
        return results

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> Gradients:  # type: ignore[override]
        saved = ctx.saved_tensors
        inputs, kept = saved[: len(ctx.needs_input_grad)], saved[len(ctx.needs_input_grad) :]
        if torch.is_grad_enabled():
            return of_plain_formula(cls.formula, inputs, gradients)
        of_inputs = [
            None if i in cls.constants else torch.empty_like(x) for i, x in enumerate(inputs)
        ]
        found = [x for x in cls.grouped(of_inputs) if x is not None]
        given = (*cls.sizes(inputs), *(x.contiguous() for x in gradients), *cls.grouped(inputs))
        CODES[cls.name].call(f"{cls.name}_backward", *given, *kept, *found)
        return tuple(of_inputs)


class NativeNetwork(_Native):
    """`Network.apply` with layers of `gin_formula`; the layers' weights stand last."""

    name = "network"
    formula = staticmethod(_network_formula)
    num_kept = 1
    constants = (0, 1, 2, 3)
    dtypes: ClassVar[Mapping[int, torch.dtype]] = {2: torch.bool}

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
    def empty_kept(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        num_layers, num_graphs, n, d, *_ = NativeNetwork.sizes(inputs)
        return (inputs[0].new_empty(num_layers + 1, num_graphs * n, d),)

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[: len(Network._fields)], tensors[len(Network._fields) :]


class _NativeTransformer(_Native):
    """`tanh_reading`; the layer's weights stand last."""

    name = "transformer"
    whose: ClassVar[int]
    """For whom tokens are given, as C numbers it."""
    constants: ClassVar[tuple[int, ...]] = (2,)
    dtypes: ClassVar[Mapping[int, torch.dtype]] = {2: torch.bool}

    @staticmethod
    def widths(inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        weights = _layer_weights(inputs)
        heads, _, d = weights.query_HdD.shape
        return (heads * d, d), (len(weights.inner_FD), d)

    @classmethod
    def sizes(cls, inputs: Sequence[Tensor]) -> Sequence[int]:
        _, _, is_node_B2n, *_ = inputs
        weights = _layer_weights(inputs)
        heads, _, d = weights.query_HdD.shape
        return cls.whose, len(is_node_B2n), is_node_B2n.shape[2], d, heads, len(weights.inner_FD)

    @classmethod
    def shapes(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        _, num_frames, n, d, heads, f = cls.sizes(inputs)
        of_head = _layer_weights(inputs).query_HdD.shape[1]
        tokens = [(num_frames, 2, d), (num_frames, 2 * n, d), (num_frames, 2, n)]
        attention = [(heads, of_head, heads * of_head), (d,), *3 * [(d, d)], *3 * [(d,)]]
        perceptron = [(f, d), (f,), (d, f), *3 * [(d,)]]
        return [*tokens, *cls.shapes_of_choice(num_frames), *attention, *perceptron]

    @staticmethod
    def shapes_of_choice(num_frames: int) -> Sequence[tuple[int, ...]]:
        """The shapes of what is between the tokens and the weights."""
        return ()

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[:3], None, tensors[3:]


class NativeGraphTokens(_NativeTransformer):
    """`Reading.graphs`."""

    whose = 0

    @staticmethod
    def formula(*inputs: Tensor) -> Tensor:
        return _formula(inputs).graphs()


class NativeNodeTokens(_NativeTransformer):
    """`Reading.nodes`."""

    whose = 1

    @staticmethod
    def formula(*inputs: Tensor) -> Tensor:
        return _formula(inputs).nodes()

    @staticmethod
    def empty_results(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.empty_like(inputs[1]),)


class NativeChosenTokens(_NativeTransformer):
    """`Reading.nodes_of`."""

    whose = 2
    constants = (2, 3)
    dtypes: ClassVar[Mapping[int, torch.dtype]] = {2: torch.bool, 3: torch.int64}

    @staticmethod
    def formula(*inputs: Tensor) -> Tensor:
        return _formula(inputs).nodes_of(inputs[3])

    @staticmethod
    def shapes_of_choice(num_frames: int) -> Sequence[tuple[int, ...]]:
        return ((num_frames,),)

    @staticmethod
    def empty_results(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        _, nodes_BSD, is_node_B2n, *_ = inputs
        num_frames, _, n = is_node_B2n.shape
        return (nodes_BSD.new_empty(num_frames, n, nodes_BSD.shape[2]),)

    @staticmethod
    def grouped(tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[:4], tensors[4:]


def _has_padding_last(is_node_B2n: Tensor) -> bool:
    """Say whether C, which counts a graph's nodes, takes the right ones."""
    return not bool((is_node_B2n[..., 1:] > is_node_B2n[..., :-1]).any())


def _layer_weights(inputs: Sequence[Tensor]) -> LayerWeights:
    return LayerWeights(*inputs[-len(LayerWeights._fields) :])


def _formula(inputs: Sequence[Tensor]) -> PairReading:
    return tanh_reading(Pairs(*inputs[:3]), _layer_weights(inputs), is_formula=True)
