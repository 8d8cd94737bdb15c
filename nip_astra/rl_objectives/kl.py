"""KL divergence of a policy from its reference: estimators, penalty and controllers of its weight.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.parameters.conditions import where_above, where_given
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.reductions import bounded, masked_fill_zero, masked_mean, masked_sum

KlKind = Literal["k1", "k2", "k3"]
"""Estimators of KL(policy || reference) from one sample, see `kl_estimate`."""

KL_KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")
KL_TOLERANCE = 1.5
"""`step_kl_weights` changes a weight if the divergence is off its target by this factor."""


def kl_estimate(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    kind: KlKind,
    *,
    mask_BT: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at each token sampled by the policy, `[B, T]` nats.

    With `d = log policy - log reference` (J. Schulman, "Approximating KL divergence", 2020):

    - `k1 = d`: unbiased, may be negative. As a loss its gradient is 0 on average (the expected
      score): use it in the reward, without gradient;
    - `k2 = d**2 / 2`: biased, >= 0. Its gradient `d * grad log policy` is on average that of
      KL(policy || reference): the one to use in a loss;
    - `k3 = exp(-d) - 1 + d`: unbiased, >= 0, exact for d within 20 nats of 0, where it is held
      (`reductions.MAX_LOG_RATIO`). Its gradient `(1 - exp(-d)) * grad log policy` is on average
      that of KL(reference || policy).

    On average: over tokens sampled from the policy itself, at one position after a fixed prefix.
    The gradient of a sum of k2 or k3 over a sequence is not that of the divergence between
    distributions of sequences, because a token also decides the later prefixes; for that there is
    `sequence_kl_estimate`.

    Parameters
    ----------
    logprobs_BT, reference_logprobs_BT : Tensor
        Log-probabilities of the sampled tokens, nats; gradients flow through the first alone.
    mask_BT : Tensor, optional
        bool; the estimate is 0 where it is False. Without it padding must be finite.

    Raises
    ------
    ConfigurationError
        For an unknown kind.
    """
    difference_BT = logprobs_BT - reference_logprobs_BT.detach()
    if mask_BT is not None:
        # Before exp: the gradient of an infinite value times 0 would be NaN.
        difference_BT = masked_fill_zero(difference_BT, mask_BT)
    if kind == "k1":
        return difference_BT
    if kind == "k2":
        return difference_BT.square() / 2
    if kind == "k3":
        difference_BT = bounded(difference_BT)
        return torch.expm1(-difference_BT) + difference_BT
    raise ConfigurationError(f"unknown KL estimator {kind!r}. Known: {', '.join(KL_KINDS)}.")


def straight_through_kl(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    value: KlKind,
    gradient: KlKind,
) -> Tensor:
    """Return one estimator with the gradient of another, `value + (gradient - sg[gradient])`.

    `[B, T]` nats per token; 0 where the mask is False. With the gradient of `k2` the penalty acts
    as KL(policy || reference), with that of `k3` as KL(reference || policy), whichever is reported;
    the gradient of `k1`, 0 on average, is refused. See `kl_estimate` for the parameters.
    """
    if gradient == "k1":
        raise ConfigurationError(
            "the gradient of the KL estimator 'k1' is 0 on average. Use 'k2' (reverse divergence) "
            "or 'k3' (forward)."
        )
    value_BT = kl_estimate(logprobs_BT.detach(), reference_logprobs_BT, value, mask_BT=mask_BT)
    gradient_BT = kl_estimate(logprobs_BT, reference_logprobs_BT, gradient, mask_BT=mask_BT)
    return value_BT + gradient_BT - gradient_BT.detach()


def sequence_kl_estimate(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
) -> Tensor:
    """Compute k2 of sequences, `1/2 (sum over tokens of log policy - log reference)**2`, `[B]`.

    Its gradient is on average, over sequences sampled from the policy itself, that of KL(policy ||
    reference) between the distributions of sequences. Its value is larger than `kl_estimate`
    summed, and by more the longer sequences are. `weights_BT` multiply each token's gradient, but
    not the value: importance weights where another distribution than the policy sampled.
    """
    difference_BT = logprobs_BT - reference_logprobs_BT.detach()
    sum_B = masked_sum(difference_BT, mask_BT, dim=1)
    if weights_BT is None:
        return sum_B.square() / 2
    slope_B = sum_B.detach() * masked_sum(weights_BT.detach() * difference_BT, mask_BT, dim=1)
    return slope_B - slope_B.detach() + sum_B.detach().square() / 2


