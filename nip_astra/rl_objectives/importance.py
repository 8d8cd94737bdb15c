"""Weights that turn means over samples of one distribution into means under another.

Shape suffixes: `B` row (sample), `T` token.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import masked_fill_zero, masked_sum

ImportanceLevel = Literal["token", "sequence"]
"""Over what the ratio of probabilities is taken, see `importance_weights`."""


def importance_weights(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: ImportanceLevel,
    max_ratio: float,
) -> Tensor:
    """Truncated importance weights, `min(pi / mu, max_ratio)` (Ionides, 2008).

    With `pi` the policy whose gradient is wanted and `mu` the behaviour that sampled:

    - `sequence`: the ratio of the whole row, at each of its tokens. Without truncation a mean over
      samples of `mu` is then the mean under `pi` of the rows that `mu` can sample; the variance
      grows with their length;
    - `token`: the ratio of each token, as truncated by IMPALA (arXiv:1802.01561) and by decoupled
      PPO (arXiv:2110.00641, arXiv:2505.24298). Exact for rows of one token; for longer ones it
      leaves aside that `mu` comes to other beginnings, and goes on otherwise, than `pi`.

    Parameters
    ----------
    logprobs_BT, behaviour_logprobs_BT : Tensor
        log pi and log mu of the sampled tokens, nats.
    max_ratio : float
        > 0. Larger has less bias and more variance.

    Returns
    -------
    Tensor
        `[B, T]`, without gradient; 0 on padding.
    """
    log_ratio_BT = masked_fill_zero(logprobs_BT.detach() - behaviour_logprobs_BT.detach(), mask_BT)
    if level == "sequence":
        log_ratio_BT = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1).expand_as(mask_BT)
    return masked_fill_zero(log_ratio_BT.exp().clamp(max=max_ratio), mask_BT)


CorrectionMode = Literal["truncate", "mask"]
"""What is done with ratios out of bounds, see `mismatch_weights`."""


def mismatch_weights(
    logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: ImportanceLevel = "token",
    mode: CorrectionMode = "truncate",
    min_ratio: float = 0.0,
    max_ratio: float = 2.0,
) -> Tensor:
    """Weights for tokens that another program sampled than the one that scores them.

    With `w = pi / mu` of each token, or of the whole row, pi as the trainer computes it before the
    update and mu as the sampler did:

    - `truncate`: `clip(w, min_ratio, max_ratio)` (truncated importance sampling);
    - `mask`: w within the bounds and 0 out of them, so that what does not fit is left out
      (IcePop; the `token_mask` and `sequence_mask` of TRL).

    Parameters
    ----------
    min_ratio, max_ratio : float
        Bounds of the ratio, `min_ratio <= 1 <= max_ratio`. Wider ones have less bias and more
        variance.

    Returns
    -------
    Tensor
        `[B, T]`, without gradient; 0 on padding.

    Raises
    ------
    ConfigurationError
        For an unknown mode or level, or bounds that do not lie about 1.
    """
    if mode not in ("truncate", "mask") or level not in ("token", "sequence"):
        raise ConfigurationError(
            f"unknown correction {mode!r} by {level!r}. Known modes: truncate, mask; known levels: "
            "token, sequence."
        )
    if not 0 <= min_ratio <= 1 <= max_ratio:
        raise ConfigurationError(
            f"bounds of ratios must lie about 1, for instance 0 and 2; got {min_ratio} and "
            f"{max_ratio}."
        )
    log_ratio_BT = masked_fill_zero(logprobs_BT.detach() - sampler_logprobs_BT.detach(), mask_BT)
    if level == "sequence":
        log_ratio_BT = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1).expand_as(mask_BT)
    ratio_BT = log_ratio_BT.exp()
    if mode == "truncate":
        return masked_fill_zero(ratio_BT.clamp(min_ratio, max_ratio), mask_BT)
    return masked_fill_zero(ratio_BT, mask_BT & (ratio_BT >= min_ratio) & (ratio_BT <= max_ratio))


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """`(sum w)**2 / sum w**2` over the number of weights: 1 where all are alike, scalar."""
    weights = masked_fill_zero(weights.detach(), mask)
    count = mask.sum().clamp(min=1)
    return weights.sum().square() / (weights.square().sum().clamp(min=1e-30) * count)
