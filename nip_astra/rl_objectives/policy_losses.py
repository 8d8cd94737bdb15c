"""Per-token policy losses, their reduction to a batch loss, and importance weights.

A policy loss takes log-probabilities of the sampled tokens under the policy (nats, with gradient)
and under the policy that sampled them, advantages `[B, T]` or `[B, 1]` and a bool mask, and returns
the loss of each token, `[B, T]`, to be minimised. `PolicyLoss.of_tokens` calls it with 0 where the
mask is False, so that padding never matters. Below, `r = pi / pi_old`, whose logarithm is held
within 20 nats of 0 (`reductions.MAX_LOG_RATIO`), and `A` is the advantage. `clip_low` and
`clip_high` are distances from 1: a ratio is clipped to `[1 - clip_low, 1 + clip_high]`.

Shape suffixes: `B` row (sample), `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, JsonValue, model_validator
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.advantages import Baseline, Scale, ZeroVarianceRule
from nip_astra.rl_objectives.kl import KlKind, straight_through_kl
from nip_astra.rl_objectives.reductions import (
    MAX_LOG_RATIO,
    TOKEN_REDUCTIONS,
    LossOutput,
    Reduction,
    bounded,
    masked_fill_zero,
    masked_mean,
    masked_sum,
    reduce_loss,
)
from nip_astra.rl_objectives.registry import (
    POLICY_LOSSES,
    PolicyLossName,
    has_option,
    options_of,
    register_policy_loss,
    with_options,
)

OWN_REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "gspo": "sequence",
        "luspo": "sequence_sum",
        "sapo": "sequence",
        "rloo": "sequence_sum",
    }
)
"""Reductions that the losses' papers use; for all other losses "token"."""

ROW_LOSSES = ("gspo", "luspo", "rloo", "vespo")
"""Losses with one ratio per row."""

SMALLEST_ROW_WEIGHT = 1e-8
"""Smallest ratio of a row in `vespo`, as in its authors' code."""

ImportanceLevel = Literal["token", "sequence"]
"""Whether probability ratios are per token or per row, see `importance_weights`."""

CorrectionMode = Literal["truncate", "mask"]
"""Treatment of ratios out of bounds, see `importance_weights`."""


# ---- losses


@register_policy_loss("ppo")
def ppo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """`-min(r A, clip(r) A)`, the clipped loss of PPO (arXiv:1707.06347, eq. 7).

    With a `dual_clip` c the loss of tokens with A < 0 is at most `-c A`, so that a ratio far above
    1 does not dominate (arXiv:1912.09729; the "delta" of TRL). c is above `1 + clip_high`.
    """
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT)
    loss_BT = _clipped(ratio_BT, advantages_BT, clip_low, clip_high)
    if dual_clip is not None:
        if not dual_clip > 1 + clip_high:
            raise ConfigurationError(
                f"dual_clip {dual_clip} must be above 1 + clip_high = {1 + clip_high}. Set it to, "
                "for instance, 3."
            )
        most_BT = torch.minimum(loss_BT, -dual_clip * advantages_BT)
        loss_BT = torch.where(advantages_BT < 0, most_BT, loss_BT)
    return loss_BT


@register_policy_loss("importance_sampling")
def importance_sampling(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """`-r A`, without a clip."""
    return -_ratio(logprobs_BT, old_logprobs_BT) * advantages_BT


@register_policy_loss("cispo")
def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 3.0,
) -> Tensor:
    """`-clip(r) A log pi` with a constant `clip(r)` (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    The clip bounds a weight and removes no gradient. By default ratios are clipped to [0, 4], as
    in Tinker. TRL's `epsilon_high` is the upper bound itself, `1 + clip_high`, without a lower
    bound, which is `clip_low` 1; so `clip_high` may be below 0 here, but above -1.
    """
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT).detach()
    # Tensors of bounds are Tinker's, one per token.
    if not isinstance(clip_low, Tensor) and not (clip_low >= 0 and clip_high > -1):
        raise ConfigurationError(
            f"cispo clips ratios to [1 - clip_low, 1 + clip_high]; got {clip_low} and {clip_high}. "
            "Set clip_low to at least 0, and clip_high above -1."
        )
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return -weight_BT * advantages_BT * logprobs_BT


