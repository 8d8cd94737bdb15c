"""The algorithms of the Stackelberg family and their settings, see `stackelberg`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nip_astra.rl_objectives.ihvp import InverseMethod

StackelbergVariantName = Literal["spg", "pspg", "lola", "pola", "sos", "psos"]
"""Names of `VARIANTS`."""


@dataclass(frozen=True, kw_only=True)
class StackelbergVariant:
    """What one algorithm of the family does.

    Attributes
    ----------
    multiplier : {"inverse_jacobian", "step"}
        Whether followers are taken to be at rest and to stay so, or to take one step.
    lookahead : {"never", "optional", "always"}
        Whether the lookahead term is part of the direction.
    is_stable : bool
        Whether the shaping term is scaled down as in stable opponent shaping.
    is_clipped : bool
        Whether the losses that it is meant for are PPO's clipped ones.
    """

    multiplier: Literal["inverse_jacobian", "step"]
    lookahead: Literal["never", "optional", "always"]
    is_stable: bool
    is_clipped: bool


VARIANTS: dict[StackelbergVariantName, StackelbergVariant] = {
    "spg": StackelbergVariant(
        multiplier="inverse_jacobian", lookahead="never", is_stable=False, is_clipped=False
    ),
    "pspg": StackelbergVariant(
        multiplier="inverse_jacobian", lookahead="never", is_stable=False, is_clipped=True
    ),
    "lola": StackelbergVariant(
        multiplier="step", lookahead="optional", is_stable=False, is_clipped=False
    ),
    "pola": StackelbergVariant(
        multiplier="step", lookahead="optional", is_stable=False, is_clipped=True
    ),
    "sos": StackelbergVariant(
        multiplier="step", lookahead="always", is_stable=True, is_clipped=False
    ),
    "psos": StackelbergVariant(
        multiplier="step", lookahead="always", is_stable=True, is_clipped=True
    ),
}
"""Stackelberg policy gradient, learning with opponent-learning awareness, stable opponent shaping,
and the same three with PPO's clipped losses."""


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """A variant and its settings.

    Attributes
    ----------
    variant : StackelbergVariant
        Which algorithm.
    step_sizes : tuple of float
        `eta` of each agent: the learning rate of the step that others foresee it to take. Larger
        shapes more. Not read where followers are taken to be at rest.
    inverse : InverseMethod
        Approximation of the inverse, for the variants that need one.
    is_lookahead_used : bool
        Whether the lookahead term is used where the variant leaves that open.
    sos_scaling_factor, sos_threshold_factor : float
        `a` and `b` of `compute_sos_update`.
    """

    variant: StackelbergVariant
    step_sizes: tuple[float, ...]
    inverse: InverseMethod
    is_lookahead_used: bool
    sos_scaling_factor: float
    sos_threshold_factor: float

    @property
    def has_lookahead(self) -> bool:
        if self.variant.lookahead == "optional":
            return self.is_lookahead_used
        return self.variant.lookahead == "always"
