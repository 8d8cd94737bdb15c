"""Activation functions that are faster on CPUs than torch's, with equal values up to rounding."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class Tanh(nn.Module):
    """The hyperbolic tangent, on a CPU as 2 sigmoid(2 x) - 1 with an error of up to 2e-7.

    Torch's own is three times slower there. It can be differentiated twice.
    """

    def forward(self, values: Tensor) -> Tensor:
        if values.device.type != "cpu":
            return torch.tanh(values)
        result: Tensor = _CpuTanh.apply(values)  # type: ignore[no-untyped-call]  # torch's own
        return result


class _CpuTanh(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor) -> Tensor:
        return torch.sigmoid(values * 2).mul_(2).sub_(1)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: FunctionCtx, gradients: Tensor) -> Tensor:
        (output,) = ctx.saved_tensors  # type: ignore[attr-defined]  # torch's own type lacks it
        result: Tensor = torch.ops.aten.tanh_backward(gradients, output)
        return result


# Torch queries it at every call, which takes as long as the computation for a small tensor.
_CpuTanh.forward.__signature__ = inspect.signature(_CpuTanh.forward)  # type: ignore[attr-defined]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "sigmoid": nn.Sigmoid,
}
"""Activation functions by parameter value."""
