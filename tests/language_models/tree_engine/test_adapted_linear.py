"""Matrices with adapters as one product: values, gradients, and what gets none."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.language_models.tree_engine.weights import Adapter, Matrix, adapted_linear


def _matrix(num_outputs: int, *, has_bias: bool = False) -> Matrix:
    bias = torch.randn(num_outputs) if has_bias else None
    return Matrix(torch.randn(num_outputs, 12), bias, F.linear)


def _adapter(num_outputs: int, rank: int, scaling: float) -> Adapter:
    down, up = torch.randn(rank, 12), torch.randn(num_outputs, rank)
    return Adapter(down.requires_grad_(), up.requires_grad_(), scaling)


def _one_by_one(x: Tensor, matrices: list[Matrix], adapters: list[list[Adapter]]) -> Tensor:
    parts = []
    for (weight, bias, _), of_matrix in zip(matrices, adapters, strict=True):
        part = F.linear(x, weight, bias)
        for down, up, scaling in of_matrix:
            part = part + F.linear(F.linear(x, down), up) * scaling
        parts.append(part)
    return torch.cat(parts, dim=1)


def test_one_product_is_all_products_with_their_adapters() -> None:
    torch.manual_seed(0)
    matrices = [_matrix(7, has_bias=True), _matrix(5, has_bias=True), _matrix(3, has_bias=True)]
    # One adapter, none, and two of different rank.
    adapters = [[_adapter(7, 4, 2.0)], [], [_adapter(3, 2, 0.5), _adapter(3, 3, 1.5)]]
    x = torch.randn(6, 12, requires_grad=True)
    learnt = [w for of_matrix in adapters for a in of_matrix for w in (a.down, a.up)]
    found = adapted_linear(matrices, adapters)(x)
    expected = _one_by_one(x, matrices, adapters)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, [x, *learnt], upstream),
        torch.autograd.grad(expected, [x, *learnt], upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_adapters_learn_where_the_input_does_not() -> None:
    torch.manual_seed(0)
    adapter = _adapter(5, 2, 1.0)
    asked: list[tuple[int, ...]] = []

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    matrix = Matrix(torch.randn(5, 12), None, multiply)
    adapted_linear([matrix], [[adapter]])(torch.randn(4, 12)).sum().backward()
    assert adapter.down.grad is not None
    assert adapter.up.grad is not None
    # Forward alone: of the matrix nothing is computed backward.
    assert asked == [(5, 12)]


def test_an_adapter_that_adds_nothing_changes_no_bit() -> None:
    torch.manual_seed(0)
    matrix, adapter = _matrix(5), Adapter(torch.randn(2, 12), torch.zeros(5, 2), 2.0)
    x = torch.randn(4, 12)
    assert torch.equal(adapted_linear([matrix], [[adapter]])(x), F.linear(x, matrix.weight))
