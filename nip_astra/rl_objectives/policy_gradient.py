"""Policy gradients, the value loss beside them, and supervised learning.

Shape suffixes: `B` row (sample), `T` token (of values also: turn). A mask is bool, True on the
tokens that the attacker sampled; what stands elsewhere never matters. All losses are to be
minimised. Metrics are means over the tokens of a row, then over rows, so that parts of a batch
weighted by their rows give those of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.group_variants import GroupVariant, RatioLevel
from nip_astra.rl_objectives.kl import KlKind, kl_estimate
from nip_astra.rl_objectives.masked import (
    Reduction,
    masked_fill_zero,
    masked_mean,
    masked_sum,
    mean_over_rows,
    reduce_loss,
)
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.ratios import bounded, is_gradient_clipped


def ppo_policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reduction: Reduction = "token",
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Clipped policy loss of PPO, token by token (arXiv:1707.06347, eq. 7).

    `-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)` with `ratio = pi / pi_old`,
    whose logarithm is held within 20 nats of 0 (`ratios.MAX_LOG_RATIO`).

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the sampled tokens under the policy, nats, with gradient.
    old_logprobs_BT : Tensor
        The same under the policy that sampled them, without gradient.
    advantages : Tensor
        `[B, T]`, or `[B]` for all tokens of a row; no gradient flows.
    clip_low, clip_high : float
        How far the ratio may go below and above 1.
    reduction, normaliser, max_length
        See `reduce_loss`.
    entropy_BT : Tensor, optional
        Entropy of the policy at each token, nats; for the metrics alone.
    weights_BT : Tensor, optional
        What each token's surrogate is multiplied by, >= 0 and without gradient: importance weights
        where another distribution sampled than `old_logprobs_BT` is of (`importance_weights`).

    Returns
    -------
    LossOutput
        Metrics: `clip_fraction` (share of tokens whose gradient the clip removed),
        `outside_fraction` (share whose ratio is beyond the clip, on the side of a gain or not),
        `approx_kl` (k3 estimate of KL(pi_old || pi), nats per token), `ratio_mean`, and `entropy`.
    """
    log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    ratio_BT = _ratio(log_ratio_BT, mask_BT, "token")
    surrogate_BT, is_clipped_BT = _clipped_surrogate(
        ratio_BT, _per_token(advantages, weights_BT), clip_low, clip_high
    )
    loss = reduce_loss(
        -surrogate_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length
    )
    is_outside_BT = _clip(ratio_BT, clip_low, clip_high) != ratio_BT
    shares = {"clip_fraction": is_clipped_BT, "outside_fraction": is_outside_BT}
    return LossOutput(loss, _ratio_metrics(log_ratio_BT, ratio_BT, shares, mask_BT, entropy_BT))


