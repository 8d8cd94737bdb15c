"""Elementwise functions of a large update, which keep their inputs alone for the backward pass.

What they would keep inside is most of the memory of an update, and little time to compute again.
Small ones keep it: there starting an operation costs more than the operation.

Shape suffixes: `N` token, `X` hidden unit, `Y` unit inside a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SMALLEST_UNSAVED = 1 << 18
"""Functions of fewer numbers keep what they need for the backward pass."""


def is_unsaved(x: Tensor) -> bool:
    """Say whether what is inside a function of `x` is computed again in the backward pass."""
    return torch.is_grad_enabled() and x.numel() >= SMALLEST_UNSAVED


def unsaved(function: Callable[..., Any], *inputs: Any) -> Any:
    """Compute any function without keeping what is inside, if it is large."""
    if not is_unsaved(inputs[0]):
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def rms_norm(x_NX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """Divide by the root mean square of the last axis, and multiply by weights."""
    if not is_unsaved(x_NX):
        return F.rms_norm(x_NX, weight_X.shape, weight_X, eps)
    normed: Tensor = _RmsNorm.apply(x_NX, weight_X, eps)  # type: ignore[no-untyped-call]
    return normed


def silu_gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[N, 2 * Y]`, the gate being the first half."""
    if not is_unsaved(gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    gated: Tensor = _SiluGated.apply(gate_up)  # type: ignore[no-untyped-call]
    return gated


class _RmsNorm(torch.autograd.Function):
    """With `n = x / rms(x)`, the gradient is `(h - n * mean(h * n)) / rms(x)`, `h` that of `n`."""

    @staticmethod
    def forward(ctx: Any, x_NX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_NX, weight_X)
        ctx.eps = eps
        return F.rms_norm(x_NX, weight_X.shape, weight_X, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NX, weight_X = ctx.saved_tensors
        exact_NX, grad_NX = x_NX.float(), gradients[0].float()
        scale_N1 = exact_NX.square().mean(dim=-1, keepdim=True).add_(ctx.eps).rsqrt_()
        normed_NX = exact_NX * scale_N1
        grad_weight_X = None
        if ctx.needs_input_grad[1]:
            grad_weight_X = (grad_NX * normed_NX).flatten(0, -2).sum(dim=0).to(weight_X)
        grad_NX = grad_NX * weight_X.float()
        along_N1 = (grad_NX * normed_NX).mean(dim=-1, keepdim=True)
        grad_NX = grad_NX.sub_(normed_NX.mul_(along_N1)).mul_(scale_N1)
        return grad_NX.to(x_NX), grad_weight_X, None


class _SiluGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, dim=-1)
        torch.mul(gradients[0], F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(gradients[0] * up, gate))
        return grad
