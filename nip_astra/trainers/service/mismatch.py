"""How unlike the policy that sampled and the one that learns are.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nip_astra.rl_objectives.kl import kl_estimate
from nip_astra.rl_objectives.policy_losses import (
    ImportanceLevel,
    effective_sample_size,
    importance_weights,
)
from nip_astra.rl_objectives.reductions import masked_mean


def mismatch_metrics(
    sampled_BT: Tensor, scored_BT: Tensor, mask_BT: Tensor, *, level: ImportanceLevel = "token"
) -> dict[str, float]:
    """Figures of log-probabilities by which tokens were sampled, and of those that are learnt with.

    `mismatch/kl` (k3 of KL(sampler || policy), nats a token), `mismatch/largest_gap` (nats) and
    `mismatch/effective_sample_size` (share; 1 where the two agree).
    """
    weights_BT = importance_weights(
        scored_BT, sampled_BT, mask_BT, level=level, max_ratio=torch.inf
    )
    kl_BT = kl_estimate(sampled_BT, scored_BT, "k3", mask_BT=mask_BT)
    gap_BT = (sampled_BT - scored_BT).abs() * mask_BT
    return {
        "mismatch/kl": float(masked_mean(kl_BT, mask_BT)),
        "mismatch/largest_gap": float(gap_BT.max()),
        "mismatch/effective_sample_size": float(effective_sample_size(weights_BT, mask_BT)),
    }
