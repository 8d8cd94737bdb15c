"""Policy losses token by token, before they are reduced; all are to be minimised.

Shape suffixes: `B` row (sample), `T` token. Every loss takes log-probabilities of the policy (nats,
with gradient), those of the policy that sampled (no gradient), advantages `[B]` or `[B, T]` (no
gradient) and a bool mask, and gives `[B, T]`, 0 where the mask is False. Log-ratios are held within
20 nats of 0 (`ratios.MAX_LOG_RATIO`). `reductions.reduce_share` makes one number of them; whole
algorithms with their reduction are in `policy_gradient` and `group_variants`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.masked import masked_fill_zero, masked_mean
from nip_astra.rl_objectives.ratios import bounded


def importance_sampling_loss(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages: Tensor, mask_BT: Tensor
) -> Tensor:
    """`-ratio * A` with `ratio = pi / pi_old` of each token, unclipped."""
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    return masked_fill_zero(-ratio_BT * _per_token(advantages), mask_BT)


def clipped_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    least_ratio: float = 0.8,
    most_ratio: float = 1.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped loss of PPO, `max(-ratio A, -clip(ratio) A)` (arXiv:1707.06347, eq. 7).

    With a `dual_clip` c the loss of tokens with A < 0 is at most `-c A`, so that a ratio far above
    1 does not throw the policy off (arXiv:1912.09729; the "delta" of TRL).

    Parameters
    ----------
    least_ratio, most_ratio : float
        Bounds of the ratio itself, as in Tinker; 1 - epsilon and 1 + epsilon of the paper.
    dual_clip : float, optional
        Above `most_ratio`, and so above 1.

    Raises
    ------
    ConfigurationError
        When the bounds do not lie about 1, or the dual clip lies within them.
    """
    _check_bounds(least_ratio, most_ratio, dual_clip)
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    advantages = _per_token(advantages)
    loss_BT = torch.maximum(
        -ratio_BT * advantages, -ratio_BT.clamp(least_ratio, most_ratio) * advantages
    )
    if dual_clip is not None:
        most_BT = torch.minimum(loss_BT, -dual_clip * advantages)
        loss_BT = torch.where(advantages < 0, most_BT, loss_BT)
    return masked_fill_zero(loss_BT, mask_BT)


def cispo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    least_ratio: float = 0.0,
    most_ratio: float = 4.0,
) -> Tensor:
    """`-clip(ratio) A log pi` with a constant ratio (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    The clip bounds a weight and takes no gradient away. Bounds are those of the ratio itself: the
    defaults are Tinker's; TRL has (0, 5), TorchRL (1 - epsilon, 1 + epsilon).
    """
    _check_bounds(least_ratio, most_ratio, None)
    weight_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT).detach()
    weight_BT = weight_BT.clamp(least_ratio, most_ratio)
    return masked_fill_zero(-weight_BT * _per_token(advantages) * logprobs_BT, mask_BT)


def gspo_token_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    least_ratio: float = 1 - 3e-4,
    most_ratio: float = 1 + 4e-4,
) -> Tensor:
    """Clipped loss with one ratio a row, for advantages of tokens (GSPO-token, arXiv:2507.18071).

    The ratio is the geometric mean over the tokens of the row; each token carries its own gradient
    (`sg[s] pi / sg[pi]`). With one advantage a row its mean over the row's tokens, and the gradient
    of that, are those of GSPO (eq. 5).
    """
    _check_bounds(least_ratio, most_ratio, None)
    log_ratio_BT = masked_fill_zero(logprobs_BT - old_logprobs_BT.detach(), mask_BT)
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, dim=1).unsqueeze(1).detach()
    own_BT = masked_fill_zero(logprobs_BT - logprobs_BT.detach(), mask_BT)
    ratio_BT = bounded(mean_B1 + own_BT).exp()
    advantages = _per_token(advantages)
    loss_BT = torch.maximum(
        -ratio_BT * advantages, -ratio_BT.clamp(least_ratio, most_ratio) * advantages
    )
    return masked_fill_zero(loss_BT, mask_BT)


def sapo_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """`-(4 / tau) sigmoid(tau (ratio - 1)) A`: a soft gate in place of a clip (SAPO).

    arXiv:2511.20347. `tau` is one of the temperatures by the sign of A; a larger one lets ratios
    move less. At ratio 1 the gradient is that of importance sampling.
    """
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ConfigurationError(
            f"the soft gate of SAPO was given the temperatures {temperature_positive} and "
            f"{temperature_negative}; both divide, so they must be positive. Give, for instance, "
            "1.0 and 1.05."
        )
    advantages = _per_token(advantages)
    tau = torch.where(advantages > 0, temperature_positive, temperature_negative)
    tau = tau.to(logprobs_BT.dtype)
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    gate_BT = torch.sigmoid(tau * (ratio_BT - 1)) * 4 / tau
    return masked_fill_zero(-gate_BT * advantages, mask_BT)


def overlong_penalty(lengths_B: Tensor, *, max_length: int, margin: int) -> Tensor:
    """What is added to the rewards of answers near the longest allowed (DAPO, arXiv:2503.14476).

    0 up to `max_length - margin` tokens, then falling in a line to -1 at `max_length` (eq. 13).
    """
    if not 0 < margin <= max_length:
        raise ConfigurationError(
            f"a penalty on the last {margin} of at most {max_length} tokens was asked for; the "
            "margin must be positive and no longer than the whole. Give such a margin."
        )
    over_B = (lengths_B - (max_length - margin)).clamp(0, margin)
    return -over_B / margin


def _per_token(advantages: Tensor) -> Tensor:
    advantages = advantages.detach()
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages


def _ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # Masked before exp: the gradient of an infinite value times 0 would be NaN.
    return bounded(masked_fill_zero(logprobs_BT - old_logprobs_BT.detach(), mask_BT)).exp()


def _check_bounds(least: float, most: float, dual_clip: float | None) -> None:
    if not (0 <= least <= 1 <= most) or math.isnan(most):
        raise ConfigurationError(
            f"ratios were to be clipped to [{least}, {most}], which are bounds of the ratio itself "
            "and must lie about 1, where policy and sampler agree. Give, for instance, 0.8 and 1.2."
        )
    if dual_clip is not None and not dual_clip > most:
        raise ConfigurationError(
            f"a dual clip of {dual_clip} was asked for beside an upper bound of {most}; within the "
            "bounds it would act on what the clip keeps. Give a larger one, for instance 3."
        )
