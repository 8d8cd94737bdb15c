"""Derivatives of losses as flat vectors, and products of an inverse Hessian with a vector.

A *field* is a vector that depends on parameters, such as a gradient with its graph. No Jacobian is
formed, graphs are kept, and a parameter that a field does not depend on has the derivative 0.

`nystrom`, `conjugate_gradient` and `neumann` solve `(A + rho I) x = v` for a square matrix `A`:
the Hessian of one agent's loss, which is symmetric, or the Jacobian of the gradients of several
agents, which is not. The damping `rho` is the distance from the exact inverse; larger is safer
where `A` is nearly singular.

Shape suffixes: `P`, `Q` entry of parameters laid end to end, `K` sampled column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

VectorMap = Callable[[Tensor], Tensor]
"""Linear map from vectors to vectors."""


class LinearOperator(NamedTuple):
    """A square matrix given by its products with vectors, which have no gradient.

    `zeros_P` is a vector of the matrix's length, dtype and device.
    """

    apply: VectorMap
    apply_transposed: VectorMap
    zeros_P: Tensor
    is_symmetric: bool

    def transposed(self) -> LinearOperator:
        return LinearOperator(self.apply_transposed, self.apply, self.zeros_P, self.is_symmetric)


class Inverse(NamedTuple):
    """Approximate products `(A + rho I)^-1 v`, and those of the transpose of `A`; no gradient."""

    solve: VectorMap
    solve_transposed: VectorMap


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one vector; gradients flow through."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def unflatten(vector_P: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Split a vector into tensors shaped as `like`; the inverse of `flatten`."""
    parts = torch.split(vector_P, [tensor.numel() for tensor in like]) if like else ()
    return tuple(part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True))


def gradient(loss: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = True) -> Tensor:
    """Return the gradient of a scalar as a vector; with `create_graph` it is differentiable."""
    return vector_jacobian(loss, parameters, torch.ones_like(loss), create_graph=create_graph)


def vector_jacobian(
    field_Q: Tensor,
    parameters: Sequence[Tensor],
    vector_Q: Tensor,
    *,
    create_graph: bool = False,
) -> Tensor:
    """Compute `J' vector`, `[P]`, where `J[q, p] = d field[q] / d parameters[p]`, in one pass.

    With `create_graph` the product can be differentiated again, also through `vector_Q`.
    """
    if not parameters:
        return field_Q.detach().new_zeros(0)
    if not field_Q.requires_grad:
        return flatten([torch.zeros_like(x, requires_grad=False) for x in parameters])
    products = torch.autograd.grad(
        field_Q,
        list(parameters),
        vector_Q if create_graph else vector_Q.detach(),
        retain_graph=True,
        create_graph=create_graph,
        materialize_grads=True,
    )
    return flatten(products)


def jacobian_operator(
    field_P: Tensor, parameters: Sequence[Tensor], *, is_symmetric: bool = False
) -> LinearOperator:
    """Return the Jacobian of a field that is as long as the parameters.

    A product with the transpose is one backward pass. A product with `J` itself is the derivative
    of that pass by its vector, which costs about twice as much.
    """

    def apply_transposed(vector_P: Tensor) -> Tensor:
        return vector_jacobian(field_P, parameters, vector_P)

    @cache
    def product_with_anything() -> tuple[Tensor, Tensor]:
        u_P = torch.zeros_like(field_P, requires_grad=True)
        return u_P, vector_jacobian(field_P, parameters, u_P, create_graph=True)

    def apply(vector_P: Tensor) -> Tensor:
        # J' u is linear in u, so that its derivative by u, transposed, is J whatever u is.
        u_P, product_P = product_with_anything()
        return vector_jacobian(product_P, [u_P], vector_P)

    return LinearOperator(
        apply_transposed if is_symmetric else apply,
        apply_transposed,
        torch.zeros_like(field_P, requires_grad=False),
        is_symmetric,
    )