def group_policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    variant: GroupVariant,
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
    reference_logprobs_BT: Tensor | None = None,
    kl_weight: float = 0.0,
    kl_kind: KlKind = "k3",
    entropy_BT: Tensor | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Policy loss over samples of groups of siblings, and a penalty on the KL divergence.

    `reduce(-surrogate + kl_weight * kl)` by the table of `GROUP_VARIANTS`, with the advantages
    of `group_advantages`. Where a row has one ratio its surrogate is one number, and the loss the
    mean over rows of that; the reduction is then that of the KL penalty alone.

    Parameters
    ----------
    logprobs_BT, old_logprobs_BT, entropy_BT
        As in `ppo_policy_loss`.
    weights_BT : Tensor, optional
        As there, and of the divergence's terms too; where the ratio is of rows, all tokens of a row
        must have one weight.
    advantages : Tensor
        `[B]`, or `[B, T]` where the ratio is of tokens; no gradient flows.
    normaliser, max_length
        See `reduce_loss`: the reductions "token" may have, "sum_over_length" must have one.
    reference_logprobs_BT : Tensor, optional
        Log-probabilities under the reference, needed where `kl_weight` is not 0.
    kl_weight : float
        >= 0. Larger stays closer to the reference.
    kl_kind : KlKind
        See `kl_estimate`.

    Returns
    -------
    LossOutput
        Metrics of `ppo_policy_loss`, and with a reference `kl`, nats per token.

    Raises
    ------
    ConfigurationError
        For a penalty without a reference, or advantages of tokens where the ratio is of rows.
    """
    _check_group_loss(variant, advantages, reference_logprobs_BT, kl_weight)
    log_ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    ratio_BT = _ratio(log_ratio_BT, mask_BT, variant.ratio)
    row_weights = weights_BT
    if weights_BT is not None and variant.ratio != "token":
        # The weight of a row stands at each of its tokens, 0 on padding.
        row_weights = weights_BT.amax(dim=1, keepdim=True)
    surrogate_BT, is_clipped_BT = _group_surrogate(
        variant,
        ratio_BT,
        _per_token(advantages, row_weights),
        masked_fill_zero(logprobs_BT, mask_BT),
    )
    is_outside_BT = _clip(ratio_BT, variant.clip_low, variant.clip_high) != ratio_BT
    shares = {"clip_fraction": is_clipped_BT, "outside_fraction": is_outside_BT}
    metrics = _ratio_metrics(log_ratio_BT, ratio_BT, shares, mask_BT, entropy_BT)
    loss_BT = -surrogate_BT if variant.ratio == "token" else torch.zeros_like(logprobs_BT)
    if reference_logprobs_BT is not None:
        kl_BT = kl_estimate(logprobs_BT, reference_logprobs_BT, kl_kind, mask_BT=mask_BT)
        kl_BT = kl_BT if weights_BT is None else weights_BT * kl_BT
        metrics["kl"] = reduce_loss(kl_BT.detach(), mask_BT, "sequence")
        loss_BT = loss_BT + kl_weight * kl_BT
    loss = reduce_loss(
        loss_BT, mask_BT, variant.reduction, normaliser=normaliser, max_length=max_length
    )
    if variant.ratio != "token":
        # A row without tokens has no loss, though its ratio is 1.
        surrogate_B = masked_fill_zero(surrogate_BT.squeeze(1), mask_BT.any(dim=1))
        loss = loss - mean_over_rows(surrogate_B)
    return LossOutput(loss, metrics)


def _group_surrogate(
    variant: GroupVariant, ratio_BT: Tensor, advantages_BT: Tensor, logprobs_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """What is to be maximised, and where the clip removed its gradient."""
    if variant.surrogate == "clipped":
        return _clipped_surrogate(ratio_BT, advantages_BT, variant.clip_low, variant.clip_high)
    weight_BT = _clip(ratio_BT.detach(), variant.clip_low, variant.clip_high)
    # The clip bounds a weight and takes no gradient away.
    is_clipped_BT = torch.zeros_like(ratio_BT, dtype=torch.bool)
    return weight_BT * advantages_BT * logprobs_BT, is_clipped_BT


def _check_group_loss(
    variant: GroupVariant,
    advantages: Tensor,
    reference_logprobs_BT: Tensor | None,
    kl_weight: float,
) -> None:
    if variant.ratio != "token" and advantages.ndim != 1:
        raise ConfigurationError(
            f"a policy loss with the ratio {variant.ratio!r} was given advantages of shape "
            f"{list(advantages.shape)}; where a row has one ratio it has one advantage. Give "
            f"advantages [B], or use a variant with the ratio 'token'."
        )
    if reference_logprobs_BT is None and kl_weight != 0:
        raise ConfigurationError(
            f"a KL penalty of weight {kl_weight} was asked for without log-probabilities of the "
            f"reference; it needs those of the same tokens. Give reference_logprobs_BT, or set "
            f"the weight to 0."
        )


def reinforce_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    advantages: Tensor,
    *,
    reduction: Reduction = "sequence_sum",
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
    weights_BT: Tensor | None = None,
) -> LossOutput:
    """Policy gradient without a ratio, `-A * log pi` (Williams, 1992, REINFORCE).

    Unbiased with the reduction "sequence_sum" on samples of the policy itself, so with one epoch
    and one step an iteration.

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the sampled tokens under the policy, nats, with gradient.
    advantages : Tensor
        `[B]`, or `[B, T]`; no gradient flows.
    reduction, normaliser, max_length
        See `reduce_loss`.
    weights_BT : Tensor, optional
        As in `ppo_policy_loss`, where another distribution sampled than the policy.

    Returns
    -------
    LossOutput
        Metrics: `logprob`, nats per token.
    """
    values_BT = -_per_token(advantages, weights_BT) * masked_fill_zero(logprobs_BT, mask_BT)
    loss = reduce_loss(values_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length)
    return LossOutput(loss, {"logprob": reduce_loss(logprobs_BT.detach(), mask_BT, "sequence")})


def nll_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    reduction: Reduction = "token",
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Negative log-likelihood of given tokens, `-log pi`: supervised fine-tuning.

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the given tokens under the policy, nats, with gradient.
    reduction, normaliser, max_length
        See `reduce_loss`.

    Returns
    -------
    LossOutput
        Metrics: `nll`, nats per token.
    """
    loss = reduce_loss(
        -logprobs_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length
    )
    return LossOutput(loss, {"nll": -reduce_loss(logprobs_BT.detach(), mask_BT, "sequence")})


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
    """Half the squared error of values, clipped about the old ones if asked.

    `1/2 (V - R)**2`; with a `clip_range` `c` the larger of it and
    `1/2 (clip(V, V_old - c, V_old + c) - R)**2`, so that no gradient takes a value further than
    `c` from where it was (as PPO's first implementation had it).

    Parameters
    ----------
    values_BT : Tensor
        Values of tokens, or of turns with `T` the turns, with gradient.
    old_values_BT, returns_BT : Tensor
        Values when the samples were taken, and what to predict; no gradient flows.
    clip_range : float, optional
        In the unit of the rewards, > 0.
    reduction, normaliser, max_length
        See `reduce_loss`.

    Returns
    -------
    LossOutput
        Metrics: `value_clip_fraction`, `value_mean`, `return_mean`.
    """
    # Masked before squaring: the gradient of an infinite value times 0 would be NaN.
    values_BT, old_BT, returns_BT = (
        masked_fill_zero(x, mask_BT)
        for x in (values_BT, old_values_BT.detach(), returns_BT.detach())
    )
    errors_BT = (values_BT - returns_BT).square() / 2
    is_clipped_BT = torch.zeros_like(mask_BT)
    if clip_range is not None:
        near_BT = old_BT + (values_BT - old_BT).clamp(-clip_range, clip_range)
        clipped_BT = (near_BT - returns_BT).square() / 2
        is_clipped_BT = clipped_BT > errors_BT
        errors_BT = torch.maximum(errors_BT, clipped_BT)
    loss = reduce_loss(errors_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length)
    metrics = {
        "value_clip_fraction": is_clipped_BT.to(values_BT.dtype),
        "value_mean": values_BT.detach(),
        "return_mean": returns_BT,
    }
    return LossOutput(
        loss, {name: reduce_loss(x, mask_BT, "sequence") for name, x in metrics.items()}
    )


