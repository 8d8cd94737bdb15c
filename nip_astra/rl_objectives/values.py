"""Losses of value functions, and the variance that values explain.

Shape suffixes: `B` row, `T` token or turn.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import l1_loss, mse_loss, smooth_l1_loss

from nip_astra.parameters.trainers import LossCriticType
from nip_astra.rl_objectives.reductions import (
    LossOutput,
    Reduction,
    masked_fill_zero,
    masked_mean,
    masked_sum,
    reduce_loss,
)

DISTANCES = {"l1": l1_loss, "l2": mse_loss, "smooth_l1": smooth_l1_loss}


def value_losses(
    values_B: Tensor,
    targets_B: Tensor,
    loss_type: LossCriticType,
    *,
    old_values_B: Tensor | None = None,
    clip_value: float | None = None,
) -> Tensor:
    """Compute the distance of each value to its target, [B] or any shape, with gradient.

    l1 is `|d|`, l2 is `d^2`, smooth_l1 is `d^2 / 2` up to `|d| = 1` and `|d| - 1/2` beyond.

    With a `clip_value`, a value counts as no nearer to its target than one at most this far from
    the old value, the value at collection.
    """
    distance = DISTANCES[loss_type]
    targets_B = targets_B.to(values_B.dtype)
    losses_B = distance(values_B, targets_B, reduction="none")
    if clip_value is None or old_values_B is None:
        return losses_B
    old_values_B = old_values_B.to(values_B.dtype)
    near_B = old_values_B + (values_B - old_values_B).clamp(-clip_value, clip_value)
    return torch.maximum(losses_B, distance(near_B, targets_B, reduction="none"))


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_range: float | None,
    reduction: Reduction = "token",
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Compute half the squared error of values, optionally clipped about the old ones.

    `1/2 (V - R)**2`; with a `clip_range` `c` the larger of it and
    `1/2 (clip(V, V_old - c, V_old + c) - R)**2`, so that no gradient takes a value further than
    `c` from where it was (as PPO's first implementation had it).

    `[B, T]` values are of tokens, or of turns with `T` the turns; gradients flow through
    `values_BT` alone. `clip_range` is in the unit of the rewards, > 0; for the other options see
    `reduce_loss`. Metrics: `value_clip_fraction`, `value_mean`, `return_mean`.
    """
    # Masked before squaring: the gradient of an infinite value times 0 would be NaN.
    values_BT, old_BT, returns_BT = (
        masked_fill_zero(x, mask_BT)
        for x in (values_BT, old_values_BT.detach(), returns_BT.detach())
    )
    errors_BT = value_losses(values_BT, returns_BT, "l2") / 2
    is_clipped_BT = torch.zeros_like(mask_BT)
    if clip_range is not None:
        held_BT = value_losses(
            values_BT, returns_BT, "l2", old_values_B=old_BT, clip_value=clip_range
        ).div(2)
        is_clipped_BT = held_BT > errors_BT
        errors_BT = held_BT
    loss = reduce_loss(errors_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length)
    metrics = {
        "value_clip_fraction": is_clipped_BT.to(values_BT.dtype),
        "value_mean": values_BT.detach(),
        "return_mean": returns_BT,
    }
    return LossOutput(
        loss, {name: reduce_loss(x, mask_BT, "sequence") for name, x in metrics.items()}
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return the explained share of the variance of returns, `1 - Var(R - V) / Var(R)`, scalar.

    1 is perfect, 0 as good as a constant, below 0 worse; NaN where the returns do not vary. It is
    no mean over rows: give it a whole iteration.
    """
    values, returns = values.detach(), returns.detach()

    def spread(x: Tensor) -> Tensor:
        return masked_sum((x - masked_mean(x, mask)).square(), mask)

    total = spread(returns)
    nan = torch.full_like(total, torch.nan)
    return torch.where(total > 0, 1 - spread(returns - values) / total, nan)