@register_policy_loss("gspo")
def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """PPO's loss with one ratio per row, the geometric mean over its tokens (arXiv:2507.18071).

    The gradient of each token is its own, `sg[s] pi / sg[pi]` (GSPO-token), so that advantages may
    differ between tokens. With one advantage per row, the mean over the row's tokens and its
    gradient are those of GSPO, eq. 5.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT).detach()
    mean_B1 = masked_mean(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
    ratio_BT = bounded(mean_B1 + (logprobs_BT - logprobs_BT.detach())).exp()
    return _clipped(ratio_BT, advantages_BT, clip_low, clip_high)


@register_policy_loss("luspo")
def luspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 2e-3,
    clip_high: float = 2.5e-3,
) -> Tensor:
    """GSPO's loss of a row times its length (LUSPO, arXiv:2602.05261).

    GSPO's mean over a row's tokens weighs the tokens of long rows less. Here each token has GSPO's
    loss, and by the reduction "sequence_sum" a row has their sum. The clip range is that of the
    paper, section 5.1.
    """
    return gspo(
        *(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT),
        clip_low=clip_low,
        clip_high=clip_high,
    )


@register_policy_loss("vespo")
def vespo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """`-phi(w) A log pi`, constant `phi(w) = w**k exp(lambda (1 - w))` (VESPO, arXiv:2602.10693).

    `w` is the ratio of the whole row, the product over its tokens, within 1e-8 and `exp(20)`.
    `phi` is 1 at `w = 1`, and falls to 0 as w does (by k) and as w grows (by lambda): larger values
    suppress rows further off policy. k and lambda are those of the sign of A, 0 included in the
    positive.
    """
    if min(k_positive, k_negative) < 0 or not min(lambda_positive, lambda_negative) > 0:
        raise ConfigurationError(
            f"vespo has k {k_positive} and {k_negative}, lambda {lambda_positive} and "
            f"{lambda_negative}. Set k to at least 0, and lambda above 0."
        )
    log_ratio_BT = bounded(logprobs_BT - old_logprobs_BT).detach()
    log_weight_B1 = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
    log_weight_B1 = log_weight_B1.clamp(math.log(SMALLEST_ROW_WEIGHT), MAX_LOG_RATIO)
    is_positive_BT = advantages_BT >= 0
    k_BT = torch.where(is_positive_BT, k_positive, k_negative).to(logprobs_BT.dtype)
    lambda_BT = torch.where(is_positive_BT, lambda_positive, lambda_negative).to(logprobs_BT.dtype)
    phi_BT = (k_BT * log_weight_B1 + lambda_BT * (1 - log_weight_B1.exp())).exp()
    return -phi_BT * advantages_BT * logprobs_BT


@register_policy_loss("rloo")
def rloo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """PPO's loss with the ratio of the whole row (arXiv:2402.14740, clipped for later epochs).

    The loss of a row is divided evenly among its tokens, so that their sum is the row's.
    """
    log_ratio_BT = bounded(logprobs_BT - old_logprobs_BT)
    ratio_B1 = bounded(masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)).exp()
    loss_BT = _clipped(ratio_B1, advantages_BT, clip_low, clip_high)
    return (loss_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)).expand_as(mask_BT)


@register_policy_loss("sapo")
def sapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """`-(4 / tau) sigmoid(tau (r - 1)) A`: a soft gate in place of a clip (arXiv:2511.20347).

    `tau` is one of the temperatures, by the sign of A; a larger one lets ratios move less. At
    ratio 1 the gradient is that of importance sampling.
    """
    if not (temperature_positive > 0 and temperature_negative > 0):
        raise ConfigurationError(
            f"temperatures of sapo must be positive; got {temperature_positive} and "
            f"{temperature_negative}."
        )
    tau_BT = torch.where(advantages_BT > 0, temperature_positive, temperature_negative)
    tau_BT = tau_BT.to(logprobs_BT.dtype)
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT)
    gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT
    return -gate_BT * advantages_BT


@register_policy_loss("dro")
def dro(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    *,
    beta: float = 0.05,
) -> Tensor:
    """`beta / 2 (log r)^2 - A log pi`, direct reward optimisation (Tinker's; arXiv:2405.19107)."""
    distance_BT = (logprobs_BT - old_logprobs_BT).square()
    return 0.5 * beta * distance_BT - logprobs_BT * advantages_BT


@register_policy_loss("reinforce")
def reinforce(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """`-A log pi`, without a ratio (Williams, 1992).

    Unbiased with the reduction "sequence_sum" on samples of the policy itself, so with one epoch
    and one step per iteration.
    """
    return -advantages_BT * logprobs_BT


@register_policy_loss("cross_entropy")
def cross_entropy(
    logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
) -> Tensor:
    """`-log pi`: supervised learning, which reads neither advantages nor old log-probabilities."""
    return -logprobs_BT


def _clipped(ratio: Tensor, advantages_BT: Tensor, clip_low: float, clip_high: float) -> Tensor:
    clipped = _clip(ratio, clip_low, clip_high)
    return torch.maximum(-ratio * advantages_BT, -clipped * advantages_BT)


def _clip(ratio: Tensor, clip_low: float, clip_high: float) -> Tensor:
    # Tensors of bounds are Tinker's.
    if not isinstance(clip_low, Tensor) and not (clip_low >= 0 and clip_high >= 0):
        raise ConfigurationError(
            f"clip_low and clip_high are distances from 1 and must be >= 0; got {clip_low} and "
            f"{clip_high}. Set, for instance, 0.2."
        )
    return ratio.clamp(1 - clip_low, 1 + clip_high)


def _ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor) -> Tensor:
    return bounded(logprobs_BT - old_logprobs_BT).exp()


# ---- the loss of a batch


class LossParameters(SubParameters):
    """Policy loss that a trainer minimises."""

    loss: PolicyLossName = "ppo"
    """Loss of each token: ppo, importance_sampling, cispo, gspo, luspo, vespo, rloo, sapo, dro,
    reinforce, cross_entropy, or one registered by a plug-in; see `rl_objectives.policy_losses`."""
    clip_low: Annotated[float | None, has_option("clip_low")] = Field(default=None, ge=0)
    """How far the ratio may fall below 1 before it is clipped; null takes the loss's own, 0.2 for
    ppo."""
    clip_high: Annotated[float | None, has_option("clip_high")] = Field(default=None, ge=0)
    """How far the ratio may rise above 1 before it is clipped; null takes the loss's own, 0.2 for
    ppo. Larger takes larger steps."""
    loss_options: dict[str, JsonValue] = {}
    """Other options of the loss by name, for instance {dual_clip: 3.0} for ppo."""

    @model_validator(mode="after")
    def _has_options_of_its_loss(self) -> Self:
        try:
            self.chosen_loss()
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return self

    def chosen_loss(self) -> PolicyLoss:
        """Return the loss with its options."""
        return PolicyLoss.of(self.loss, self.loss_options, self.clip_low, self.clip_high)


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss with its options."""

    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        options: Mapping[str, Any] | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
    ) -> PolicyLoss:
        """Return a loss with the given options; the others have their defaults.

        Raises
        ------
        ConfigurationError
            For an unknown loss or option, or a value of another type.
        """
        given = dict(options or {})
        known = options_of(POLICY_LOSSES.get(name))
        for option, value in (("clip_low", clip_low), ("clip_high", clip_high)):
            if value is not None and option in known:
                given[option] = value
        return cls(name, with_options(POLICY_LOSSES, name, given)[1])

    @property
    def reduction(self) -> Reduction:
        """The loss's own reduction."""
        return OWN_REDUCTIONS.get(self.name, "token")

    def of_tokens(
        self,
        logprobs_BT: Tensor,
        old_logprobs_BT: Tensor | None,
        advantages: Tensor,
        mask_BT: Tensor,
    ) -> Tensor:
        """Compute the loss of each token, `[B, T]`, 0 where the mask is False.

        `old_logprobs_BT` are by default those of the policy itself, so that ratios are 1;
        `advantages` are `[B, T]`, or `[B]` for all tokens of a row.
        """
        # Masked before exp: the gradient of an infinite value times 0 would be NaN.
        logprobs_BT = masked_fill_zero(logprobs_BT, mask_BT)
        old_BT = logprobs_BT if old_logprobs_BT is None else old_logprobs_BT
        old_BT = masked_fill_zero(old_BT.detach(), mask_BT)
        function = POLICY_LOSSES.get(self.name)
        loss_BT: object = function(
            logprobs_BT, old_BT, _per_token(advantages), mask_BT, **self.options
        )
        if not isinstance(loss_BT, Tensor) or loss_BT.shape != mask_BT.shape:
            kind = type(loss_BT).__name__
            result = f"shape {list(loss_BT.shape)}" if isinstance(loss_BT, Tensor) else kind
            raise ConfigurationError(
                f"the policy loss {self.name!r} returned {result}; it must return the loss of each "
                f"token, a tensor {list(mask_BT.shape)}."
            )
        return masked_fill_zero(loss_BT, mask_BT)

    @torch.no_grad()
    def metrics(
        self,
        logprobs_BT: Tensor,
        old_logprobs_BT: Tensor | None,
        advantages: Tensor,
        mask_BT: Tensor,
    ) -> dict[str, Tensor]:
        """Return means over a row's tokens, then over rows, of how far the policy has moved.

        `logprob` (nats per token); with old log-probabilities `ratio_mean` and `approx_kl` (k3 of
        KL(pi_old || pi), nats per token) and those of `clip_columns`.
        """
        columns = {"logprob": logprobs_BT}
        if old_logprobs_BT is not None:
            log_ratio_BT = bounded(masked_fill_zero(logprobs_BT - old_logprobs_BT, mask_BT))
            columns["ratio_mean"] = log_ratio_BT.exp()
            columns["approx_kl"] = torch.expm1(log_ratio_BT) - log_ratio_BT
            columns |= self.clip_columns(log_ratio_BT, _per_token(advantages), mask_BT)
        return {
            name: reduce_loss(x.expand_as(mask_BT), mask_BT, "sequence")
            for name, x in columns.items()
        }

    def ratios(self, log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Return the ratios that the loss compares with its clip range, `[B, T]` or one per row.

        `log_ratio_BT` are those of tokens (nats), 0 where the mask is False; gradients flow.
        """
        if self.name in ("gspo", "luspo"):
            log_ratio_BT = masked_mean(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
        elif self.name == "rloo":
            log_ratio_BT = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1)
        return bounded(log_ratio_BT).exp()

    def clip_columns(
        self, log_ratio_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor
    ) -> dict[str, Tensor]:
        """Return `ratio_outside_clip` and `clip_fraction`, the share whose gradient is clipped."""
        low, high = self.options.get("clip_low"), self.options.get("clip_high")
        if low is None or high is None:
            return {}
        ratio_BT = self.ratios(log_ratio_BT, mask_BT)
        is_above, is_below = ratio_BT > 1 + high, ratio_BT < 1 - low
        is_clipped = (is_above & (advantages_BT > 0)) | (is_below & (advantages_BT < 0))
        if (dual_clip := self.options.get("dual_clip")) is not None:
            is_clipped = is_clipped | ((ratio_BT > dual_clip) & (advantages_BT < 0))
        # The clip of cispo bounds a weight.
        is_clipped = is_clipped & (self.name != "cispo")
        columns = {"ratio_outside_clip": is_above | is_below, "clip_fraction": is_clipped}
        return {name: x.to(ratio_BT.dtype) for name, x in columns.items()}


def policy_loss(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor | None,
    advantages: Tensor,
    mask_BT: Tensor,
    *,
    loss: PolicyLoss | str = "ppo",
    reduction: Reduction | None = None,
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
    weights_BT: Tensor | None = None,
    reference_logprobs_BT: Tensor | None = None,
    kl_weight: float = 0.0,
    kl_value: KlKind = "k3",
    kl_gradient: Literal["k2", "k3"] = "k2",
    is_kl_weighted: bool = False,
    entropy_BT: Tensor | None = None,
) -> LossOutput:
    """Compute a batch's loss, `reduce(weights * (loss + kl_weight * KL(pi || ref)))`, and metrics.

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the sampled tokens under the policy, nats, with gradient.
    old_logprobs_BT : Tensor, optional
        The same under the policy that sampled them; no gradient flows. None for losses without a
        ratio.
    advantages : Tensor
        `[B, T]`, or `[B]` for all tokens of a row; no gradient flows.
    mask_BT : Tensor
        bool; True on sampled tokens. Values elsewhere never matter.
    reduction : Reduction, optional
        See `reduce_loss`, as for `normaliser` and `max_length`, each of which is read by its
        reduction alone; by default the loss's own.
    weights_BT : Tensor, optional
        Weights >= 0 of tokens, no gradient: importance weights where `old_logprobs_BT` are not
        those of the distribution that sampled.
    reference_logprobs_BT : Tensor, optional
        Log-probabilities under the reference; needed where `kl_weight` is not 0.
    kl_value, kl_gradient
        See `kl.straight_through_kl`.
    is_kl_weighted : bool
        Whether the divergence is multiplied by the loss's ratio (`PolicyLoss.ratios`), through
        which gradients flow too. With `k3` the gradient at ratio 1 is that of `k2`, and off policy
        that of KL(pi || ref) without bias (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).
    entropy_BT : Tensor, optional
        Entropy of the policy at each token, nats; for the metrics.

    Returns
    -------
    LossOutput
        Metrics of `PolicyLoss.metrics`, and `kl` and `entropy` (nats per token) where given.

    Raises
    ------
    ConfigurationError
        For a divergence without a reference, or an unknown loss.
    """
    loss = PolicyLoss.of(loss) if isinstance(loss, str) else loss
    inputs = logprobs_BT, old_logprobs_BT, advantages, mask_BT
    loss_BT, metrics = loss.of_tokens(*inputs), loss.metrics(*inputs)
    if reference_logprobs_BT is None and kl_weight != 0:
        raise ConfigurationError(
            f"a KL penalty of weight {kl_weight} needs reference_logprobs_BT. Give them, or set "
            "the weight to 0."
        )
    if weights_BT is not None:
        loss_BT = weights_BT.detach() * loss_BT
    if reference_logprobs_BT is not None:
        kl_BT = straight_through_kl(
            logprobs_BT, reference_logprobs_BT, mask_BT, value=kl_value, gradient=kl_gradient
        )
        if is_kl_weighted:
            old_BT = logprobs_BT.detach() if old_logprobs_BT is None else old_logprobs_BT.detach()
            log_ratio_BT = bounded(masked_fill_zero(logprobs_BT - old_BT, mask_BT))
            kl_BT = kl_BT * loss.ratios(log_ratio_BT, mask_BT)
        kl_BT = kl_BT if weights_BT is None else weights_BT.detach() * kl_BT
        metrics["kl"] = reduce_loss(kl_BT.detach(), mask_BT, "sequence")
        loss_BT = loss_BT + kl_weight * kl_BT
    if entropy_BT is not None:
        metrics["entropy"] = reduce_loss(entropy_BT.detach(), mask_BT, "sequence")
    by = reduction or loss.reduction
    total = reduce_loss(
        loss_BT,
        mask_BT,
        by,
        normaliser=normaliser if by in TOKEN_REDUCTIONS else None,
        max_length=max_length if by == "sum_over_length" else None,
    )
    return LossOutput(total, metrics)


def _per_token(advantages: Tensor) -> Tensor:
    advantages = advantages.detach()
    return advantages.unsqueeze(1) if advantages.ndim == 1 else advantages


def nll_loss(
    logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    reduction: Reduction = "token",
    normaliser: float | Tensor | None = None,
    max_length: int | None = None,
) -> LossOutput:
    """Compute the negative log-likelihood of given tokens, `-log pi` (supervised fine-tuning).

    For the options see `reduce_loss`. Metrics: `nll`, nats per token.
    """
    loss = reduce_loss(
        -logprobs_BT, mask_BT, reduction, normaliser=normaliser, max_length=max_length
    )
    return LossOutput(loss, {"nll": -reduce_loss(logprobs_BT.detach(), mask_BT, "sequence")})


# ---- samples of another distribution


def importance_weights(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: ImportanceLevel,
    max_ratio: float,
    mode: CorrectionMode = "truncate",
) -> Tensor:
    """Compute importance weights `w = pi / mu`, `[B, T]`, without gradient; 0 on padding.

    With `pi` the policy whose gradient is wanted and `mu` the behaviour that sampled:

    - `sequence`: the ratio of the whole row, at each of its tokens. Without truncation a mean over
      samples of `mu` is then the mean under `pi` of the rows that `mu` can sample; the variance
      grows with their length;
    - `token`: the ratio of each token, as truncated by IMPALA (arXiv:1802.01561) and by decoupled
      PPO (arXiv:2110.00641, arXiv:2505.24298). Exact for rows of one token; for longer ones it
      ignores that `mu` reaches other prefixes than `pi`, and continues them otherwise.

    By `mode`, larger weights than `max_ratio` are truncated to it (Ionides, 2008), or masked: their
    tokens get 0 (IcePop; the `token_mask` and `sequence_mask` of TRL).

    Parameters
    ----------
    logprobs_BT, behaviour_logprobs_BT : Tensor
        log pi and log mu of the sampled tokens, nats.
    max_ratio : float
        > 0. Larger has less bias and more variance.
    """
    log_ratio_BT = masked_fill_zero(logprobs_BT.detach() - behaviour_logprobs_BT.detach(), mask_BT)
    if level == "sequence":
        log_ratio_BT = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1).expand_as(mask_BT)
    ratio_BT = log_ratio_BT.exp()
    if mode == "truncate":
        return masked_fill_zero(ratio_BT.clamp(max=max_ratio), mask_BT)
    return masked_fill_zero(ratio_BT, mask_BT & (ratio_BT <= max_ratio))


def refuse_token_weights(loss: str, fix: str) -> None:
    """Raise for importance weights of tokens in a policy loss with one ratio per row."""
    if loss in ROW_LOSSES:
        raise ConfigurationError(
            f"the policy loss {loss!r} has one ratio a row and cannot take importance weights of "
            f"tokens. Set {fix}, or take another loss."
        )


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Return `(sum w)**2 / sum w**2` over the number of weights, 1 if all are equal; scalar."""
    weights = masked_fill_zero(weights.detach(), mask)
    count = mask.sum().clamp(min=1)
    return weights.sum().square() / (weights.square().sum().clamp(min=1e-30) * count)


# ---- algorithms over groups of siblings


@dataclass(frozen=True)
class GroupVariant:
    """A published algorithm on groups of siblings; `source` is its paper.

    See `LossParameters`, `advantages.group_advantages` and `reduce_loss` for the values.
    """

    source: str
    loss: str = "ppo"
    clip_high: float | None = None
    baseline: Baseline = "mean"
    scale: Scale = "group"
    zero_variance: ZeroVarianceRule = "keep"
    reduction: Reduction = "sequence"


GroupVariantName = Literal["grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo"]
"""Names of `GROUP_VARIANTS`."""

GROUP_VARIANTS: Mapping[str, GroupVariant] = MappingProxyType(
    {
        "grpo": GroupVariant("DeepSeekMath, arXiv:2402.03300, eq. 3"),
        "dr_grpo": GroupVariant(
            "Understanding R1-Zero-like training, arXiv:2503.20783",
            scale="none",
            reduction="sum_over_length",
        ),
        "dapo": GroupVariant(
            "DAPO, arXiv:2503.14476, eq. 8; dropped groups are not sampled again, and the penalty "
            "on overlong answers is an option",
            clip_high=0.28,
            zero_variance="drop",
            reduction="token",
        ),
        "cispo": GroupVariant(
            "MiniMax-M1, arXiv:2506.13585, eq. 4 and 5",
            loss="cispo",
            zero_variance="drop",
            reduction="token",
        ),
        "gspo": GroupVariant("GSPO, arXiv:2507.18071, eq. 5 and 7", loss="gspo"),
        "rloo": GroupVariant(
            "Back to basics, arXiv:2402.14740; clipped, for later epochs",
            loss="rloo",
            baseline="leave_one_out",
            scale="none",
            reduction="sequence_sum",
        ),
    }
)
