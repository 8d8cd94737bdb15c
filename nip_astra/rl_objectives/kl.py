"""How far a policy went from its reference, and a weight that holds it at a distance.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError, NonFiniteLossError
from nip_astra.rl_objectives.masked import masked_fill_zero, masked_sum
from nip_astra.rl_objectives.ratios import bounded

KlKind = Literal["k1", "k2", "k3"]
"""Estimators of KL(policy || reference) from one sample, see `kl_estimate`."""

KL_KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3")


def kl_estimate(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    kind: KlKind,
    *,
    mask_BT: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) at every token from the token that the policy sampled.

    With `d = log policy - log reference` (J. Schulman, "Approximating KL divergence", 2020):

    - `k1 = d`: unbiased, may be negative. As a loss its gradient is 0 on average (the expected
      score): use it in the reward, without gradient;
    - `k2 = d**2 / 2`: biased, >= 0. Its gradient `d * grad log policy` is on average that of
      KL(policy || reference): the one to use in a loss;
    - `k3 = exp(-d) - 1 + d`: unbiased, >= 0, exact for d within 20 nats of 0, where it is held
      (`ratios.MAX_LOG_RATIO`). Its gradient
      `(1 - exp(-d)) * grad log policy` is on average that of KL(reference || policy).

    On average: over tokens sampled from the policy itself, at one position after what was sampled
    before. A sum of these over the positions of a sequence leaves out that a token decides what may
    follow: of k2 and k3 its gradient is not that of the divergence between the distributions of
    sequences, for which there is `sequence_kl_estimate`.

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the sampled tokens under the policy, nats; gradients flow.
    reference_logprobs_BT : Tensor
        The same under the reference; no gradient flows.
    mask_BT : Tensor, optional
        bool; the estimate is 0 where it is False. Without it padding must be finite.

    Returns
    -------
    Tensor
        `[B, T]` nats per token.

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
    raise ConfigurationError(
        f"the KL divergence was to be estimated by {kind!r}, which is not known. Known kinds: "
        f"{', '.join(KL_KINDS)}. Choose one of these."
    )


def straight_through_kl(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    value: KlKind,
    gradient: KlKind,
) -> Tensor:
    """One estimate's value with another one's gradient, `value + (gradient - sg[gradient])`.

    With the gradient of `k2` the penalty pulls as KL(policy || reference) does, with that of `k3`
    as KL(reference || policy), whichever is shown; see `kl_estimate`, whose parameters these are.

    Returns
    -------
    Tensor
        `[B, T]` nats per token; 0 where the mask is False.

    Raises
    ------
    ConfigurationError
        For an unknown kind, or the gradient of `k1`, which is 0 on average.
    """
    if gradient == "k1":
        raise ConfigurationError(
            "a KL penalty with the gradient of 'k1' was asked for; on average over samples of the "
            "policy that is 0, so nothing would be held back. Use the gradient of 'k2' (reverse "
            "divergence) or 'k3' (forward)."
        )
    shown_BT = kl_estimate(logprobs_BT.detach(), reference_logprobs_BT, value, mask_BT=mask_BT)
    pulls_BT = kl_estimate(logprobs_BT, reference_logprobs_BT, gradient, mask_BT=mask_BT)
    return shown_BT + pulls_BT - pulls_BT.detach()


def sequence_kl_estimate(
    logprobs_BT: Tensor,
    reference_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weights_BT: Tensor | None = None,
) -> Tensor:
    """k2 of whole sequences, `1/2 (sum over tokens of log policy - log reference)**2`.

    Its gradient is on average, over sequences sampled from the policy itself, that of KL(policy ||
    reference) between the distributions of sequences. Its value is no estimate of that divergence:
    it is larger than `kl_estimate` summed, and by more the longer sequences are.

    Parameters
    ----------
    logprobs_BT : Tensor
        Log-probabilities of the sampled tokens under the policy, nats; gradients flow.
    reference_logprobs_BT : Tensor
        The same under the reference; no gradient flows.
    weights_BT : Tensor, optional
        What each token's gradient is multiplied by, without gradient: importance weights where
        another distribution sampled than the policy. The value has none.

    Returns
    -------
    Tensor
        `[B]`.
    """
    difference_BT = logprobs_BT - reference_logprobs_BT.detach()
    sum_B = masked_sum(difference_BT, mask_BT, dim=1)
    if weights_BT is None:
        return sum_B.square() / 2
    slope_B = sum_B.detach() * masked_sum(weights_BT.detach() * difference_BT, mask_BT, dim=1)
    return slope_B - slope_B.detach() + sum_B.detach().square() / 2


class AdaptiveKl:
    """A weight of the KL penalty that holds the divergence near a target.

    After each update `weight *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon`
    (Ziegler et al., arXiv:1909.08593, section 2.2): it grows where the policy is further from the
    reference than the target, and falls where it is nearer. More samples than the horizon count
    as the horizon, so that the weight stays positive.

    Parameters
    ----------
    weight : float
        The weight to begin with, > 0.
    target : float
        Divergence to hold, > 0, in the unit of what `update` is given.
    horizon : float
        Samples after which a weight that is off by 20 % or more has changed by 20 %, > 0. Larger
        is slower.

    Raises
    ------
    ConfigurationError
        When one of these is not positive.
    """

    MAX_ERROR = 0.2

    def __init__(self, *, weight: float, target: float, horizon: float) -> None:
        for name, value in {"weight": weight, "target": target, "horizon": horizon}.items():
            if not value > 0:
                raise ConfigurationError(
                    f"the {name} of an adaptive KL penalty was given as {value}; it must be "
                    f"positive, for the weight is only ever multiplied. Give a positive {name}, "
                    f"or use a fixed weight."
                )
        self.weight = weight
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, *, num_samples: int) -> float:
        """Adapt the weight to the divergence that was measured on `num_samples`, and give it.

        Raises
        ------
        NonFiniteLossError
            When the divergence is not a finite number.
        """
        if not math.isfinite(kl):
            raise NonFiniteLossError(
                f"the weight of the KL penalty was to follow a divergence of {kl}, which is not "
                f"finite; the weight stays at {self.weight}. Lower the learning rate, or look for "
                f"log-probabilities of minus infinity in the last rollout."
            )
        error = min(max(kl / self.target - 1.0, -self.MAX_ERROR), self.MAX_ERROR)
        self.weight *= 1.0 + error * min(num_samples / self.horizon, 1.0)
        return self.weight

    def state(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"weight": self.weight}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` gave."""
        self.weight = float(state["weight"])
