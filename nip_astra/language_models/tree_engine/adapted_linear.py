"""Products with frozen matrices and low-rank adapters on them, with gradients for the adapters.

Matrices that are applied to the same input are one product with their adapters: what adapters add
is one product of low rank for all of them, and adds up in place.

Shape suffixes: `N` token, `I` input, `O` outputs of all matrices, `R` ranks of all adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.language_models.tree_engine.kernels import LinearMap

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`(x_NI, weight_OI, bias_O) -> [N, O]`."""


class Matrix(NamedTuple):
    """A matrix with its bias, in the precision that is computed in, and how it is multiplied."""

    weight: Tensor
    bias: Tensor | None
    multiply: Multiply


class Adapter(NamedTuple):
    """What is learnt beside a matrix: `scaling * up @ down`."""

    down: Tensor
    up: Tensor
    scaling: float


def adapted_linear(matrices: Sequence[Matrix], adapters: Sequence[Sequence[Adapter]]) -> LinearMap:
    """The products with all matrices side by side, `[N, I] -> [N, O]`.

    Parameters
    ----------
    adapters : Sequence[Sequence[Adapter]]
        Those of each matrix; some matrix has one.
    """
    like = matrices[0].weight
    every = [adapter for of_matrix in adapters for adapter in of_matrix]

    def apply(x_NI: Tensor) -> Tensor:
        down_RI = torch.cat([adapter.down for adapter in every]).to(like)
        blocks = [
            torch.cat([adapter.up * adapter.scaling for adapter in of_matrix], dim=1)
            if of_matrix
            else every[0].up.new_zeros(len(matrix.weight), 0)
            for matrix, of_matrix in zip(matrices, adapters, strict=True)
        ]
        # torch leaves it without types.
        up_OR = torch.block_diag(*blocks).to(like)  # type: ignore[no-untyped-call]
        found: Tensor = _AdaptedLinear.apply(x_NI, down_RI, up_OR, matrices)  # type: ignore[no-untyped-call]
        return found

    return apply


class _AdaptedLinear(torch.autograd.Function):
    """`x W^T + (x down^T) up^T`; no gradient of `W` is ever computed."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        down_RI: Tensor,
        up_OR: Tensor,
        matrices: Sequence[Matrix],
    ) -> Tensor:
        inner_NR = x_NI @ down_RI.t()
        ctx.save_for_backward(x_NI, inner_NR, down_RI, up_OR)
        ctx.matrices = matrices
        products = [multiply(x_NI, weight, bias) for weight, bias, multiply in matrices]
        product_NO = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return product_NO.addmm_(inner_NR, up_OR.t())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, inner_NR, down_RI, up_OR = ctx.saved_tensors
        grad_NO = gradients[0].contiguous()
        grad_inner_NR = grad_NO @ up_OR
        grad_down_RI, grad_up_OR = grad_inner_NR.t() @ x_NI, grad_NO.t() @ inner_NR
        if not ctx.needs_input_grad[0]:
            return None, grad_down_RI, grad_up_OR, None
        grad_NI, start = None, 0
        for weight, _, multiply in ctx.matrices:
            stop = start + len(weight)
            part_NI = multiply(grad_NO[:, start:stop].contiguous(), weight.t(), None)
            grad_NI = part_NI if grad_NI is None else grad_NI.add_(part_NI)
            start = stop
        assert grad_NI is not None
        return grad_NI.addmm_(grad_inner_NR, down_RI), grad_down_RI, grad_up_OR, None
