"""Directions of agents that anticipate each other equal closed forms on solved games."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.stackelberg import VARIANTS, compute_sos_update
from tests.rl_objectives.games import DOUBLE, EXACT, Method, random_tensor, scalar, updates_of

METHODS = [
    EXACT,
    {"ihvp_variant": "nystrom", "ihvp_rank": 50, "ihvp_rho": 1e-6},
    {"ihvp_variant": "neumann", "ihvp_num_iterations": 400, "ihvp_rho": 0.0, "ihvp_step_size": 0.2},
]


class QuadraticGame(NamedTuple):
    """Losses `theta' Q_i theta / 2 + c_i' theta`, all theta, and Q_i, c_i, of all agents."""

    losses: list[torch.Tensor]
    theta: list[torch.Tensor]
    matrices: list[torch.Tensor]
    pulls: list[torch.Tensor]


def quadratic_game(num_agents: int = 2, size: int = 3) -> QuadraticGame:
    agents, total = range(num_agents), num_agents * size
    theta = [random_tensor(size, seed=10 + i).requires_grad_() for i in agents]
    drawn = [random_tensor(total, total, seed=20 + i) for i in agents]
    matrices = [(m + m.T) / 4 + 4 * torch.eye(total, dtype=DOUBLE) for m in drawn]
    pulls = [random_tensor(total, seed=30 + i) for i in agents]
    return QuadraticGame(losses_of(theta, matrices, pulls), theta, matrices, pulls)


def losses_of(
    theta: list[torch.Tensor], matrices: list[torch.Tensor], pulls: list[torch.Tensor]
) -> list[torch.Tensor]:
    joint = torch.cat(theta)
    return [joint @ q @ joint / 2 + c @ joint for q, c in zip(matrices, pulls, strict=True)]


def block(matrix: torch.Tensor, i: int, j: int, size: int = 3) -> torch.Tensor:
    return matrix[i * size : (i + 1) * size, j * size : (j + 1) * size]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["ihvp_variant"])
@pytest.mark.parametrize("name", ["spg", "pspg"])
def test_the_stackelberg_gradient_of_a_quadratic_game_by_hand(name: str, method: Method) -> None:
    losses, theta, (q0, q1), (c0, c1) = quadratic_game()
    joint = torch.cat(theta).detach()
    own, by_follower = (q0 @ joint + c0).split(3)
    multiplier = torch.linalg.solve(block(q1, 1, 1), by_follower)
    leader, follower = updates_of(losses, theta, name, inverse=method)
    shaping = block(q1, 1, 0).T @ multiplier
    torch.testing.assert_close(leader.update[0], own - shaping, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(leader.shaping_P, shaping, rtol=1e-5, atol=1e-6)
    assert shaping.norm() > 0.1  # the term is present
    torch.testing.assert_close(follower.update[0], (q1 @ joint + c1)[3:])


@pytest.mark.parametrize(
    ("name", "is_used", "lookahead"),
    [("lola", True, 1), ("lola", False, 0), ("pola", True, 1), ("pola", False, 0)],
)
def test_lola_of_a_quadratic_game_by_hand(name: str, is_used: bool, lookahead: int) -> None:
    losses, theta, (q0, q1), (c0, c1) = quadratic_game()
    joint = torch.cat(theta).detach()
    own, by_follower = (q0 @ joint + c0).split(3)
    step = 0.03 * (q1 @ joint + c1)[3:]
    expected = own - 0.03 * block(q1, 1, 0).T @ by_follower - lookahead * block(q0, 1, 0).T @ step
    leader, follower = updates_of(
        losses, theta, name, step_sizes=(7.0, 0.03), is_lookahead_used=is_used
    )
    torch.testing.assert_close(leader.update[0], expected)
    torch.testing.assert_close(follower.update[0], step / 0.03)


def test_the_lola_direction_is_the_derivative_of_the_loss_after_the_followers_step() -> None:
    """To first order in the step, for any losses; three agents in three groups."""
    x, y, z = (random_tensor(2, seed=seed).requires_grad_() for seed in range(3))
    first = torch.sin(x @ y) + (x * z).sum().cos() + (y * z.tanh()).sum()
    second = (x * y * z).sum().sin() + (y**2).sum()
    third = (x.exp() * z).sum() * (y @ z) + (z**4).sum()
    leader, middle, last = updates_of(
        [first, second, third], [x, y, z], "lola", ((0,), (1,), (2,)), step_size=0.05
    )

    def slope(loss: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, by, create_graph=True)[0]

    direction_z = slope(third, z)
    middle_loss = second - 0.05 * direction_z @ slope(second, z)
    direction_y = slope(middle_loss, y)
    leader_loss = (
        first - 0.05 * direction_y @ slope(first, y) - 0.05 * direction_z @ slope(first, z)
    )
    torch.testing.assert_close(last.update[0], direction_z)
    torch.testing.assert_close(middle.update[0], direction_y)
    torch.testing.assert_close(leader.update[0], slope(leader_loss, x))


def chain_game(positions: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each agent except the first responds to earlier agents by `q_k`, whatever later agents do.

    If all later agents respond, `e_j = 0`, agent k's loss is `u_k e_k**2 / 2`; elsewhere, and in
    its derivatives by the later agents, it is not.
    """
    first = positions[0]
    losses = [torch.sin(first) * sum(p**2 for p in positions) + sum(positions[1:]).exp()]
    errors = [p - answer(positions[:k]) for k, p in enumerate(positions)]
    for k in range(1, len(positions)):
        earlier = sum(positions[:k])
        loss = (1.5 + torch.cos(earlier)) * errors[k] ** 2 / 2
        for j in range(k + 1, len(positions)):
            loss = loss + (0.3 * j + positions[k] * earlier + errors[k]).sin() * errors[j]
            loss = loss + 0.2 * earlier * errors[j] ** 2
        losses.append(loss)
    return losses


