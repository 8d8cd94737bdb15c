"""Stable opponent shaping scales by hand-worked shares, and converges where LOLA does not."""

from __future__ import annotations

import math

import pytest
import torch

from nip_astra.rl_objectives.sos import SosUpdate, compute_sos_update
from tests.rl_objectives.games import DOUBLE, random_tensor, scalar, updates_of


def sos(gradient: list[float], lookahead: list[float], shaping: list[float]) -> SosUpdate:
    tensors = [torch.tensor(part, dtype=DOUBLE) for part in (gradient, lookahead, shaping)]
    return compute_sos_update(*tensors, scaling_factor=0.5, threshold_factor=0.1)


def test_shaping_that_agrees_with_lookahead_is_used_whole() -> None:
    update, share = sos([3.0, 4.0], [1.0, 0.0], [-2.0, 5.0])
    assert share.item() == 1.0
    assert update.tolist() == [3.0, -5.0]


def test_shaping_at_a_right_angle_to_lookahead_is_used_whole() -> None:
    assert sos([3.0, 4.0], [1.0, 0.0], [0.0, 7.0]).share.item() == 1.0


def test_shaping_against_lookahead_is_scaled_by_hand() -> None:
    # <-chi, xi_0> = -8 and |xi_0|**2 = 4, so that p1 = 0.5 * 4 / 8.
    update, share = sos([3.0, 4.0], [2.0, 0.0], [4.0, 4.0])
    assert share.item() == pytest.approx(0.25)
    assert update.tolist() == pytest.approx([1.0, -1.0])


def test_little_shaping_against_lookahead_is_used_whole() -> None:
    # p1 = min(1, 0.5 * 4 / 1)
    assert sos([3.0, 4.0], [2.0, 0.0], [0.5, 0.0]).share.item() == 1.0


@pytest.mark.parametrize(("norm", "share"), [(0.05, 0.0025), (0.0999, 0.0999**2), (0.1001, 1.0)])
def test_near_a_fixed_point_of_the_gradient_shaping_vanishes(norm: float, share: float) -> None:
    gradient = [0.6 * norm, 0.8 * norm]
    assert sos(gradient, [1.0, 0.0], [-1.0, 0.0]).share.item() == pytest.approx(share)


def test_the_smaller_share_counts() -> None:
    assert sos([0.09, 0.0], [2.0, 0.0], [4.0, 0.0]).share.item() == pytest.approx(0.0081)
    assert sos([0.09, 0.0], [0.01, 0.0], [4.0, 0.0]).share.item() == pytest.approx(0.00125)


def test_zeros_give_zero() -> None:
    update, share = sos([0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    assert update.tolist() == [0.0, 0.0]
    assert share.item() == 0.0


def test_the_update_never_leaves_the_half_space_of_lookahead() -> None:
    for seed in range(50):
        xi, xi_0, chi = random_tensor(3, 4, seed=seed).unbind()
        update, _ = compute_sos_update(xi, xi_0, 10 * chi, scaling_factor=0.5, threshold_factor=0.1)
        assert update @ xi_0 >= 0.5 * (xi_0 @ xi_0) - 1e-12


def tandem(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    return [(x + y) ** 2 - 2 * x, (x + y) ** 2 - 2 * y]


def play_tandem(name: str, groups: object = None) -> float:
    """The sum of both players' positions after learning with a rate and step size of 0.1."""
    x, y = scalar(0.3), scalar(-0.4)
    for _ in range(300):
        updates = updates_of(tandem(x, y), [x, y], name, groups)
        with torch.no_grad():
            for position, update in zip((x, y), updates, strict=True):
                position -= 0.1 * update.update[0]
    return x.item() + y.item()


def test_only_sos_converges_to_the_fixed_points_of_the_tandem_game() -> None:
    """They are `x + y = 1` (arXiv:1811.08469, section 4.2)."""
    assert play_tandem("sos") == pytest.approx(1.0, abs=1e-3)
    # LOLA's direction, 2 (s - 1) - 0.1 * 2 * 2 s - 0.1 * 2 * 2 (s - 1), is zero at s = 4 / 3.
    assert play_tandem("lola") == pytest.approx(4 / 3)


def test_a_follower_that_is_not_foreseen_learns_by_its_own_gradient() -> None:
    x, y = scalar(0.3), scalar(-0.4)
    update = updates_of(tandem(x, y), [x, y], "sos", ((0,), (1,)))[1]
    assert update.update[0].item() == pytest.approx(2 * (0.3 - 0.4) - 2)
    assert update.share.item() == 1.0


def test_in_a_sequence_each_agent_has_its_own_share() -> None:
    x, y = scalar(0.3), scalar(-0.4)
    leader, _ = updates_of(tandem(x, y), [x, y], "sos", ((0,), (1,)))
    xi = 2 * -0.1 - 2
    xi_0 = xi - 0.1 * 2 * xi
    chi = 0.1 * 2 * (2 * -0.1)
    assert -chi * xi_0 < 0
    share = min(1.0, 0.5 * xi_0**2 / (chi * xi_0))
    assert leader.share.item() == pytest.approx(share)
    assert leader.update[0].item() == pytest.approx(xi_0 - share * chi)
    assert math.isclose(leader.shaping_P.item(), chi)
