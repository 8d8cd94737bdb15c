"""Layers of graph networks in C, computed block of rows by block of rows.

Intermediate values never leave the cache, and most are computed again for derivatives. Used on CPUs
with a C compiler, for small matrices in float32 with widths that are multiples of 16; elsewhere the
layers of `formulas.py` compute the same values up to rounding.

Shapes: as in `formulas.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nip_astra.scenarios.graphs.compiled import NativeCode
from nip_astra.scenarios.graphs.formulas import (
    LayerWeights,
    Network,
    PairReading,
    Pairs,
    gin_formula,
    tanh_reading,
)

Gradients = tuple[Tensor | None, ...]
SOURCES = Path(__file__).with_name("native")
CODES = {name: NativeCode(SOURCES / f"{name}.c") for name in ("network", "transformer")}

TILE = 16
"""Widths are multiples of it."""
MOST_WEIGHTS = 4096
"""Maximum matrix size: C rereads all weights for each block of rows, on one core, and is slower
than torch from about four times this size."""
IS_NODE = 2
"""Index of the node mask, [B, 2, n], among the inputs of each function."""
NUM_READ, NUM_WEIGHTS = len(Network._fields), len(LayerWeights._fields)


def why_absent() -> str | None:
    """Return why layers are computed by torch, or None if they are compiled."""
    reasons = (code.why_absent() for code in CODES.values())
    return next((reason for reason in reasons if reason), None)


def computed_by() -> str:
    """Return whether layers are compiled, and from which code, or why not."""
    reason = why_absent()
    if reason is not None:
        return f"torch ({reason})"
    return "compiled: " + ", ".join(code.described() for code in CODES.values())


def tanh_network(
    network: Network, weights: Sequence[Tensor], *, digits: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `Network.apply` with layers of `gin_formula`, in C if possible.

    Parameters
    ----------
    weights : Sequence[Tensor]
        Four per layer, one layer after the other.
    digits : int, optional
        Decimal places to which nodes are rounded after all layers; not in C.
    """
    inputs = (*network, *weights)
    if digits is None and NativeNetwork.takes(inputs):
        tokens_BSE, sums_B2D = NativeNetwork.run(inputs)
        return tokens_BSE, sums_B2D
    return network.apply(partial(_gin_layers, weights), digits=digits)


def _gin_layers(weights: Sequence[Tensor], nodes_GnD: Tensor, closed_Gnn: Tensor) -> Tensor:
    for start in range(0, len(weights), 4):
        nodes_GnD = gin_formula(nodes_GnD, closed_Gnn, *weights[start : start + 4])
    return nodes_GnD


def read(pairs: Pairs, weights: LayerWeights) -> PairReading | NativeReading:
    """Compute `tanh_reading`, in C if possible."""
    if NativeGraphTokens.takes((*pairs, *weights)):
        return NativeReading(pairs, weights)
    return tanh_reading(pairs, weights)


class NativeReading:
    """`tanh_reading` in C."""

    def __init__(self, pairs: Pairs, weights: LayerWeights) -> None:
        self.pairs = pairs
        self.weights = weights

    def graphs(self) -> Tensor:
        return NativeGraphTokens.run((*self.pairs, *self.weights))[0]

    def nodes(self) -> Tensor:
        return NativeNodeTokens.run((*self.pairs, *self.weights))[0]


