"""Ratios of probabilities that stay numbers whatever a policy has come to.

Shape suffixes: `B` row or frame, `T` token.
"""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Nats. Log-ratios are held between minus this and this before `exp`, as in verl: an infinite ratio
makes the gradient NaN where its loss, clipped, is finite. A ratio held has no gradient."""


def bounded(log_ratios: Tensor) -> Tensor:
    """Log-ratios, nats, held within `MAX_LOG_RATIO`; exactly as they are within it."""
    return log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def is_gradient_clipped(clipped_gain: Tensor, gain: Tensor) -> Tensor:
    """Say where the clip of PPO takes the gradient away: where the clipped gain is the smaller."""
    return clipped_gain.detach() < gain.detach()
