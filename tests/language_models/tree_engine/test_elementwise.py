"""Functions that keep little for the backward pass have torch's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.tree_engine import decoder
from nip_astra.language_models.tree_engine.decoder import rms_norm, silu_gated, unsaved


@pytest.fixture(params=["small", "large"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "large":
        monkeypatch.setattr(decoder, "SMALLEST_UNSAVED", 0)


def _agree(one: Callable[..., Tensor], other: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    found, expected = one(*leaves), other(*leaves)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.usefixtures("_size")
@pytest.mark.parametrize("shape", [(6, 8), (6, 3, 8)])
def test_a_norm_is_that_of_torch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    _agree(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda x, weight: F.rms_norm(x, (8,), weight, 1e-5),
        torch.randn(shape),
        torch.rand(8),
    )


@pytest.mark.usefixtures("_size")
def test_a_gate_is_that_of_torch() -> None:
    torch.manual_seed(0)
    _agree(silu_gated, lambda x: F.silu(x[:, :4]) * x[:, 4:], torch.randn(6, 8))


def test_a_norm_in_bfloat16_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(decoder, "SMALLEST_UNSAVED", 0)
    x, weight, upstream = torch.randn(64, 96), torch.rand(96), torch.randn(64, 96)

    def gradient(dtype: torch.dtype) -> Tensor:
        leaf = x.bfloat16().to(dtype).requires_grad_()
        normed = rms_norm(leaf, weight.bfloat16().to(dtype), 1e-5)
        return torch.autograd.grad(normed, leaf, upstream.bfloat16().to(dtype))[0].float()

    exact = gradient(torch.float32)
    # One rounding of the result, and none on the way.
    assert (gradient(torch.bfloat16) - exact).norm() < 2**-8 * exact.norm()


@pytest.mark.usefixtures("_size")
def test_what_is_computed_again_has_the_same_gradient() -> None:
    torch.manual_seed(0)
    _agree(lambda x: unsaved(torch.tanh, x), torch.tanh, torch.randn(6, 8))


def test_nothing_of_a_large_functions_inside_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "SMALLEST_UNSAVED", 0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.rand(8)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, weight, 1e-5)
        silu_gated(x)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}
