"""Stable opponent shaping: how much of the shaping term an agent may use and still converge.

Shape suffix: `P` entry of the parameters laid end to end, of one agent or of all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
