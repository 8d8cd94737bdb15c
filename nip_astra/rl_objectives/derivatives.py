"""First and second derivatives of losses as flat vectors, by backward passes alone.

Shape suffixes: `P`, `Q` entry of parameters laid end to end. A *field* is a vector that depends on
parameters, such as a gradient with its graph. No Jacobian is ever formed. Graphs are kept, so that
one loss may be differentiated many times, and a parameter that something does not depend on has the
derivative 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError

VectorMap = Callable[[Tensor], Tensor]
"""From a vector to a vector, linear."""


class LinearOperator(NamedTuple):
    """A square matrix, known by its products with vectors.

    Attributes
    ----------
    apply, apply_transposed : VectorMap
        The product of the matrix, or of its transpose, with a vector; without gradient.
    zeros_P : Tensor
        A vector of the matrix's length, dtype and device.
    is_symmetric : bool
        Whether both products are the same.
    """

    apply: VectorMap
    apply_transposed: VectorMap
    zeros_P: Tensor
    is_symmetric: bool

    def transposed(self) -> LinearOperator:
        return LinearOperator(self.apply_transposed, self.apply, self.zeros_P, self.is_symmetric)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors end to end in one vector, through which gradients flow."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.zeros(0)


def unflatten(vector_P: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Cut a vector into tensors of the shapes of `like`; the inverse of `flatten`."""
    parts = torch.split(vector_P, [tensor.numel() for tensor in like]) if like else ()
    return tuple(part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True))


def gradient(loss: Tensor, parameters: Sequence[Tensor], *, create_graph: bool = True) -> Tensor:
    """The gradient of a scalar as a vector, with the graph to differentiate it again."""
    return vector_jacobian(loss, parameters, torch.ones_like(loss), create_graph=create_graph)


def vector_jacobian(
    field_Q: Tensor,
    parameters: Sequence[Tensor],
    vector_Q: Tensor,
    *,
    create_graph: bool = False,
) -> Tensor:
    """`J' vector` with `J[q, p] = d field[q] / d parameters[p]`, by one backward pass.

    Parameters
    ----------
    field_Q : Tensor
        With its graph, or a constant: then the product is 0.
    parameters : Sequence of Tensor
        What to differentiate by; none gives a vector of length 0.
    vector_Q : Tensor
        Of the field's length.
    create_graph : bool
        Whether the product can be differentiated again, also through `vector_Q`.

    Returns
    -------
    Tensor
        `[P]`.
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
    """The Jacobian `J[q, p] = d field[q] / d parameters[p]` of a field as long as they are.

    A product with the transpose is one backward pass. One with `J` itself is the derivative of
    that pass by its vector, which costs about twice as much; of a symmetric one it is the same.
    """
    if field_P.numel() != sum(parameter.numel() for parameter in parameters):
        raise ConfigurationError(
            f"a square Jacobian was asked for of a field of {field_P.numel()} entries by "
            f"{sum(parameter.numel() for parameter in parameters)} parameters; both numbers must "
            f"be equal. Give the gradient by those very parameters."
        )

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
