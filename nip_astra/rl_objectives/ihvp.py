"""Products of an inverse Hessian with a vector, without the Hessian.

All three methods give `x` with `(A + rho I) x = v` for a square matrix `A` known by its products
with vectors: of one agent `A` is the Hessian `H` of its loss, symmetric, and `x = H^-1 v` with the
sign of a plain inverse; of several agents that learn at once it is the Jacobian of all their
gradients, not symmetric. `rho` is the damping: larger is further from the inverse and safer where
`A` is nearly singular.

Shape suffixes: `P` entry of the parameters laid end to end, `K` sampled column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.derivatives import (
    LinearOperator,
    VectorMap,
)

IhvpVariant = Literal["nystrom", "conjugate_gradient", "neumann"]
"""How the inverse is approximated, see `nystrom`, `conjugate_gradient` and `neumann`."""


class Inverse(NamedTuple):
    """An approximate inverse, made once and applied to many vectors.

    Attributes
    ----------
    solve, solve_transposed : VectorMap
        `(A + rho I)^-1 v`, and the same for the transpose of `A`; linear in `v` (of the conjugate
        gradient: once it has converged), without gradient.
    """

    solve: VectorMap
    solve_transposed: VectorMap


@dataclass(frozen=True, kw_only=True)
class InverseMethod:
    """A method and its settings.

    Attributes
    ----------
    variant : IhvpVariant
        Which method.
    num_iterations : int
        Of the conjugate gradient and Neumann's series: products with the matrix, >= 1. Larger is
        nearer to the inverse and slower.
    rank : int
        Of Nystrom's method: columns sampled, >= 1. Larger is nearer to the inverse and slower.
    rho : float
        Damping, >= 0, for Nystrom's method > 0.
    step_size : float
        Of Neumann's series, > 0. The series converges where it is below 2 over the largest
        eigenvalue of `A + rho I`, and faster the larger it is below half of that.
    """

    variant: IhvpVariant
    num_iterations: int
    rank: int
    rho: float
    step_size: float

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}, which must be {rule}"
            for name, value, rule, is_right in (
                ("num_iterations", self.num_iterations, ">= 1", self.num_iterations >= 1),
                ("rank", self.rank, ">= 1", self.rank >= 1),
                ("step_size", self.step_size, "> 0", self.step_size > 0),
                ("rho", self.rho, ">= 0", self.rho >= 0),
                (
                    "rho",
                    self.rho,
                    "> 0 for nystrom, which divides by it",
                    self.rho != 0 or self.variant != "nystrom",
                ),
            )
            if not is_right
        ]
        if faults:
            raise ConfigurationError(
                f"an inverse by the method {self.variant!r} was asked for with settings that it "
                f"cannot have: {'; '.join(faults)}. Change those."
            )

    def prepare(
        self, operator: LinearOperator, generator: torch.Generator | None = None
    ) -> Inverse:
        """Make the inverse of a matrix; the generator draws the columns of Nystrom's method."""
        if self.variant == "nystrom":
            return nystrom(operator, rank=self.rank, rho=self.rho, generator=generator)
        if self.variant == "conjugate_gradient":
            return conjugate_gradient(operator, num_iterations=self.num_iterations, rho=self.rho)
        return neumann(
            operator, num_iterations=self.num_iterations, step_size=self.step_size, rho=self.rho
        )


def nystrom(
    operator: LinearOperator,
    *,
    rank: int,
    rho: float,
    generator: torch.Generator | None = None,
) -> Inverse:
    """Inverse by Nystrom's approximation of low rank (arXiv:2302.09726).

    With `K` columns `C = A[:, k]` and rows `R = A[k, :]` drawn uniformly, and `W = A[k, k]`, the
    matrix is taken for `C W^-1 R`, so that by Woodbury's identity

        (A + rho I)^-1 v  ~  v / rho - C (W + R C / rho)^-1 R v / rho**2

    where `R = C'` for a symmetric `A`. Exact for as many columns as the matrix has, or as the rank
    of a matrix whose drawn columns span it. Costs `rank` products with the matrix (twice as many
    where it is not symmetric), once for all vectors.
    """
    drawn = torch.randperm(operator.zeros_P.numel(), generator=generator)[:rank].tolist()
    columns, rows = [], []
    for index in drawn:
        columns.append(operator.apply(_unit(operator, index)))
        if not operator.is_symmetric:
            rows.append(operator.apply_transposed(_unit(operator, index)))
    columns_PK = torch.stack(columns, dim=1)
    rows_KP = columns_PK.T if operator.is_symmetric else torch.stack(rows)
    # The small matrix holds squares of A: in doubles, and without what its dtype cannot tell from 0
    # (a parameter that the loss ignores has a column of zeros).
    small_KK = columns_PK[drawn].double() + rows_KP.double() @ columns_PK.double() / rho
    tolerance = len(drawn) * torch.finfo(columns_PK.dtype).eps
    core_KK = torch.linalg.pinv(small_KK, rtol=tolerance).to(columns_PK.dtype)

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
    """Inverse by the method of conjugate gradients (arXiv:1909.04630).

    Exact, but for rounding, after as many iterations as the matrix has distinct eigenvalues. A
    symmetric matrix must be positive definite in the directions searched: the search ends before a
    direction of curvature <= 0, at the best point so far, which is 0 if that is the first one. One
    that is not symmetric is solved by the normal equations `B' B x = B' v` with `B = A + rho I`,
    which converge for every invertible `B`, more slowly.
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
    """Inverse by Neumann's series (arXiv:1911.02590).

        x = step_size * sum over j = 0 .. num_iterations of (I - step_size * (A + rho I))**j v

    which is the derivative of what `num_iterations + 1` steps of gradient descent of that size
    reach. Converges where all eigenvalues of `step_size * (A + rho I)` are nearer to 1 than 1; for
    a matrix with an eigenvalue of negative real part it grows without bound with the iterations.
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


def _unit(operator: LinearOperator, index: int) -> Tensor:
    unit_P = operator.zeros_P.clone()
    unit_P[index] = 1.0
    return unit_P


def _minimise_quadratic(apply: VectorMap, vector_P: Tensor, num_iterations: int) -> Tensor:
    """Minimise `x' B x / 2 - v' x`; nothing waits for the device."""
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
