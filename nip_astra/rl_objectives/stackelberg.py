"""Learning directions of agents that anticipate how other agents learn from them.

N agents have losses `L_i(theta_1, ..., theta_N)`. They form a sequence of groups, leaders
first. Each agent anticipates the response of its *followers*, the agents of all later groups,
but not that of its own group. For an agent `l` with followers F, `d_f` the derivative by
`theta_f`, `D_F` the followers' own directions side by side and `'` a transpose:

    xi  = d_l L_l                                    its own gradient
    chi = (d_l D_F)' m                               the *shaping* term
    h   = (d_l d_F L_l)' (eta_F D_F)                 the *lookahead* term

    spg, pspg          m = (d_F D_F)'^-1 d_F L_l     D_l = xi - chi
    lola, pola         m = eta_F d_F L_l             D_l = xi - chi [- h]
    sos, psos          m = eta_F d_F L_l             D_l = (xi - h) - p chi

Parameters move against `D_l`. The Stackelberg gradient (arXiv:1906.01217, eq. 4) is the total
derivative of `L_l` where followers are at rest, `D_F = 0`, and stay so. LOLA's (arXiv:1709.04326,
arXiv:1811.08469, section 2) is the derivative of `L_l(theta_l, theta_F - eta_F D_F)`, to the first
order in that step. For the share `p` see `compute_sos_update`. The clipped variants pspg, pola and
psos differ in the losses alone, see `spg`.

The multiplier `m` needs the leader's whole loss as a function of the followers' parameters. `D_f`
is the whole direction of a follower, its own shaping of others included, so that a sequence of
three groups differentiates three times: each further group multiplies the time by the number of
products that an inverse takes. The inverse of several followers is that of their joint Jacobian.
Nobody foresees an agent without parameters to learn.

Shape suffixes: `P` entry of one agent's parameters laid end to end, `Q` of its followers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import PlainText, SubParameters
from nip_astra.rl_objectives.ihvp import (
    Inverse,
    LinearOperator,
    VectorMap,
    conjugate_gradient,
    gradient,
    jacobian_operator,
    neumann,
    nystrom,
    unflatten,
    vector_jacobian,
)

StackelbergVariantName = Literal["spg", "pspg", "lola", "pola", "sos", "psos"]
"""Names of `VARIANTS`."""


class StackelbergVariant(NamedTuple):
    """One algorithm of the family.

    Attributes
    ----------
    multiplier : {"inverse_jacobian", "step"}
        Whether followers are taken to be at rest and to stay so, or to take one step.
    is_stable : bool
        Whether there is a lookahead term, and the shaping term is scaled down.
    is_clipped : bool
        Whether its losses are PPO's clipped losses.
    """

    multiplier: Literal["inverse_jacobian", "step"]
    is_stable: bool = False
    is_clipped: bool = False


VARIANTS: dict[StackelbergVariantName, StackelbergVariant] = {
    "spg": StackelbergVariant("inverse_jacobian"),
    "pspg": StackelbergVariant("inverse_jacobian", is_clipped=True),
    "lola": StackelbergVariant("step"),
    "pola": StackelbergVariant("step", is_clipped=True),
    "sos": StackelbergVariant("step", is_stable=True),
    "psos": StackelbergVariant("step", is_stable=True, is_clipped=True),
}
"""Stackelberg policy gradient, learning with opponent-learning awareness, stable opponent shaping,
and the same three with PPO's clipped losses."""

FORESEES_ANSWERS = where("variant", "spg", "pspg")
"""Condition of the parameters of variants that anticipate a complete response."""


