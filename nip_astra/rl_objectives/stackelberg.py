"""Directions in which agents learn who foresee how other agents learn from them.

N agents have losses `L_i(theta_1, ..., theta_N)`. In a *sequence* of groups, leaders first, each
agent foresees the response of its *followers*, the agents of all later groups (agents of one group
do not foresee each other); without a sequence each takes all others for naive learners, as in the
papers on opponent shaping. For an agent `l` with followers F, `d_f` the derivative by `theta_f`,
`D_F` the followers' own directions side by side and `'` a transpose:

    xi  = d_l L_l                                    its own gradient
    chi = (d_l D_F)' m                               the *shaping* term
    h   = (d_l d_F L_l)' (eta_F D_F)                 the *lookahead* term

    spg, pspg          m = (d_F D_F)'^-1 d_F L_l     D_l = xi - chi
    lola, pola         m = eta_F d_F L_l             D_l = xi - chi [- h]
    sos, psos          m = eta_F d_F L_l             D_l = (xi - h) - p chi

Parameters move against `D_l`. The Stackelberg gradient (arXiv:1906.01217, eq. 4) is the total
derivative of `L_l` where followers are at rest, `D_F = 0`, and stay so. LOLA's (arXiv:1709.04326,
arXiv:1811.08469, section 2) is the derivative of `L_l(theta_l, theta_F - eta_F D_F)`, to the first
order in that step. For the share `p` see `compute_sos_update`.

The multiplier `m` needs the leader's whole loss as a function of the followers' parameters. `D_f`
is the whole direction of a follower, its own shaping of others included, so that a sequence of
three groups differentiates three times, and so on: each further group multiplies the time by the
number of products that an inverse takes. Of several followers the inverse is that of their joint
Jacobian. An agent without parameters does not learn, and nobody foresees it to.

The clipped variants pspg, pola and psos differ in the losses alone, see `shaping_losses`.

Shape suffixes: `P` entry of one agent's parameters laid end to end, `Q` of its followers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.derivatives import (
    VectorMap,
    gradient,
    jacobian_operator,
    unflatten,
    vector_jacobian,
)
from nip_astra.rl_objectives.ihvp import Inverse
from nip_astra.rl_objectives.stackelberg_variants import UpdateRule


class AgentUpdate(NamedTuple):
    """How one agent learns, without gradient.

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


@dataclass(frozen=True)
class _Response:
    """How followers learn, as their leaders foresee it.

    Attributes
    ----------
    parameters : list of Tensor
        Those of all followers side by side.
    direction_Q : Tensor
        `D_F`, with its graph.
    step_sizes_Q : Tensor
        `eta_F`, entry by entry.
    inverse : Inverse, optional
        `(d_F D_F)'^-1`, where the variant needs it.
    """

    parameters: list[Tensor]
    direction_Q: Tensor
    step_sizes_Q: Tensor
    inverse: Inverse | None


class _Terms(NamedTuple):
    """`xi`, `chi` and `h` of an agent, with their graphs if others differentiate them."""

    gradient_P: Tensor
    shaping_P: Tensor
    lookahead_P: Tensor


def agent_updates(
    losses: Sequence[Tensor],
    parameters: Sequence[Sequence[Tensor]],
    *,
    rule: UpdateRule,
    groups: Sequence[Sequence[int]] | None,
    generator: torch.Generator | None = None,
) -> tuple[AgentUpdate, ...]:
    """Each agent's direction, see the head of this file for the formulas.

    Parameters
    ----------
    losses : Sequence of Tensor
        `L_i`, scalars with their graphs, which are kept; to be minimised. Their derivatives up to
        the second must be right (with n groups up to the n-th): those of a plain policy loss on
        samples are not, see `shaping_losses`.
    parameters : Sequence of Sequence of Tensor
        What each agent learns; empty for one that does not. No tensor belongs to two agents.
    rule : UpdateRule
        Algorithm and settings.
    groups : Sequence of Sequence of int, optional
        Agents by index, leaders first, each once. None: all take each other for naive learners,
        whose direction is their own gradient; the share of stable opponent shaping is then one for
        all agents together, while in a sequence each agent has its own.
    generator : torch.Generator, optional
        Draws the columns of Nystrom's method.

    Returns
    -------
    tuple of AgentUpdate
        By agent.

    Raises
    ------
    ConfigurationError
        For losses that are no scalars, lists of unequal lengths, groups that do not hold each agent
        once, tensors shared by agents, or a Stackelberg gradient without a sequence.
    """
    _check_game(losses, parameters, rule, groups)
    if groups is None:
        return _mutual_updates(losses, parameters, rule)
    directions: dict[int, Tensor] = {}
    updates: dict[int, AgentUpdate] = {}
    for depth in reversed(range(len(groups))):
        followers = [agent for group in groups[depth + 1 :] for agent in group]
        response = _response(followers, parameters, directions, rule, generator)
        for agent in groups[depth]:
            terms = _terms(losses[agent], parameters[agent], response, rule, depth)
            update_P, share = _combined(terms, rule)
            directions[agent] = update_P
            updates[agent] = _agent_update(terms, update_P, share, parameters[agent])
    return tuple(updates[agent] for agent in range(len(losses)))