def answer(earlier: list[torch.Tensor]) -> torch.Tensor:
    if not earlier:
        return torch.zeros((), dtype=DOUBLE)
    return 0.4 * torch.sin(sum(earlier)) + 0.3 * earlier[0] * earlier[-1]


@pytest.mark.parametrize("num_agents", [2, 3, 4])
def test_the_leader_of_a_sequence_foresees_every_later_agent(num_agents: int) -> None:
    """If all others play their responses, its direction is the slope of its loss on that curve."""
    start = scalar(0.7)
    curve = [start]
    for _ in range(1, num_agents):
        curve.append(answer(curve))
    (expected,) = torch.autograd.grad(chain_game(curve)[0], start)
    positions = [point.detach().requires_grad_() for point in curve]
    groups = [(agent,) for agent in range(num_agents)]
    method = {**EXACT, "ihvp_num_iterations": num_agents}
    updates = updates_of(chain_game(positions), positions, "spg", groups, inverse=method)
    torch.testing.assert_close(updates[0].update[0], expected)
    for update in updates[1:]:
        assert update.update[0].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["ihvp_variant"])
def test_followers_of_one_group_answer_each_other(method: Method) -> None:
    """Their joint Jacobian is not symmetric, and contains more than their own Hessians."""
    losses, theta, (q0, q1, q2), (c0, _, _) = quadratic_game(3)
    joint = torch.cat(theta).detach()
    slopes = q0 @ joint + c0
    jacobian = torch.cat([q1[3:6], q2[6:9]])  # of both followers' gradients, by all parameters
    expected = slopes[:3] - jacobian[:, :3].T @ torch.linalg.solve(jacobian[:, 3:].T, slopes[3:])
    method = {**method, "ihvp_num_iterations": 400}
    leader = updates_of(losses, theta, "spg", ((0,), (1, 2)), inverse=method)[0]
    torch.testing.assert_close(leader.update[0], expected, rtol=1e-5, atol=1e-6)