class SpgParameters(SubParameters):
    """Anticipation of how other agents learn."""

    variant: StackelbergVariantName = "spg"
    """What leaders anticipate: that followers will have responded in full (spg), or taken one step
    (lola), or that with stability (sos); with a leading p for PPO's clipped losses."""
    stackelberg_sequence: list[list[PlainText]] | None = None
    """Groups of agents by name, leaders first, each agent once; null takes the protocol's, the
    verifiers before all others."""
    ihvp_variant: Annotated[
        Literal["nystrom", "conjugate_gradient", "neumann"], FORESEES_ANSWERS
    ] = "nystrom"
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
    """Added to the Hessian's diagonal, for nystrom > 0. Larger anticipates smaller responses and is
    safer where the Hessian is nearly singular."""
    ihvp_step_size: Annotated[float, FORESEES_ANSWERS, where("ihvp_variant", "neumann")] = Field(
        default=0.1, gt=0
    )
    """Step of neumann. Larger is more exact, up to 1 over the Hessian's largest eigenvalue; beyond
    twice that it diverges."""
    additional_lola_term: Annotated[bool, where("variant", "lola", "pola")] = True
    """Whether leaders of lola and pola also count the change of their own gradient by the present
    step of the followers; sos and psos always do."""
    opponent_step_factor: Annotated[float, where("variant", "lola", "pola", "sos", "psos")] = Field(
        default=1.0, ge=0
    )
    """Step that leaders of lola, pola, sos and psos expect a follower to take along its gradient,
    as a multiple of its learning rate. Larger shapes more; Adam's steps are often far longer than
    the learning rate times the gradient."""
    sos_scaling_factor: Annotated[float, where("variant", "sos", "psos")] = Field(
        default=0.5, gt=0, lt=1
    )
    """Largest share of the direction without shaping that shaping may take back. Larger shapes
    more."""
    sos_threshold_factor: Annotated[float, where("variant", "sos", "psos")] = Field(
        default=0.1, gt=0, lt=1
    )
    """Norm of the gradient below which shaping fades. Larger fades earlier."""

    @model_validator(mode="after")
    def _has_damping(self) -> Self:
        if self.inverts and self.ihvp_variant == "nystrom" and self.ihvp_rho == 0:
            raise ValueError("ihvp_rho must be above 0 for nystrom, which divides by it")
        return self

    @property
    def inverts(self) -> bool:
        """Whether the multiplier needs the inverse of the followers' Jacobian."""
        return VARIANTS[self.variant].multiplier == "inverse_jacobian"

    @property
    def has_lookahead(self) -> bool:
        """Whether the lookahead term is part of the direction."""
        is_optional = self.variant in ("lola", "pola") and self.additional_lola_term
        return VARIANTS[self.variant].is_stable or is_optional

    def inverse_of(
        self, operator: LinearOperator, generator: torch.Generator | None = None
    ) -> Inverse:
        """Return the inverse of a matrix; the generator draws the columns of Nystrom's method."""
        rho, num_iterations = self.ihvp_rho, self.ihvp_num_iterations
        if self.ihvp_variant == "nystrom":
            return nystrom(operator, rank=self.ihvp_rank, rho=rho, generator=generator)
        if self.ihvp_variant == "conjugate_gradient":
            return conjugate_gradient(operator, num_iterations=num_iterations, rho=rho)
        step_size = self.ihvp_step_size
        return neumann(operator, num_iterations=num_iterations, step_size=step_size, rho=rho)


class AgentUpdate(NamedTuple):
    """The update of one agent, without gradient.

    Attributes
    ----------
    update : tuple of Tensor
        `D_l` in the shapes of its parameters, to be subtracted times a learning rate.
    gradient_P, shaping_P, lookahead_P : Tensor
        `xi`, `chi` and `h`, the last two with step sizes; 0 where there is no such term.
    share : Tensor
        Scalar: `p` of the shaping term in the update.
    """

    update: tuple[Tensor, ...]
    gradient_P: Tensor
    shaping_P: Tensor
    lookahead_P: Tensor
    share: Tensor


class _Response(NamedTuple):
    """The followers' learning as their leaders anticipate it: `D_F` with its graph, and `eta_F`."""

    parameters: list[Tensor]
    direction_Q: Tensor
    step_sizes_Q: Tensor
    inverse: Inverse | None