def _per_token(advantages: Tensor, weights: Tensor | None) -> Tensor:
    advantages = advantages.detach()
    advantages = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    return advantages if weights is None else weights.detach() * advantages


def _log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor, mask_BT: Tensor) -> Tensor:
    # Masked before exp: the gradient of an infinite value times 0 would be NaN.
    return bounded(masked_fill_zero(logprobs_BT - old_logprobs_BT.detach(), mask_BT))


def _ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: RatioLevel) -> Tensor:
    """`[B, T]`, or `[B, 1]` where rows have one ratio."""
    if level == "sequence_mean":
        log_ratio_BT = masked_mean(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
    elif level == "sequence_product":
        log_ratio_BT = bounded(masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1))
    return log_ratio_BT.exp()


def _clip(ratio_BT: Tensor, low: float | None, high: float | None) -> Tensor:
    least = -math.inf if low is None else 1 - low
    most = math.inf if high is None else 1 + high
    return ratio_BT.clamp(least, most)


def _clipped_surrogate(
    ratio_BT: Tensor, advantages_BT: Tensor, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:
    """The surrogate, to be maximised, and where the clip holds it."""
    free_BT = ratio_BT * advantages_BT
    clipped_BT = _clip(ratio_BT, low, high) * advantages_BT
    return torch.minimum(free_BT, clipped_BT), is_gradient_clipped(clipped_BT, free_BT)


def _ratio_metrics(
    log_ratio_BT: Tensor,
    ratio_BT: Tensor,
    shares: Mapping[str, Tensor],
    mask_BT: Tensor,
    entropy_BT: Tensor | None,
) -> dict[str, Tensor]:
    log_ratio_BT = log_ratio_BT.detach()
    columns = {
        **{
            name: is_so_BT.to(log_ratio_BT.dtype).expand_as(log_ratio_BT)
            for name, is_so_BT in shares.items()
        },
        "approx_kl": torch.expm1(log_ratio_BT) - log_ratio_BT,
        "ratio_mean": ratio_BT.detach().expand_as(log_ratio_BT),
    }
    if entropy_BT is not None:
        columns["entropy"] = entropy_BT.detach()
    return {name: reduce_loss(x, mask_BT, "sequence") for name, x in columns.items()}
