"""What follows a step, summed: n-step and discounted returns.

Shape suffixes: `E` episode, `H` step of an episode (turn or token).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.masked import masked_fill_zero


def nstep_returns(
    rewards_EH: Tensor,
    mask_EH: Tensor,
    *,
    n: int | None,
    gamma: float,
    values_EH: Tensor | None = None,
) -> Tensor:
    """Discounted sum of the next n rewards, and with values the discounted value after them.

    `G_t = sum_(j<n) gamma**j r_(t+j) + gamma**n V_(t+n)`, without the last term where no values are
    given or the episode ends before. Steps where the mask is False do not exist: those around them
    follow each other. No gradient flows.

    Parameters
    ----------
    n : int, optional
        At least 1; None sums to the end of the episode (reward to go).
    gamma : float
        In [0, 1].
    values_EH : Tensor, optional
        Expected return from each step on.

    Returns
    -------
    Tensor
        `[E, H]`; 0 where the mask is False.

    Raises
    ------
    ConfigurationError
        When n is below 1.
    """
    if n is not None and n < 1:
        raise ConfigurationError(
            f"returns over {n} steps were asked for; a return holds at least the reward of its own "
            "step. Give n >= 1, or None for all steps to the end."
        )
    rewards_EH = rewards_EH.detach()
    order = torch.argsort(mask_EH.logical_not().to(torch.uint8), dim=1, stable=True)
    place_H = torch.arange(mask_EH.shape[1], device=mask_EH.device)
    is_step_EH = place_H < mask_EH.sum(dim=1, keepdim=True)
    reward_EH = masked_fill_zero(rewards_EH.gather(1, order), is_step_EH)
    distance_HH = place_H.unsqueeze(1) - place_H
    base = torch.full((), gamma, dtype=reward_EH.dtype, device=reward_EH.device)
    is_within = (distance_HH >= 0) & (distance_HH < (len(place_H) if n is None else n))
    # weight[s, t] = gamma**(s - t) for t <= s < t + n: no loop over steps.
    weight_HH = masked_fill_zero(base ** distance_HH.clamp(min=0), is_within)
    returns_EH = reward_EH @ weight_HH
    if values_EH is not None and n is not None:
        value_EH = masked_fill_zero(values_EH.detach().gather(1, order), is_step_EH)
        later_EH = torch.zeros_like(value_EH)
        later_EH[:, : max(len(place_H) - n, 0)] = value_EH[:, n:]
        returns_EH = returns_EH + base**n * later_EH
    returns_EH = torch.zeros_like(returns_EH).scatter(1, order, returns_EH)
    return masked_fill_zero(returns_EH, mask_EH)
