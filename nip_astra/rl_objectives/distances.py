"""Losses of value functions.

Shapes: B frames.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss, smooth_l1_loss

from nip_astra.parameters.trainers import LossCriticType

DISTANCES = {"l1": l1_loss, "l2": mse_loss, "smooth_l1": smooth_l1_loss}


def value_losses(
    values_B: Tensor,
    targets_B: Tensor,
    loss_type: LossCriticType,
    *,
    old_values_B: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    """The distance of each value to its target, [B], with grad.

    l1 is `|d|`, l2 is `d^2`, smooth_l1 is `d^2 / 2` up to `|d| = 1` and `|d| - 1/2` beyond.

    Parameters
    ----------
    old_values_B : Tensor, optional
        Values at collection; needed with `clip_value`.
    clip_value : float, optional
        A value counts as no nearer to its target than one that moved from the old value by this,
        at most.
    """
    distance = DISTANCES[loss_type]
    targets_B = targets_B.to(values_B.dtype)
    losses_B = distance(values_B, targets_B, reduction="none")
    if clip_value is None or old_values_B is None:
        return losses_B
    old_values_B = old_values_B.to(values_B.dtype)
    near_B = old_values_B + (values_B - old_values_B).clamp(-clip_value, clip_value)
    return torch.maximum(losses_B, distance(near_B, targets_B, reduction="none"))