def agent_updates(
    losses: Sequence[Tensor],
    parameters: Sequence[Sequence[Tensor]],
    *,
    rule: SpgParameters,
    step_sizes: Sequence[float],
    groups: Sequence[Sequence[int]],
    generator: torch.Generator | None = None,
) -> tuple[AgentUpdate, ...]:
    """Compute each agent's direction; the module docstring has the formulas.

    Parameters
    ----------
    losses : Sequence of Tensor
        `L_i`, scalars with their graphs, which are kept; to be minimised. With n groups their
        derivatives up to the n-th must be right: those of a plain policy loss on samples are not,
        see `spg.shaping_losses`.
    parameters : Sequence of Sequence of Tensor
        The parameters that each agent learns, if any. No tensor belongs to two agents.
    step_sizes : Sequence of float
        `eta` of each agent: the learning rate of the step that others expect it to take. Larger
        shapes more. Not read where followers are taken to be at rest.
    groups : Sequence of Sequence of int
        Agents by index, leaders first, each once.
    generator : torch.Generator, optional
        Draws the columns of Nystrom's method.

    Raises
    ------
    ConfigurationError
        For groups that do not hold each agent once, or a tensor of two agents.
    """
    if sorted(agent for group in groups for agent in group) != [*range(len(losses))]:
        raise ConfigurationError(
            f"the groups {[list(group) for group in groups]} must hold each of the agents 0 to "
            f"{len(losses) - 1} once."
        )
    tensors = [id(tensor) for agent_tensors in parameters for tensor in agent_tensors]
    if len(set(tensors)) != len(tensors):
        raise ConfigurationError(
            "a tensor is a parameter of two agents. Give each agent weights of its own."
        )
    directions: dict[int, Tensor] = {}
    updates: dict[int, AgentUpdate] = {}
    for depth in reversed(range(len(groups))):
        followers = [agent for group in groups[depth + 1 :] for agent in group if parameters[agent]]
        response = None
        if followers:
            sizes = [torch.full_like(directions[f], step_sizes[f]) for f in followers]
            theirs = [tensor for agent in followers for tensor in parameters[agent]]
            direction_Q = torch.cat([directions[agent] for agent in followers])
            inverse = None
            if rule.inverts:
                # The Jacobian of one follower's gradient is a Hessian; that of several is not
                # symmetric.
                is_symmetric = len(followers) == 1
                jacobian = jacobian_operator(direction_Q, theirs, is_symmetric=is_symmetric)
                inverse = rule.inverse_of(jacobian.transposed(), generator)
            response = _Response(theirs, direction_Q, torch.cat(sizes).detach(), inverse)
        for agent in groups[depth]:
            weights = parameters[agent]
            xi_P, chi_P, h_P = _terms(losses[agent], weights, response, rule, depth)
            update_P, share = xi_P - h_P, xi_P.new_ones(())
            if VARIANTS[rule.variant].is_stable:
                update_P, share = compute_sos_update(
                    *(xi_P, update_P, chi_P),
                    scaling_factor=rule.sos_scaling_factor,
                    threshold_factor=rule.sos_threshold_factor,
                )
            else:
                update_P = update_P - chi_P
            directions[agent] = update_P
            update = unflatten(update_P.detach(), weights)
            updates[agent] = AgentUpdate(update, xi_P.detach(), chi_P.detach(), h_P.detach(), share)
    return tuple(updates[agent] for agent in range(len(losses)))


