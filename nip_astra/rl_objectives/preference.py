"""Losses over preference pairs.

Shape suffixes: `B` pair, `T` token.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nip_astra.rl_objectives.outputs import LossOutput


def dpo_loss(
    policy_logratios_B: Tensor, reference_logratios_B: Tensor, *, beta: float
) -> LossOutput:
    """Direct preference optimisation loss (arXiv:2305.18290, eq. 7), mean over pairs.

    `-log sigmoid(beta * (policy - reference))`; it falls as the chosen probe becomes more likely
    against the rejected one than it is under the reference.

    Parameters
    ----------
    policy_logratios_B : Tensor
        log p(chosen) - log p(rejected) under the policy, each summed over its tokens; nats, with
        gradient.
    reference_logratios_B : Tensor
        The same under the reference, without gradient.
    beta : float
        Inverse temperature, > 0. Larger stays closer to the reference.

    Returns
    -------
    LossOutput
        Metrics: `preference_margin`, mean of `beta * (policy - reference)`, and
        `preference_accuracy`, the share of pairs where it is positive.
    """
    margins_B = beta * (policy_logratios_B - reference_logratios_B.detach())
    return LossOutput(
        loss=-F.logsigmoid(margins_B).mean(),
        metrics={
            "preference_margin": margins_B.detach().mean(),
            "preference_accuracy": (margins_B.detach() > 0).float().mean(),
        },
    )
