"""Products with Jacobians equal those of the dense matrices."""

from __future__ import annotations

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.derivatives import (
    flatten,
    gradient,
    jacobian_operator,
    unflatten,
    vector_jacobian,
)
from tests.rl_objectives.games import hessian_operator, random_tensor


def test_a_flattened_list_is_cut_into_the_same_tensors() -> None:
    tensors = [random_tensor(2, 3), random_tensor(4, seed=1), random_tensor(seed=2)]
    parts = unflatten(flatten(tensors), tensors)
    assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))
    assert flatten([]).shape == (0,)
    assert unflatten(torch.zeros(0), []) == ()


def test_products_with_a_jacobian_and_its_transpose_equal_the_dense_ones() -> None:
    matrix, vector = random_tensor(4, 4), random_tensor(4, seed=1)
    x = random_tensor(4, seed=2).requires_grad_()
    operator = jacobian_operator(torch.tanh(matrix @ x), [x])
    dense = torch.autograd.functional.jacobian(lambda x: torch.tanh(matrix @ x), x)
    for _ in range(2):  # the graph of the product is made once and used again
        torch.testing.assert_close(operator.apply(vector), dense @ vector)
        torch.testing.assert_close(operator.apply_transposed(vector), dense.T @ vector)
    torch.testing.assert_close(operator.transposed().apply(vector), dense.T @ vector)


def test_a_product_with_the_hessian_of_a_network_equals_the_dense_one() -> None:
    inputs, hidden = random_tensor(5, 3), random_tensor(3, 2, seed=1).requires_grad_()
    out = random_tensor(2, seed=2).requires_grad_()

    def loss(hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(inputs @ hidden) @ out - 1.0).square().mean()

    blocks = torch.autograd.functional.hessian(loss, (hidden, out))
    dense = torch.cat(
        [
            torch.cat([b.reshape(n, -1) for b in row], 1)
            for n, row in zip((6, 2), blocks, strict=True)
        ]
    )
    operator = hessian_operator(loss(hidden, out), [hidden, out])
    vector = random_tensor(8, seed=3)
    torch.testing.assert_close(operator.apply(vector), dense @ vector)


def test_what_does_not_depend_on_a_parameter_has_the_derivative_zero() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    assert gradient((x**2).sum(), [x, y]).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0]
    assert gradient(torch.tensor(1.0), [x]).tolist() == [0.0, 0.0]
    assert vector_jacobian(2 * x, [], torch.ones(2)).shape == (0,)
    # The gradient of a linear loss is constant.
    assert hessian_operator(x.sum(), [x]).apply(torch.ones(2)).tolist() == [0.0, 0.0]


def test_a_jacobian_that_is_not_square_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ConfigurationError, match="field of 1 entries by 2 parameters"):
        jacobian_operator(x[:1] * 2, [x])