def _plain_gradients(
    formula: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Gradients:
    """Return differentiable derivatives with respect to a formula's inputs, from those of its
    results.
    """
    with torch.enable_grad():
        # Views, so that an input from which another was computed gets only its own part.
        views = [tensor.view_as(tensor) for tensor in inputs]
        output = formula(*views)
        results = (output,) if isinstance(output, Tensor) else output
        # Where some weights do not learn, one of several results may be a constant.
        learning_results = []
        learning_gradients = []
        for formula_result, gradient in zip(results, gradients, strict=True):
            if formula_result.requires_grad:
                learning_results.append(formula_result)
                learning_gradients.append(gradient)
        derivatives = torch.autograd.grad(
            learning_results,
            [view for view in views if view.requires_grad],
            learning_gradients,
            create_graph=True,
            # Weights of absent message places are in no result.
            allow_unused=True,
        )
    remaining = iter(derivatives)
    return tuple(next(remaining) if view.requires_grad else None for view in views)


class _Native(torch.autograd.Function):
    """A formula in C: `NAME_forward(*sizes, *inputs, *intermediates, *results)` and
    `NAME_backward(*sizes, *gradients, *inputs, *intermediates, *input_gradients)`, all contiguous.

    Second derivatives are those of the formula.
    """

    name: ClassVar[str]
    constants: ClassVar[tuple[int, ...]]
    """Inputs without derivatives."""
    num_intermediates: ClassVar[int] = 0
    """Number of tensors that `forward` keeps for `backward` besides the inputs."""

    @classmethod
    def formula(cls, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the same in torch, twice differentiable."""
        raise NotImplementedError

    @classmethod
    def sizes(cls, inputs: Sequence[Tensor]) -> Sequence[int]:
        """Return the sizes passed to C."""
        raise NotImplementedError

    @classmethod
    def widths(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        """Return outputs and inputs of matrices."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        """Return the expected shape of each input, derived from some of them."""
        raise NotImplementedError

    @classmethod
    def empty_results(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Allocate the results."""
        raise NotImplementedError

    @classmethod
    def empty_intermediates(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Allocate the `num_intermediates` tensors."""
        return ()

    @classmethod
    def grouped(cls, tensors: Sequence[Any]) -> Sequence[Any]:
        """Group inputs, or their derivatives, as C expects them."""
        raise NotImplementedError

    @classmethod
    def takes(cls, inputs: Sequence[Tensor]) -> bool:
        """Return whether C computes this; otherwise torch does, or raises."""
        for rows, columns in cls.widths(inputs):
            # Larger matrices are multiplied faster by torch.
            if rows * columns > MOST_WEIGHTS or rows % TILE != 0 or columns % TILE != 0:
                return False
        for number, tensor in enumerate(inputs):
            dtype = torch.bool if number == IS_NODE else torch.float32
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                return False
            if tensor.dtype != dtype:
                return False
        if any(inputs[number].requires_grad for number in cls.constants):
            return False
        # Broadcast shapes, for instance, are left to torch.
        if [tuple(tensor.shape) for tensor in inputs] != list(cls.shapes(inputs)):
            return False
        # C counts a graph's nodes, so padding must be last.
        is_node_B2n = inputs[IS_NODE]
        if bool((is_node_B2n[..., 1:] > is_node_B2n[..., :-1]).any()):
            return False
        return CODES[cls.name].library() is not None

    @classmethod
    def run(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results, with derivatives if gradients are enabled."""
        inputs = [tensor.contiguous() for tensor in inputs]
        if not torch.is_grad_enabled():
            return cls.compute(inputs, cls.num_intermediates * [None])
        results: tuple[Tensor, ...] = cls.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's
        return results

    @classmethod
    def compute(
        cls, inputs: Sequence[Tensor], intermediates: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """Return the results and write to the intermediates tensors that are not None."""
        results = cls.empty_results(inputs)
        arguments = (*cls.sizes(inputs), *cls.grouped(inputs), *intermediates)
        CODES[cls.name].call(f"{cls.name}_forward", *arguments, *results)
        return results

    @classmethod
    def forward(cls, ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        intermediates = cls.empty_intermediates(inputs)
        results = cls.compute(inputs, intermediates)
        ctx.save_for_backward(*inputs, *intermediates)
        return results

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> Gradients:  # type: ignore[override]
        num_inputs = len(ctx.needs_input_grad)
        inputs = ctx.saved_tensors[:num_inputs]
        intermediates = ctx.saved_tensors[num_inputs:]
        # By `create_graph`: the derivatives must be differentiable.
        if torch.is_grad_enabled():
            return _plain_gradients(cls.formula, inputs, gradients)
        input_gradients = [
            None if number in cls.constants else torch.empty_like(tensor)
            for number, tensor in enumerate(inputs)
        ]
        outputs = [gradient for gradient in cls.grouped(input_gradients) if gradient is not None]
        contiguous_gradients = [gradient.contiguous() for gradient in gradients]
        arguments = (
            *cls.sizes(inputs),
            *contiguous_gradients,
            *cls.grouped(inputs),
            *intermediates,
        )
        CODES[cls.name].call(f"{cls.name}_backward", *arguments, *outputs)
        return tuple(input_gradients)


class NativeNetwork(_Native):
    """`Network.apply` with layers of `gin_formula`, whose weights are the last inputs."""

    name = "network"
    num_intermediates = 1
    constants = (0, 1, 2, 3)

    @classmethod
    def formula(cls, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return Network(*inputs[:NUM_READ]).apply(partial(_gin_layers, inputs[NUM_READ:]))

    @classmethod
    def sizes(cls, inputs: Sequence[Tensor]) -> Sequence[int]:
        sent_BPS, _, _, last_BLS, input_DP, node_ED, *_ = inputs
        weights = inputs[NUM_READ:]
        num_frames, num_sent, num_nodes = sent_BPS.shape
        widths = (len(input_DP), len(weights[0]), len(node_ED))
        num_graphs, num_layers = 2 * num_frames, len(weights) // 4
        return num_layers, num_graphs, num_nodes // 2, *widths, num_sent, last_BLS.shape[1]

    @classmethod
    def widths(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        _, _, _, _, input_DP, node_ED, _, _, inner_FD, *_ = inputs
        return (len(inner_FD), len(input_DP)), (len(node_ED), len(input_DP))

    @classmethod
    def shapes(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        num_layers, _, n, d, f, e, num_sent, num_last = cls.sizes(inputs)
        num_frames, num_nodes = len(inputs[0]), 2 * n
        frames = [(num_sent, num_nodes), (2, n, n), (2, n), (num_last, num_nodes)]
        ends = [(d, num_sent + 1), (e, d), (e,), (e, num_last)]
        layers = num_layers * [(f, d), (f,), (d, f), (d,)]
        return [*((num_frames, *shape) for shape in frames), *ends, *layers]

    @classmethod
    def empty_results(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sent_BPS, _, _, _, input_DP, node_ED, *_ = inputs
        num_frames, _, num_nodes = sent_BPS.shape
        return (
            sent_BPS.new_empty(num_frames, num_nodes, len(node_ED)),
            sent_BPS.new_empty(num_frames, 2, len(input_DP)),
        )

    @classmethod
    def empty_intermediates(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        num_layers, num_graphs, n, d, *_ = cls.sizes(inputs)
        return (inputs[0].new_empty(num_layers + 1, num_graphs * n, d),)

    @classmethod
    def grouped(cls, tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[:NUM_READ], tensors[NUM_READ:]


class NativeGraphTokens(_Native):
    """`PairReading.graphs` of `tanh_reading`; the layer's weights are the last inputs."""

    name = "transformer"
    constants = (2,)
    is_nodes: ClassVar[bool] = False

    @classmethod
    def formula(cls, *inputs: Tensor) -> Tensor:
        weights = LayerWeights(*inputs[-NUM_WEIGHTS:])
        reading = tanh_reading(Pairs(*inputs[:3]), weights)
        return reading.nodes() if cls.is_nodes else reading.graphs()

    @classmethod
    def widths(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
        _, _, _, d, heads, f = cls.sizes(inputs)
        return (heads * d, d), (f, d)

    @classmethod
    def sizes(cls, inputs: Sequence[Tensor]) -> Sequence[int]:
        num_frames, _, n = inputs[IS_NODE].shape
        weights = LayerWeights(*inputs[-NUM_WEIGHTS:])
        heads, _, d = weights.query_HdD.shape
        return int(cls.is_nodes), num_frames, n, d, heads, len(weights.inner_FD)

    @classmethod
    def shapes(cls, inputs: Sequence[Tensor]) -> Sequence[tuple[int, ...]]:
        _, num_frames, n, d, heads, f = cls.sizes(inputs)
        of_head = inputs[-NUM_WEIGHTS].shape[1]
        # In the order of `Pairs`, then of `LayerWeights`.
        tokens = [(num_frames, 2, d), (num_frames, 2 * n, d), (num_frames, 2, n)]
        query = [(heads, of_head, heads * of_head), (d,)]
        key_value_output = [(d, d), (d, d), (d, d), (d,)]
        norm = [(d,), (d,)]
        perceptron = [(f, d), (f,), (d, f), (d,)]
        return [*tokens, *query, *key_value_output, *norm, *perceptron, *norm]

    @classmethod
    def empty_results(cls, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (torch.empty_like(inputs[int(cls.is_nodes)]),)

    @classmethod
    def grouped(cls, tensors: Sequence[Any]) -> Sequence[Any]:
        return *tensors[:3], tensors[3:]


class NativeNodeTokens(NativeGraphTokens):
    """`PairReading.nodes`."""

    is_nodes = True