def nystrom(
    operator: LinearOperator, *, rank: int, rho: float, generator: torch.Generator | None = None
) -> Inverse:
    """Approximate an inverse by Nystrom's low-rank method (arXiv:2302.09726), for `rho > 0`.

    With `K` columns `C = A[:, k]` and rows `R = A[k, :]` drawn uniformly, and `W = A[k, k]`, the
    matrix is approximated by `C W^-1 R`, so that by Woodbury's identity

        (A + rho I)^-1 v  ~  v / rho - C (W + R C / rho)^-1 R v / rho**2

    where `R = C'` for a symmetric `A`. Exact for as many columns as the matrix has, or as the rank
    of a matrix whose drawn columns span it. Costs `rank` products with the matrix (twice as many
    where it is not symmetric), once for all vectors.
    """
    drawn = torch.randperm(operator.zeros_P.numel(), generator=generator)[:rank].tolist()
    columns, rows = [], []
    for index in drawn:
        unit_P = operator.zeros_P.clone()
        unit_P[index] = 1.0
        columns.append(operator.apply(unit_P))
        if not operator.is_symmetric:
            rows.append(operator.apply_transposed(unit_P))
    columns_PK = torch.stack(columns, dim=1)
    rows_KP = columns_PK.T if operator.is_symmetric else torch.stack(rows)
    # The small matrix holds squares of A: in double precision, ignoring values below rounding error
    # (a parameter that the loss ignores has a column of zeros).
    small_KK = columns_PK[drawn].double() + rows_KP.double() @ columns_PK.double() / rho
    tolerance = len(drawn) * torch.finfo(columns_PK.dtype).eps
    # NaN, which pinv refuses, still reaches the products through the columns.
    core_KK = torch.linalg.pinv(small_KK.nan_to_num(), rtol=tolerance).to(columns_PK.dtype)

    def solve(vector_P: Tensor) -> Tensor:
        low_rank_P: Tensor = columns_PK @ (core_KK @ (rows_KP @ vector_P))
        return vector_P / rho - low_rank_P / rho**2

    def solve_transposed(vector_P: Tensor) -> Tensor:
        low_rank_P: Tensor = rows_KP.T @ (core_KK.T @ (columns_PK.T @ vector_P))
        return vector_P / rho - low_rank_P / rho**2

    return Inverse(solve, solve_transposed)


def conjugate_gradient(
    operator: LinearOperator, *, num_iterations: int, rho: float = 0.0
) -> Inverse:
    """Compute an inverse by the method of conjugate gradients (arXiv:1909.04630).

    Exact, but for rounding, after as many iterations as the matrix has distinct eigenvalues. A
    symmetric matrix must be positive definite in the directions searched: the search ends before a
    direction of curvature <= 0, at the best point so far. A matrix that is not symmetric is solved
    by the normal equations `B' B x = B' v` with `B = A + rho I`, which converge more slowly for
    every invertible `B`.
    """

    def solve_with(operator: LinearOperator, vector_P: Tensor) -> Tensor:
        def damped(x_P: Tensor) -> Tensor:
            return operator.apply(x_P) + rho * x_P

        def damped_transposed(x_P: Tensor) -> Tensor:
            return operator.apply_transposed(x_P) + rho * x_P

        if operator.is_symmetric:
            return _minimise_quadratic(damped, vector_P, num_iterations)
        return _minimise_quadratic(
            lambda x_P: damped_transposed(damped(x_P)), damped_transposed(vector_P), num_iterations
        )

    return Inverse(
        lambda vector_P: solve_with(operator, vector_P),
        lambda vector_P: solve_with(operator.transposed(), vector_P),
    )


def neumann(
    operator: LinearOperator, *, num_iterations: int, step_size: float, rho: float = 0.0
) -> Inverse:
    """Approximate an inverse by Neumann's series (arXiv:1911.02590).

        x = step_size * sum over j = 0 .. num_iterations of (I - step_size * (A + rho I))**j v

    the derivative of the result of `num_iterations + 1` steps of gradient descent of that size.
    Converges where all eigenvalues of `step_size * (A + rho I)` are nearer to 1 than 1; for a
    matrix with an eigenvalue of negative real part it grows without bound.
    """

    def series(apply: VectorMap, vector_P: Tensor) -> Tensor:
        x_P = step_size * vector_P
        for _ in range(num_iterations):
            x_P = x_P + step_size * (vector_P - apply(x_P) - rho * x_P)
        return x_P

    return Inverse(
        lambda vector_P: series(operator.apply, vector_P),
        lambda vector_P: series(operator.apply_transposed, vector_P),
    )


def _minimise_quadratic(apply: VectorMap, vector_P: Tensor, num_iterations: int) -> Tensor:
    """Minimise `x' B x / 2 - v' x` without synchronising with the device."""
    x_P = torch.zeros_like(vector_P)
    residual_P = direction_P = vector_P
    square = initial = residual_P @ residual_P
    smallest = initial * torch.finfo(vector_P.dtype).eps ** 2
    is_going = square > smallest
    for _ in range(num_iterations):
        product_P = apply(direction_P)
        curvature = direction_P @ product_P
        is_going = is_going & (curvature > 0)
        step = torch.where(is_going, square / curvature, 0.0)
        x_P = x_P + step * direction_P
        residual_P = residual_P - step * product_P
        new_square = residual_P @ residual_P
        is_going = is_going & (new_square > smallest)
        direction_P = residual_P + torch.where(is_going, new_square / square, 0.0) * direction_P
        square = new_square
    return x_P