class KlParameters(SubParameters):
    """KL penalty of the loss."""

    weight: float = Field(default=0.0, ge=0)
    """Loss per nat of divergence and token. Larger stays closer to the reference."""
    value: KlKind = "k3"
    """Estimator of the divergence that is reported, see `rl_objectives.kl.kl_estimate`."""
    gradient: Annotated[Literal["k2", "k3"], where_above("weight", 0)] = "k2"
    """Estimator whose gradient is taken: k2 acts as KL(policy || reference), k3 as the reverse."""
    target: float | None = Field(default=None, gt=0)
    """Target divergence per token (nats) to which the weight is adapted; null fixes the weight."""
    horizon: Annotated[float, where_given("target")] = Field(default=2000.0, gt=0)
    """Number of samples over which an adapted weight changes by at most 20 %."""

    def controller(self) -> AdaptiveKl:
        """Return the controller of the weight."""
        return AdaptiveKl(weight=self.weight, target=self.target, horizon=self.horizon)


@torch.no_grad()
def step_kl_weights(
    weights_A: Tensor, kl_A: Tensor, *, target: float, increment: float, decrement: float
) -> None:
    """Multiply weights in place: by `increment` at high divergence, `decrement` at low.

    That is where it exceeds the target 1.5 times, or falls short of it by as much (PPO,
    arXiv:1707.06347, section 4). A divergence that is NaN, not measured, leaves the weight.
    """
    weights_A.mul_(torch.where(kl_A > KL_TOLERANCE * target, increment, 1.0))
    weights_A.mul_(torch.where(kl_A < target / KL_TOLERANCE, decrement, 1.0))


class AdaptiveKl:
    """The weight of a KL penalty, adapted to hold the divergence near a target.

    After each update `weight *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`
    (Ziegler et al., arXiv:1909.08593, section 2.2): it grows where the policy is further from the
    reference than the target, and falls where it is nearer. More samples than the horizon count
    as the horizon, so that the weight stays positive.

    Parameters
    ----------
    weight : float
        The initial weight, > 0 with a target.
    target : float, optional
        Divergence to hold, > 0, in the unit of `update`; without one the weight stays.
    horizon : float
        Samples after which a weight that is off by 20 % or more has changed by 20 %, > 0. Larger
        is slower.
    """

    MAX_ERROR = 0.2

    def __init__(self, *, weight: float, target: float | None, horizon: float) -> None:
        values = {"weight": weight, "target": target, "horizon": horizon}
        for name, value in values.items():
            if target is not None and not (value is not None and value > 0):
                raise ConfigurationError(
                    f"the {name} of an adaptive KL penalty must be positive; got {value}."
                )
        self.weight = weight
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, *, num_samples: int) -> float:
        """Adapt the weight to the divergence measured on `num_samples` samples, and return it.

        Raises
        ------
        NonFiniteLossError
            When the divergence is not a finite number.
        """
        if self.target is None:
            return self.weight
        if not math.isfinite(kl):
            raise NonFiniteLossError(
                f"the KL divergence is {kl}. Lower the learning rate, or look for "
                "log-probabilities of minus infinity in the last rollout."
            )
        error = min(max(kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.weight *= 1.0 + error * min(num_samples / self.horizon, 1.0)
        return self.weight

    def adapt(
        self, logprobs_BT: Tensor, reference_logprobs_BT: Tensor, mask_BT: Tensor
    ) -> dict[str, float]:
        """Adapt the weight to samples, if there is a target; return metrics."""
        if self.target is None:
            return {}
        kl_BT = kl_estimate(logprobs_BT, reference_logprobs_BT, "k3", mask_BT=mask_BT)
        metrics = {"kl/reference": float(masked_mean(kl_BT, mask_BT)), "kl/weight": self.weight}
        self.update(metrics["kl/reference"], num_samples=len(mask_BT))
        return metrics

    def state(self) -> dict[str, float]:
        """Return the weight, for a checkpoint."""
        return {"weight": self.weight}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the weight of `state`."""
        self.weight = float(state["weight"])