def _mutual_updates(
    losses: Sequence[Tensor], parameters: Sequence[Sequence[Tensor]], rule: UpdateRule
) -> tuple[AgentUpdate, ...]:
    agents = range(len(losses))
    naive = {agent: gradient(losses[agent], parameters[agent]) for agent in agents}
    all_terms = []
    for agent in agents:
        others = [other for other in agents if other != agent]
        response = _response(others, parameters, naive, rule, None)
        all_terms.append(_terms(losses[agent], parameters[agent], response, rule, depth=0))
    joint = _Terms(*(torch.cat(parts) for parts in zip(*all_terms, strict=True)))
    update_P, share = _combined(joint, rule)
    parts = torch.split(update_P, [terms.gradient_P.numel() for terms in all_terms])
    return tuple(
        _agent_update(terms, part_P, share, own)
        for terms, part_P, own in zip(all_terms, parts, parameters, strict=True)
    )


def _response(
    followers: Sequence[int],
    parameters: Sequence[Sequence[Tensor]],
    directions: dict[int, Tensor],
    rule: UpdateRule,
    generator: torch.Generator | None,
) -> _Response | None:
    followers = [agent for agent in followers if parameters[agent]]
    if not followers:
        return None
    theirs = [tensor for agent in followers for tensor in parameters[agent]]
    direction_Q = torch.cat([directions[agent] for agent in followers])
    step_sizes_Q = torch.cat(
        [torch.full_like(directions[agent], rule.step_sizes[agent]) for agent in followers]
    ).detach()
    inverse = None
    if rule.variant.multiplier == "inverse_jacobian":
        # The Jacobian of one follower's gradient is a Hessian; that of several is not symmetric.
        jacobian = jacobian_operator(direction_Q, theirs, is_symmetric=len(followers) == 1)
        inverse = rule.inverse.prepare(jacobian.transposed(), generator)
    return _Response(theirs, direction_Q, step_sizes_Q, inverse)


def _terms(
    loss: Tensor,
    own: Sequence[Tensor],
    response: _Response | None,
    rule: UpdateRule,
    depth: int,
) -> _Terms:
    """The terms of an agent that `depth` levels of leaders differentiate."""
    is_again = depth > 0
    if response is None or not own:
        gradient_P = gradient(loss, own, create_graph=is_again)
        return _Terms(gradient_P, torch.zeros_like(gradient_P), torch.zeros_like(gradient_P))
    joint = gradient(
        loss, [*own, *response.parameters], create_graph=is_again or rule.has_lookahead
    )
    num_followers = response.direction_Q.numel()
    gradient_P, by_followers_Q = torch.split(joint, [joint.numel() - num_followers, num_followers])
    if response.inverse is None:
        multiplier_Q = response.step_sizes_Q * by_followers_Q
    else:
        multiplier_Q = _rest_multiplier(by_followers_Q, response, rule.inverse.rho, depth)
    shaping_P = vector_jacobian(response.direction_Q, own, multiplier_Q, create_graph=is_again)
    lookahead_P = torch.zeros_like(shaping_P)
    if rule.has_lookahead:
        step_Q = response.step_sizes_Q * response.direction_Q
        lookahead_P = vector_jacobian(by_followers_Q, own, step_Q, create_graph=is_again)
    return _Terms(gradient_P, shaping_P, lookahead_P)


