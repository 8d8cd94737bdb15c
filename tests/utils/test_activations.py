"""Fast activation functions have torch's values and derivatives."""

from __future__ import annotations

import torch

from nip_astra.utils.activations import Tanh


def test_the_hyperbolic_tangent_is_torchs() -> None:
    values = torch.linspace(-60, 60, 4001)
    values[0], values[-1] = -torch.inf, torch.inf
    torch.testing.assert_close(Tanh()(values), torch.tanh(values), atol=3e-7, rtol=0)


def test_the_hyperbolic_tangent_can_be_derived_twice_and_by_torch_func() -> None:
    few = torch.tensor([-1.5, -0.2, 0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Tanh(), few)
    assert torch.autograd.gradgradcheck(Tanh(), few)
    slopes = torch.func.vmap(torch.func.grad(Tanh()))(few.detach())
    torch.testing.assert_close(slopes, 1 - torch.tanh(few.detach()) ** 2)
