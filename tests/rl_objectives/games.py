"""Small games with known derivatives, for the tests of opponent shaping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nip_astra.rl_objectives.ihvp import LinearOperator, gradient, jacobian_operator
from nip_astra.rl_objectives.stackelberg import AgentUpdate, SpgParameters, agent_updates

DOUBLE = torch.float64

Method = dict[str, Any]
"""Parameters `ihvp_*`."""

EXACT: Method = {"ihvp_variant": "conjugate_gradient", "ihvp_num_iterations": 12, "ihvp_rho": 0.0}
"""The inverse itself, of the small matrices of tests."""

SEQUENCE = ((0,), (1,))


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def hessian_operator(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> LinearOperator:
    """The matrix of second derivatives of a scalar loss."""
    return jacobian_operator(gradient(loss, parameters), parameters, is_symmetric=True)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=DOUBLE, requires_grad=True)


def rule(name: str, *, inverse: Method = EXACT, is_lookahead_used: bool = True) -> SpgParameters:
    return SpgParameters(variant=name, additional_lola_term=is_lookahead_used, **inverse)


def updates_of(
    losses: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor | Sequence[torch.Tensor]],
    name: str,
    groups: Sequence[Sequence[int]] = SEQUENCE,
    *,
    step_size: float = 0.1,
    step_sizes: Sequence[float] | None = None,
    **settings: Any,
) -> tuple[AgentUpdate, ...]:
    """The updates of agents, each with one tensor or a list of tensors."""
    return agent_updates(
        losses,
        [[own] if isinstance(own, torch.Tensor) else own for own in parameters],
        rule=rule(name, **settings),
        step_sizes=step_sizes or [step_size] * len(losses),
        groups=groups,
    )
