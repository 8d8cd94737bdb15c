"""Inverse-Hessian-vector products equal those of the dense inverse."""

from __future__ import annotations

import pytest
import torch

from nip_astra.rl_objectives.ihvp import (
    flatten,
    gradient,
    jacobian_operator,
    unflatten,
    vector_jacobian,
)
from nip_astra.rl_objectives.stackelberg import SpgParameters
from tests.rl_objectives.games import DOUBLE, hessian_operator, random_tensor

NYSTROM = SpgParameters(ihvp_variant="nystrom", ihvp_rank=100, ihvp_rho=0.3)
GRADIENT = SpgParameters(ihvp_variant="conjugate_gradient", ihvp_num_iterations=50, ihvp_rho=0.0)
NEUMANN = SpgParameters(
    ihvp_variant="neumann", ihvp_num_iterations=600, ihvp_rho=0.0, ihvp_step_size=0.2
)


def changed(method: SpgParameters, **settings: float) -> SpgParameters:
    return method.model_copy(update={f"ihvp_{name}": value for name, value in settings.items()})


def positive_matrix(size: int = 6) -> torch.Tensor:
    """A matrix with eigenvalues from 0.5 to 4."""
    basis = torch.linalg.qr(random_tensor(size, size)).Q
    return basis @ torch.diag(torch.linspace(0.5, 4.0, size, dtype=DOUBLE)) @ basis.T


def solve_quadratic(
    matrix: torch.Tensor, vector: torch.Tensor, method: SpgParameters, seed: int = 0
) -> torch.Tensor:
    x = random_tensor(len(matrix), seed=5).requires_grad_()
    hessian = hessian_operator(x @ matrix @ x / 2 + x.sum(), [x])
    return method.inverse_of(hessian, torch.Generator().manual_seed(seed)).solve(vector)


def test_one_parameter_by_hand() -> None:
    matrix, vector = torch.tensor([[[4.0]], [[6.0]]], dtype=DOUBLE)

    def solved(method: SpgParameters) -> float:
        return solve_quadratic(matrix, vector[0], method).item()

    assert solved(GRADIENT) == pytest.approx(1.5)
    assert solved(changed(GRADIENT, rho=2.0)) == pytest.approx(1.0)
    assert solved(changed(NYSTROM, rho=2.0)) == pytest.approx(1.0)
    # 0.1 * 6 * (1 + 0.6 + 0.36)
    few = changed(NEUMANN, num_iterations=2, step_size=0.1)
    assert solved(few) == pytest.approx(1.176)


@pytest.mark.parametrize("rho", [0.0, 0.4])
@pytest.mark.parametrize("method", [NYSTROM, GRADIENT, NEUMANN], ids=lambda m: m.ihvp_variant)
def test_each_method_inverts_a_jacobian_that_is_not_symmetric_and_its_transpose(
    method: SpgParameters, rho: float
) -> None:
    if method.ihvp_variant == "nystrom" and rho == 0.0:
        rho = 1e-6
    skew = random_tensor(6, 6, seed=2)
    matrix = positive_matrix() + skew - skew.T
    method = changed(method, rho=rho, step_size=0.05)
    x, vector = random_tensor(6, seed=1).requires_grad_(), random_tensor(6, seed=3)
    inverse = method.inverse_of(jacobian_operator(matrix @ x, [x]))
    damped = matrix + rho * torch.eye(6, dtype=DOUBLE)
    for solve, expected in ((inverse.solve, damped), (inverse.solve_transposed, damped.T)):
        exact = torch.linalg.solve(expected, vector)
        torch.testing.assert_close(solve(vector), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("method", "counts"), [(GRADIENT, (1, 2, 3, 5, 8)), (NEUMANN, (1, 3, 10, 30, 100))]
)
def test_more_iterations_are_nearer_to_the_inverse(
    method: SpgParameters, counts: tuple[int, ...]
) -> None:
    matrix, vector = positive_matrix(12), random_tensor(12, seed=1)
    expected = torch.linalg.solve(matrix, vector)
    errors = [
        (solve_quadratic(matrix, vector, changed(method, num_iterations=n)) - expected).norm()
        for n in counts
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.02 * errors[0]


@pytest.mark.parametrize("method", [NYSTROM, GRADIENT, NEUMANN])
def test_a_matrix_that_is_not_finite_gives_a_result_that_is_not_finite(
    method: SpgParameters,
) -> None:
    matrix = torch.full((3, 3), torch.nan, dtype=DOUBLE)
    assert not solve_quadratic(matrix, random_tensor(3, seed=1), method).isfinite().any()


def test_nystrom_survives_parameters_that_the_loss_ignores_and_needs_damping() -> None:
    matrix = torch.block_diag(positive_matrix(3), torch.zeros(4, 4, dtype=DOUBLE))
    vector = random_tensor(7, seed=1)
    result = solve_quadratic(matrix, vector, NYSTROM)
    expected = torch.linalg.solve(matrix + 0.3 * torch.eye(7, dtype=DOUBLE), vector)
    torch.testing.assert_close(result, expected)
    with pytest.raises(ValueError, match="ihvp_rho"):
        SpgParameters(ihvp_rho=0.0)


def test_the_generator_alone_decides_which_columns_nystrom_draws() -> None:
    matrix, vector = positive_matrix(), random_tensor(6, seed=1)
    method = changed(NYSTROM, rank=2)
    first, again, other = (solve_quadratic(matrix, vector, method, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_the_conjugate_gradient_ends_before_a_direction_of_negative_curvature() -> None:
    matrix = torch.diag(torch.tensor([2.0, -1.0], dtype=DOUBLE))
    downwards, upwards = torch.eye(2, dtype=DOUBLE)[1], torch.eye(2, dtype=DOUBLE)[0]
    assert solve_quadratic(matrix, downwards, GRADIENT).tolist() == [0.0, 0.0]
    assert solve_quadratic(matrix, upwards, GRADIENT).tolist() == [0.5, 0.0]
    assert solve_quadratic(0 * matrix, upwards, GRADIENT).tolist() == [0.0, 0.0]
    both = solve_quadratic(matrix, downwards + upwards, GRADIENT)  # curvature 1, then below 0
    assert both.tolist() == pytest.approx([2.0, 2.0])


def test_a_flattened_list_is_cut_into_the_same_tensors() -> None:
    for tensors in ([random_tensor(2, 3), random_tensor(4, seed=1), random_tensor(seed=2)], []):
        parts = unflatten(flatten(tensors), tensors)
        assert all(torch.equal(part, tensor) for part, tensor in zip(parts, tensors, strict=True))


def test_values_independent_of_a_parameter_have_the_derivative_zero() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    assert gradient((x**2).sum(), [x, y]).tolist() == [2.0, 2.0, 0.0, 0.0, 0.0]
    assert gradient(torch.tensor(1.0), [x]).tolist() == [0.0, 0.0]
    assert vector_jacobian(2 * x, [], torch.ones(2)).shape == (0,)
    # The gradient of a linear loss is constant.
    assert hessian_operator(x.sum(), [x]).apply(torch.ones(2)).tolist() == [0.0, 0.0]
