"""Weights that turn means over samples of one distribution into means under another.

Shape suffixes: `B` row (sample), `T` token.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nip_astra.rl_objectives.masked import masked_fill_zero, masked_sum

ImportanceLevel = Literal["token", "sequence"]
"""Over what the ratio of probabilities is taken, see `importance_weights`."""


def importance_weights(
    logprobs_BT: Tensor,
    behaviour_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: ImportanceLevel,
    most: float,
) -> Tensor:
    """Truncated importance weights, `min(pi / mu, most)` (Ionides, 2008).

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
    most : float
        > 0. Larger has less bias and more variance.

    Returns
    -------
    Tensor
        `[B, T]`, without gradient; 0 on padding.
    """
    log_ratio_BT = masked_fill_zero(logprobs_BT.detach() - behaviour_logprobs_BT.detach(), mask_BT)
    if level == "sequence":
        log_ratio_BT = masked_sum(log_ratio_BT, mask_BT, dim=1).unsqueeze(1).expand_as(mask_BT)
    return masked_fill_zero(log_ratio_BT.exp().clamp(max=most), mask_BT)
