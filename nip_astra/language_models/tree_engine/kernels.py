"""Matrix products on the CPU: torch's own, or oneDNN's with weights laid out for it beforehand.

Both give the same numbers up to rounding. torch multiplies float32 matrices with MKL, which is slow
at small batches on some processors; oneDNN with packed weights is several times faster there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

# oneDNN keeps each shape of a product prepared, which takes about half a megabyte; rollouts go
# through hundreds of shapes, of which few come again soon. It reads this at the first product.
for _setting in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_setting, "128")

LinearMap = Callable[[Tensor], Tensor]
"""A matrix product with a fixed matrix, `[N, I] -> [N, O]`."""

SMALLEST_MEASURED = 250_000
"""Matrices of fewer weights stay with torch: there neither is clearly faster, and a choice that
noise decides would change the last digits from run to run."""
_CLEARLY_FASTER = 1.3


def has_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether oneDNN can multiply on this device, in float32 or bfloat16.

    Of bfloat16 it packs no weights for processors that have not AVX-512 or better.
    """
    # torch leaves its backend checks without types.
    is_built: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not is_built:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearMap:
    """A product with a copy of the weights in oneDNN's own layout; no gradient."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), None)
    bias = None if bias_O is None else bias_O.detach().to(weight_OI.dtype)
    multiply = torch.ops.mkldnn._linear_pointwise

    def linear(x_NI: Tensor) -> Tensor:
        product: Tensor = multiply(x_NI, packed, bias, "none", [], "")
        return product

    return linear


def dense_linear(weight_OI: Tensor, bias_O: Tensor | None) -> LinearMap:
    """A product by torch; the weights are not copied."""

    def linear(x_NI: Tensor) -> Tensor:
        return F.linear(x_NI, weight_OI, bias_O)

    return linear


class OneDnnLinear(torch.autograd.Function):
    """A float32 product with gradients, all three products of it by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.has_bias = bias_O is not None
        product: Tensor = _multiply(x_NI, weight_OI, bias_O)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        grad_NO = gradients[0].contiguous()
        grad_x = _multiply(grad_NO, weight_OI.t(), None) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = _multiply(grad_NO.t(), x_NI.t(), None)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad_NO.sum(dim=0)
        return grad_x, grad_weight, grad_bias


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def is_packing_faster(shape: torch.Size, dtype: torch.dtype) -> bool:
    """Measure both kernels on a matrix of this shape with a few rows, once in a process.

    A matrix of fewer than `SMALLEST_MEASURED` weights is not measured and stays with torch.
    """
    if shape.numel() < SMALLEST_MEASURED:
        return False
    return _measure(shape[0], shape[1], dtype)


@lru_cache(maxsize=32)
def _measure(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    x = torch.randn(4, num_inputs, generator=generator).to(dtype)
    packed, dense = packed_linear(weight, None), dense_linear(weight, None)
    # The fastest of several: a busy machine makes single ones slow, never fast.
    seconds = {"oneDNN": _fastest(packed, x), "torch": _fastest(dense, x)}
    # The tie goes to oneDNN, so that noise cannot change the choice from run to run.
    is_faster = seconds["torch"] * _CLEARLY_FASTER > seconds["oneDNN"]
    logger.info(
        "matrix products of %d x %d in %s: torch %.0f us, oneDNN packed %.0f us; taking %s",
        num_outputs,
        num_inputs,
        str(dtype).removeprefix("torch."),
        seconds["torch"] * 1e6,
        seconds["oneDNN"] * 1e6,
        "oneDNN" if is_faster else "torch",
    )
    return is_faster


@torch.no_grad()
def _fastest(linear: LinearMap, x: Tensor, repeats: int = 12) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        linear(x)
        times.append(time.perf_counter() - started)
    return min(times)
