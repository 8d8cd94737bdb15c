"""What trainers need to know of agents that foresee how others learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import nn

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.rl_objectives.ihvp import IhvpVariant, InverseMethod
from nip_astra.rl_objectives.stackelberg_variants import (
    VARIANTS,
    StackelbergVariantName,
    UpdateRule,
)
from nip_astra.scenario_base.protocol.tensordict_agents import Agent
from nip_astra.trainers.protocol.optimizers import parts_of

FORESEES_ANSWERS = where("variant", "spg", "pspg")
"""Condition of what only variants read that foresee an answer in full."""


class SpgParameters(SubParameters):
    """Who foresees whom, and how."""

    variant: StackelbergVariantName = "spg"
    """What leaders foresee: that followers will have answered in full (spg), or taken one step
    (lola), or that with stability (sos); with a leading p for PPO's clipped losses."""
    stackelberg_sequence: list[list[PlainText]] | None = None
    """Groups of agents by name, leaders first, each agent once; null takes the protocol's, the
    verifiers before all others."""
    ihvp_variant: Annotated[IhvpVariant, FORESEES_ANSWERS] = "nystrom"
    """How spg and pspg invert the Hessian of the followers."""
    ihvp_num_iterations: Annotated[
        int, FORESEES_ANSWERS, where("ihvp_variant", "conjugate_gradient", "neumann")
    ] = Field(default=5, ge=1)
    """Products with the Hessian, for conjugate_gradient and neumann. Larger is more exact and
    slower."""
    ihvp_rank: Annotated[int, FORESEES_ANSWERS, where("ihvp_variant", "nystrom")] = Field(
        default=5, ge=1
    )
    """Columns of the Hessian that nystrom draws. Larger is more exact and slower."""
    ihvp_rho: Annotated[float, FORESEES_ANSWERS] = Field(default=0.1, ge=0)
    """What is added to the Hessian's diagonal, for nystrom > 0. Larger foresees smaller answers
    and is safer where the Hessian is nearly singular."""
    ihvp_step_size: Annotated[float, FORESEES_ANSWERS, where("ihvp_variant", "neumann")] = Field(
        default=0.1, gt=0
    )
    """Step of neumann. Larger is more exact, up to 1 over the Hessian's largest eigenvalue; beyond
    twice that it diverges."""
    additional_lola_term: Annotated[bool, where("variant", "lola", "pola")] = True
    """Whether leaders of lola and pola also count what the followers' present step will change;
    sos and psos always do."""
    opponent_step_factor: Annotated[float, where("variant", "lola", "pola", "sos", "psos")] = Field(
        default=1.0, ge=0
    )
    """Step that leaders of lola, pola, sos and psos foresee a follower to take along its gradient,
    as a multiple of its learning rate. Larger shapes more; Adam's steps are often far longer than
    the learning rate times the gradient."""
    sos_scaling_factor: Annotated[float, where("variant", "sos", "psos")] = Field(
        default=0.5, gt=0, lt=1
    )
    """Most that shaping may take back of the direction without it, as a share. Larger shapes
    more."""
    sos_threshold_factor: Annotated[float, where("variant", "sos", "psos")] = Field(
        default=0.1, gt=0, lt=1
    )
    """Norm of the gradient below which shaping fades. Larger fades earlier."""


def update_rule(parameters: SpgParameters, lrs: Sequence[float]) -> UpdateRule:
    """The algorithm that was asked for, with the learning rates of all agents' policies."""
    return UpdateRule(
        variant=VARIANTS[parameters.variant],
        step_sizes=tuple(parameters.opponent_step_factor * lr for lr in lrs),
        inverse=InverseMethod(
            variant=parameters.ihvp_variant,
            num_iterations=parameters.ihvp_num_iterations,
            rank=parameters.ihvp_rank,
            rho=parameters.ihvp_rho,
            step_size=parameters.ihvp_step_size,
        ),
        is_lookahead_used=parameters.additional_lola_term,
        sos_scaling_factor=parameters.sos_scaling_factor,
        sos_threshold_factor=parameters.sos_threshold_factor,
    )


def check_sequence(
    sequence: Sequence[Sequence[str]], names: Sequence[str]
) -> Sequence[Sequence[str]]:
    """A sequence of groups that holds each agent once.

    Raises
    ------
    ConfigurationError
        If it does not.
    """
    if sorted(name for group in sequence for name in group) != sorted(names):
        raise ConfigurationError(
            f"stackelberg_sequence is {[list(group) for group in sequence]}, which does not hold "
            f"each agent of the protocol once; those are {', '.join(names)}. Name them all, "
            "leaders first, or leave it out for the protocol's own order."
        )
    return sequence


def policy_weights(agent: Agent) -> list[nn.Parameter]:
    """The weights of an agent's policy that learning moves; none of a random agent."""
    if agent.is_random:
        return []
    return [
        weight
        for part in parts_of(agent)
        if part.name.startswith("actor") and part.lr_factor > 0
        for weight in part.parameters
        if weight.requires_grad
    ]