def test_leaders_of_one_group_do_not_foresee_each_other() -> None:
    losses, theta, *_ = quadratic_game(3)
    together = updates_of(losses, theta, "spg", ((0, 1), (2,)))
    # As if agent 1 did not learn.
    alone = updates_of(losses, [theta[0], [], theta[2]], "spg", ((0,), (1,), (2,)))
    torch.testing.assert_close(together[0].update[0], alone[0].update[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_an_agent_that_does_not_learn_is_not_foreseen_to(name: str) -> None:
    losses, theta, *_ = quadratic_game(3)
    frozen = updates_of(losses, [theta[0], [], theta[2]], name, ((0,), (1,), (2,)))
    without = updates_of([losses[0], losses[2]], [theta[0], theta[2]], name)
    assert frozen[1].update == ()
    torch.testing.assert_close(frozen[0].update, without[0].update)
    torch.testing.assert_close(frozen[2].update, without[1].update)
    only = updates_of(losses[:2], [theta[0], []], name)
    torch.testing.assert_close(only[0].update[0], only[0].gradient_P)
    nobody = updates_of(losses[:2], [[], []], name)
    assert [update.update for update in nobody] == [(), ()]


@pytest.mark.parametrize("name", VARIANTS)
def test_how_parameters_are_cut_into_tensors_makes_no_difference(name: str) -> None:
    losses, theta, matrices, pulls = quadratic_game()
    whole = updates_of(losses, theta, name)
    pieces = [[part.detach().clone().requires_grad_() for part in own.split(2)] for own in theta]
    again = losses_of([part for own in pieces for part in own], matrices, pulls)
    cut = updates_of(again, pieces, name)
    for first, second in zip(whole, cut, strict=True):
        assert [part.shape for part in second.update] == [(2,), (1,)]
        torch.testing.assert_close(torch.cat(second.update), first.update[0])


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_left_behind(name: str) -> None:
    """Gradients, parameters and graphs stay unchanged, and losses can be reused."""
    losses, theta, *_ = quadratic_game()
    before = [own.detach().clone() for own in theta]
    first = updates_of(losses, theta, name)
    second = updates_of(losses, theta, name)
    for own, old, one, other in zip(theta, before, first, second, strict=True):
        assert own.grad is None
        assert torch.equal(own, old)
        assert torch.equal(one.update[0], other.update[0])
        assert not any(part.requires_grad for part in (*one.update, *one[1:]))


def test_a_wrong_sequence_and_a_tensor_of_two_agents_are_refused() -> None:
    losses, (x, y), *_ = quadratic_game()
    for groups in (((0,),), ((0,), (0, 1)), ((0,), (2,))):
        with pytest.raises(ConfigurationError, match="each of the agents 0 to 1"):
            updates_of(losses, [x, y], "spg", groups)
    with pytest.raises(ConfigurationError, match="of two agents"):
        updates_of(losses, [x, x], "lola")


@pytest.mark.parametrize(
    ("gradient", "lookahead", "shaping", "expected", "share"),
    [
        # agrees with lookahead, or orthogonal to it: used in full
        ([3.0, 4.0], [1.0, 0.0], [-2.0, 5.0], [3.0, -5.0], 1.0),
        ([3.0, 4.0], [1.0, 0.0], [0.0, 7.0], [1.0, -7.0], 1.0),
        # opposed to it: <-chi, xi_0> = -8 and |xi_0|**2 = 4, so p1 = 0.5 * 4 / 8
        ([3.0, 4.0], [2.0, 0.0], [4.0, 4.0], [1.0, -1.0], 0.25),
        # near a fixed point of the gradient it vanishes with the square of the norm
        ([0.03, 0.04], [1.0, 0.0], [-1.0, 0.0], [1.0025, 0.0], 0.0025),
        ([0.0, 0.0999], [1.0, 0.0], [-1.0, 0.0], [1.0 + 0.0999**2, 0.0], 0.0999**2),
        ([0.0, 0.1001], [1.0, 0.0], [-1.0, 0.0], [2.0, 0.0], 1.0),
        # the smaller of the two shares counts
        ([0.09, 0.0], [2.0, 0.0], [4.0, 0.0], [2.0 - 4 * 0.0081, 0.0], 0.0081),
        ([0.09, 0.0], [0.01, 0.0], [4.0, 0.0], [0.005, 0.0], 0.00125),
    ],
)
def test_how_much_of_the_shaping_is_used_by_hand(
    gradient: list[float],
    lookahead: list[float],
    shaping: list[float],
    expected: list[float],
    share: float,
) -> None:
    tensors = torch.tensor([gradient, lookahead, shaping], dtype=DOUBLE)
    update, found_share = compute_sos_update(*tensors, scaling_factor=0.5, threshold_factor=0.1)
    assert found_share.item() == pytest.approx(share)
    assert update.tolist() == pytest.approx(expected)


def test_in_a_sequence_each_agent_has_its_own_share() -> None:
    x, y = scalar(0.3), scalar(-0.4)
    losses = [(x + y) ** 2 - 2 * x, (x + y) ** 2 - 2 * y]
    leader, follower = updates_of(losses, [x, y], "sos")
    # No agent foresees the follower.
    assert follower.update[0].item() == pytest.approx(2 * (0.3 - 0.4) - 2)
    assert follower.share.item() == 1.0
    xi = 2 * -0.1 - 2
    xi_0 = xi - 0.1 * 2 * xi
    chi = 0.1 * 2 * (2 * -0.1)
    assert -chi * xi_0 < 0
    share = min(1.0, 0.5 * xi_0**2 / (chi * xi_0))
    assert leader.share.item() == pytest.approx(share)
    assert leader.update[0].item() == pytest.approx(xi_0 - share * chi)
    assert math.isclose(leader.shaping_P.item(), chi)