def _terms(
    loss: Tensor,
    weights: Sequence[Tensor],
    response: _Response | None,
    rule: SpgParameters,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return an agent's `xi`, `chi` and `h`, with graphs if `depth` levels of leaders need them."""
    is_again = depth > 0
    if response is None or not weights:
        gradient_P = gradient(loss, weights, create_graph=is_again)
        return gradient_P, torch.zeros_like(gradient_P), torch.zeros_like(gradient_P)
    joint = gradient(
        loss, [*weights, *response.parameters], create_graph=is_again or rule.has_lookahead
    )
    num_followers = response.direction_Q.numel()
    gradient_P, by_followers_Q = torch.split(joint, [joint.numel() - num_followers, num_followers])
    if response.inverse is None:
        multiplier_Q = response.step_sizes_Q * by_followers_Q
    else:
        multiplier_Q = _rest_multiplier(
            by_followers_Q, response, response.inverse, rule.ihvp_rho, depth
        )
    shaping_P = vector_jacobian(response.direction_Q, weights, multiplier_Q, create_graph=is_again)
    lookahead_P = torch.zeros_like(shaping_P)
    if rule.has_lookahead:
        step_Q = response.step_sizes_Q * response.direction_Q
        lookahead_P = vector_jacobian(by_followers_Q, weights, step_Q, create_graph=is_again)
    return gradient_P, shaping_P, lookahead_P


def _rest_multiplier(
    by_followers_Q: Tensor, response: _Response, inverse: Inverse, rho: float, depth: int
) -> Tensor:
    """Return `m` with `((d_F D_F)' + rho I) m = d_F L_l`, differentiable `depth` times.

    The inverse itself has no graph. Adding to `m` the inverse of the residual of the equation,
    whose value is taken for 0, changes no value and makes one more derivative of `m` right each
    time, as a step of Newton's method would.
    """
    multiplier_Q = inverse.solve(by_followers_Q.detach())
    for _ in range(depth):
        product_Q = vector_jacobian(
            response.direction_Q, response.parameters, multiplier_Q, create_graph=True
        )
        residual_Q = by_followers_Q - product_Q - rho * multiplier_Q
        multiplier_Q = multiplier_Q + _linear_map(residual_Q - residual_Q.detach(), *inverse)
    return multiplier_Q


class _LinearMap(torch.autograd.Function):
    """A constant linear map given by its products and those of its transpose."""

    @staticmethod
    def forward(ctx: Any, vector_Q: Tensor, apply: VectorMap, transposed: VectorMap) -> Tensor:
        ctx.maps = (apply, transposed)
        with torch.enable_grad():
            return apply(vector_Q.detach())

    @staticmethod
    def backward(ctx: Any, *gradients_Q: Tensor) -> tuple[Tensor, None, None]:
        apply, transposed = ctx.maps
        return _linear_map(gradients_Q[0], transposed, apply), None, None


def _linear_map(vector_Q: Tensor, apply: VectorMap, transposed: VectorMap) -> Tensor:
    product_Q: Tensor = _LinearMap.apply(vector_Q, apply, transposed)  # type: ignore[no-untyped-call]
    return product_Q


class SosUpdate(NamedTuple):
    """A direction to step against, and the share of the shaping term in it.

    The share is a scalar in [0, 1]: 0 gives LookAhead, 1 gives LOLA.
    """

    update_P: Tensor
    share: Tensor


def compute_sos_update(
    gradient_P: Tensor,
    lookahead_P: Tensor,
    shaping_P: Tensor,
    *,
    scaling_factor: float,
    threshold_factor: float,
) -> SosUpdate:
    """Compute `xi_0 - p chi`, `p` by stable opponent shaping (arXiv:1811.08469, alg. 1).

    With `xi` the gradient, `xi_0` that of LookAhead, and `chi` the shaping term, which holds the
    opponents' learning rate already:

        p1 = 1                                        where <-chi, xi_0> >= 0
             min(1, -a |xi_0|**2 / <-chi, xi_0>)      elsewhere
        p2 = |xi|**2  where |xi| < b, else 1
        p  = min(p1, p2)

    `p1` keeps the update within a right angle of LookAhead's, which avoids strict saddles; `p2`
    makes the shaping vanish near a fixed point of the gradient, to which agents then converge. No
    gradient flows through the share.

    Parameters
    ----------
    scaling_factor : float
        `a` in (0, 1). Larger shapes more: `<update, xi_0> >= (1 - a) |xi_0|**2`.
    threshold_factor : float
        `b` in (0, 1), in the unit of the gradient's norm. Larger gives up shaping further away
        from a fixed point.
    """
    xi_P, xi_0_P, chi_P = (x.detach() for x in (gradient_P, lookahead_P, shaping_P))
    along = -(chi_P @ xi_0_P)
    bound = torch.where(along < 0, -scaling_factor * (xi_0_P @ xi_0_P) / along, torch.inf)
    square = xi_P @ xi_P
    near = torch.where(square < threshold_factor**2, square, 1.0)
    share = torch.minimum(bound.clamp(max=1.0), near)
    return SosUpdate(lookahead_P - share * shaping_P, share)
