"""The loss of a batch of trajectories, from the parameters of a trainer.

Shape suffixes: `B` row, `T` token of the response.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.rl_objectives.kl import kl_estimate, straight_through_kl
from nip_astra.rl_objectives.masked import Reduction, masked_fill_zero, masked_mean, reduce_loss
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.ratios import bounded
from nip_astra.rl_objectives.token_losses import (
    cispo_loss,
    clipped_loss,
    gspo_token_loss,
    importance_sampling_loss,
    sapo_loss,
)
from nip_astra.trainers.service.parameters import PolicyLossParameters

TokenLoss = Callable[..., Tensor]
TOKEN_LOSSES: Mapping[str, TokenLoss] = MappingProxyType(
    {
        "clipped": clipped_loss,
        "importance_sampling": importance_sampling_loss,
        "cispo": cispo_loss,
        "gspo": gspo_token_loss,
        "sapo": sapo_loss,
    }
)
"""By the names of `PolicyLoss`."""
BOUNDED = ("clipped", "cispo", "gspo")
MEANS_OVER_SEQUENCES = ("gspo", "sapo")
"""Losses whose papers take the mean over a row's tokens, then over rows."""


def policy_loss(
    logprobs_BT: Tensor,
    batch: TensorDict,
    options: PolicyLossParameters,
    *,
    normaliser: float | None,
    max_length: int | None,
) -> LossOutput:
    """The loss that the parameters describe, a mean over rows, and figures of it.

    Parameters
    ----------
    logprobs_BT : Tensor
        Of the response's tokens under the policy, with gradient.
    batch : TensorDict
        `old_logprobs`, `advantages`, `trained_mask`, and where they are asked for
        `reference_logprobs` and `correction_weights`.
    normaliser : float, optional
        What sums over tokens are divided by, for the reduction "token".
    max_length : int, optional
        Longest response, for the reduction "sum_over_length".
    """
    mask_BT = batch["trained_mask"].to(logprobs_BT.device)
    old_BT, advantages_BT = (
        batch[name].to(logprobs_BT.device) for name in ("old_logprobs", "advantages")
    )
    bounds: dict[str, float | None] = {
        name: value
        for name, value in (
            ("least_ratio", options.least_ratio),
            ("most_ratio", options.most_ratio),
        )
        if value is not None and options.loss in BOUNDED
    }
    if options.loss == "clipped":
        bounds["dual_clip"] = options.dual_clip
    loss_BT = TOKEN_LOSSES[options.loss](logprobs_BT, old_BT, advantages_BT, mask_BT, **bounds)
    if "correction_weights" in batch:
        loss_BT = loss_BT * batch["correction_weights"].to(logprobs_BT.device)
    metrics = ratio_metrics(logprobs_BT, old_BT, mask_BT)
    if options.loss in BOUNDED:
        metrics["clip_share"] = clip_share(
            logprobs_BT, old_BT, advantages_BT, mask_BT, **_bounds_of(options, bounds)
        )
    if options.kl_weight > 0:
        reference_BT = batch["reference_logprobs"].to(logprobs_BT.device)
        kl_BT = straight_through_kl(
            logprobs_BT,
            reference_BT,
            mask_BT,
            value=options.kl_value,
            gradient=options.kl_gradient,
        )
        loss_BT = loss_BT + options.kl_weight * kl_BT
        metrics["kl"] = reduce_loss(kl_BT.detach(), mask_BT, "sequence")
    own: Reduction = "sequence" if options.loss in MEANS_OVER_SEQUENCES else "token"
    reduction = options.reduction or own
    loss = reduce_loss(
        loss_BT,
        mask_BT,
        reduction,
        normaliser=normaliser if reduction == "token" else None,
        max_length=max_length if reduction == "sum_over_length" else None,
    )
    return LossOutput(loss, metrics)


def _bounds_of(options: PolicyLossParameters, given: Mapping[str, float | None]) -> dict[str, Any]:
    """The bounds that a loss takes, its own defaults among them."""
    defaults = inspect.signature(TOKEN_LOSSES[options.loss]).parameters
    names = ("least_ratio", "most_ratio")
    bounds: dict[str, Any] = {n: given.get(n, defaults[n].default) for n in names}
    if options.loss == "gspo":
        bounds["is_of_rows"] = True
    if options.loss == "cispo":
        bounds["is_one_sided"] = False
    return bounds


def clip_share(
    logprobs_BT: Tensor,
    old_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    least_ratio: float,
    most_ratio: float,
    is_of_rows: bool = False,
    is_one_sided: bool = True,
) -> Tensor:
    """Share of tokens whose ratio the clip acts on: mean over tokens, then rows, scalar.

    Parameters
    ----------
    advantages : Tensor
        `[B]` or `[B, T]`.
    is_of_rows : bool
        Whether the ratio is the geometric mean over a row's tokens.
    is_one_sided : bool
        Whether it acts in the direction of the advantage alone, as in PPO, where it takes the
        gradient away; else it bounds a weight.
    """
    with torch.no_grad():
        log_BT = masked_fill_zero(logprobs_BT - old_BT, mask_BT)
        if is_of_rows:
            log_BT = masked_mean(log_BT, mask_BT, dim=1).unsqueeze(1).expand_as(mask_BT)
        ratio_BT = bounded(log_BT).exp()
        sign = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
        is_above, is_below = ratio_BT > most_ratio, ratio_BT < least_ratio
        if is_one_sided:
            is_above, is_below = is_above & (sign > 0), is_below & (sign < 0)
        return reduce_loss((is_above | is_below).to(ratio_BT.dtype), mask_BT, "sequence")


def ratio_metrics(logprobs_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """How far the policy went from the one that sampled: means over tokens, then rows.

    `ratio_mean`, `approx_kl` (k3, nats a token), `outside_share` (of tokens whose ratio is beyond
    20 % of 1) and `logprob`.
    """
    with torch.no_grad():
        # log(old) is the policy that sampled, so this is k3 of KL(old || policy).
        kl_BT = kl_estimate(old_BT, logprobs_BT, "k3", mask_BT=mask_BT)
        ratio_BT = bounded(masked_fill_zero(logprobs_BT - old_BT, mask_BT)).exp()
        columns = {
            "ratio_mean": ratio_BT,
            "approx_kl": kl_BT,
            "outside_share": ((ratio_BT - 1).abs() > 0.2).to(ratio_BT.dtype),
            "logprob": logprobs_BT.detach(),
        }
        return {name: reduce_loss(x, mask_BT, "sequence") for name, x in columns.items()}