def _rest_multiplier(by_followers_Q: Tensor, response: _Response, rho: float, depth: int) -> Tensor:
    """`m` with `((d_F D_F)' + rho I) m = d_F L_l`, which may be differentiated `depth` times.

    The inverse itself has no graph. Adding to `m` the inverse of what the equation leaves over, a
    residual whose value is taken for 0, changes no value and makes one more derivative of `m` right
    each time, as a step of Newton's method would.
    """
    assert response.inverse is not None
    solve, solve_transposed = response.inverse
    multiplier_Q = solve(by_followers_Q.detach())
    for _ in range(depth):
        product_Q = vector_jacobian(
            response.direction_Q, response.parameters, multiplier_Q, create_graph=True
        )
        residual_Q = by_followers_Q - product_Q - rho * multiplier_Q
        multiplier_Q = multiplier_Q + _linear_map(
            residual_Q - residual_Q.detach(), solve, solve_transposed
        )
    return multiplier_Q


class _LinearMap(torch.autograd.Function):
    """A linear map known by its products and those of its transpose; itself a constant."""

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


def _combined(terms: _Terms, rule: UpdateRule) -> tuple[Tensor, Tensor]:
    lookahead_P = terms.gradient_P - terms.lookahead_P
    if not rule.variant.is_stable:
        return lookahead_P - terms.shaping_P, lookahead_P.new_ones(())
    return compute_sos_update(
        terms.gradient_P,
        lookahead_P,
        terms.shaping_P,
        scaling_factor=rule.sos_scaling_factor,
        threshold_factor=rule.sos_threshold_factor,
    )


def _agent_update(
    terms: _Terms, update_P: Tensor, share: Tensor, own: Sequence[Tensor]
) -> AgentUpdate:
    xi_P, chi_P, h_P = (term.detach() for term in terms)
    return AgentUpdate(unflatten(update_P.detach(), own), xi_P, chi_P, h_P, share)


def _check_game(
    losses: Sequence[Tensor],
    parameters: Sequence[Sequence[Tensor]],
    rule: UpdateRule,
    groups: Sequence[Sequence[int]] | None,
) -> None:
    num_agents = len(losses)
    faults = []
    if not num_agents == len(parameters) == len(rule.step_sizes):
        faults.append(
            f"there are {num_agents} losses, {len(parameters)} lists of parameters and "
            f"{len(rule.step_sizes)} step sizes, which must be one of each an agent"
        )
    faults += [
        f"the loss of agent {agent} has the shape {list(loss.shape)} and must be a scalar"
        for agent, loss in enumerate(losses)
        if loss.numel() != 1
    ]
    tensors = [id(tensor) for own in parameters for tensor in own]
    if len(set(tensors)) != len(tensors):
        faults.append("a tensor is a parameter of two agents, or twice of one")
    if groups is None and rule.variant.multiplier == "inverse_jacobian":
        faults.append("a Stackelberg gradient needs groups, leaders first")
    if groups is not None and sorted(i for group in groups for i in group) != [*range(num_agents)]:
        faults.append(
            f"the groups {[list(group) for group in groups]} must hold each of the agents "
            f"0 to {num_agents - 1} once"
        )
    if faults:
        raise ConfigurationError(
            f"updates of a game were asked for that cannot be: {'; '.join(faults)}. Change those."
        )


class SosUpdate(NamedTuple):
    """A direction to step against, and the share of the shaping term in it.

    Attributes
    ----------
    update_P : Tensor
        To be subtracted from the parameters, times a learning rate.
    share : Tensor
        Scalar in [0, 1]: 0 gives LookAhead, 1 gives LOLA.
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
    """`xi_0 - p chi` with the share `p` of stable opponent shaping (arXiv:1811.08469, alg. 1).

    With `xi` the gradient, `xi_0` that of LookAhead, and `chi` the shaping term, which holds the
    opponents' learning rate already:

        p1 = 1                                        where <-chi, xi_0> >= 0
             min(1, -a |xi_0|**2 / <-chi, xi_0>)      elsewhere
        p2 = |xi|**2  where |xi| < b, else 1
        p  = min(p1, p2)

    `p1` keeps the update within a right angle of LookAhead's, which avoids strict saddles; `p2`
    makes the shaping vanish near a fixed point of the gradient, to which agents then converge.

    Parameters
    ----------
    gradient_P, lookahead_P, shaping_P : Tensor
        `xi`, `xi_0` and `chi`. No gradient flows through the share.
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
