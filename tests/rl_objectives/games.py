"""Small games with known derivatives, for the tests of opponent shaping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nip_astra.rl_objectives.derivatives import LinearOperator, gradient, jacobian_operator
from nip_astra.rl_objectives.ihvp import InverseMethod
from nip_astra.rl_objectives.stackelberg import AgentUpdate, agent_updates
from nip_astra.rl_objectives.stackelberg_variants import VARIANTS, UpdateRule

DOUBLE = torch.float64

EXACT = InverseMethod(
    variant="conjugate_gradient", num_iterations=12, rank=1, rho=0.0, step_size=1.0
)
"""The inverse itself, of the small matrices of tests."""

SEQUENCE = ((0,), (1,))


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def hessian_operator(loss: torch.Tensor, parameters: Sequence[torch.Tensor]) -> LinearOperator:
    """The matrix of second derivatives of a scalar loss."""
    return jacobian_operator(gradient(loss, parameters), parameters, is_symmetric=True)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=DOUBLE, requires_grad=True)


def rule(
    name: str,
    *,
    num_agents: int = 2,
    step_size: float = 0.1,
    step_sizes: tuple[float, ...] | None = None,
    inverse: InverseMethod = EXACT,
    is_lookahead_used: bool = True,
) -> UpdateRule:
    return UpdateRule(
        variant=VARIANTS[name],
        step_sizes=step_sizes or (step_size,) * num_agents,
        inverse=inverse,
        is_lookahead_used=is_lookahead_used,
        sos_scaling_factor=0.5,
        sos_threshold_factor=0.1,
    )


def updates_of(
    losses: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    name: str,
    groups: Sequence[Sequence[int]] | None = SEQUENCE,
    **settings: object,
) -> tuple[AgentUpdate, ...]:
    """The updates of agents with one tensor each."""
    return agent_updates(
        losses,
        [[tensor] for tensor in parameters],
        rule=rule(name, num_agents=len(losses), **settings),
        groups=groups,
    )
