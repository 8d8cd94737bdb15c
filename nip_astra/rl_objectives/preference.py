"""Losses over preference pairs.

Shape suffixes: `B` pair or row, `T` token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rl_objectives.reductions import masked_mean, masked_sum, mean_over_rows

PreferenceKind = Literal["sigmoid", "hinge", "robust", "ipo"]
"""Losses of `preference_loss`."""

PREFERENCE_KINDS: tuple[PreferenceKind, ...] = ("sigmoid", "hinge", "robust", "ipo")


def sequence_logprobs(logprobs_BT: Tensor, mask_BT: Tensor, *, length_normalised: bool) -> Tensor:
    """The log-probability of each row, `[B]` nats: the sum over its tokens, or their mean.

    The mean keeps preference losses from growing with length, and from preferring the shorter of
    two probes for being short; the sum is the sequence's own log-probability. Policy and reference
    have to be treated alike. A row without tokens gives 0.
    """
    if length_normalised:
        return masked_mean(logprobs_BT, mask_BT, dim=1)
    return masked_sum(logprobs_BT, mask_BT, dim=1)


def preference_loss(
    policy_logratios_B: Tensor,
    reference_logratios_B: Tensor,
    *,
    kind: PreferenceKind,
    beta: float,
    label_smoothing: float = 0.0,
) -> LossOutput:
    """Loss of pairs of which one is preferred, mean over pairs.

    With `h = policy - reference` and `s` the label smoothing:

    - `sigmoid`: `-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)`: DPO (arXiv:2305.18290,
      eq. 7), with `s` conservative DPO (E. Mitchell, 2023), which is least at a margin
      `beta h = log((1 - s) / s)` rather than at infinity;
    - `robust`: `(-(1 - s) log sigmoid(beta h) + s log sigmoid(-beta h)) / (1 - 2 s)`: on average
      DPO's loss on labels of which a share `s` was flipped (arXiv:2403.00409);
    - `ipo`: `(h - 1 / (2 beta))**2` (arXiv:2310.12036, eq. 17, where beta is called tau): it
      draws the log-ratio to a value, however sure the labels are. It has the square of the scale
      of `h`: choose beta for sums or for means over tokens (`sequence_logprobs`);
    - `hinge`: `max(0, 1 - beta h)` (SLiC, arXiv:2305.10425, with the margin of a reference).

    Parameters
    ----------
    policy_logratios_B : Tensor
        log p(chosen) - log p(rejected) under the policy, of `sequence_logprobs`; nats, with
        gradient.
    reference_logratios_B : Tensor
        The same under the reference; no gradient flows.
    beta : float
        > 0. Larger stays closer to the reference.
    label_smoothing : float
        Share of labels taken to be wrong, in [0, 0.5); for `sigmoid` and `robust`.

    Returns
    -------
    LossOutput
        Loss 0 without pairs. Metrics: `preference_margin`, mean of `beta h`, and
        `preference_accuracy`, the share of pairs where it is positive.

    Raises
    ------
    ConfigurationError
        For an unknown kind, or a value that the kind cannot use.
    """
    _check_preference(kind, beta, label_smoothing)
    logratios_B = policy_logratios_B - reference_logratios_B.detach()
    margins_B = beta * logratios_B
    if kind == "ipo":
        losses_B = (logratios_B - 1 / (2 * beta)).square()
    elif kind == "hinge":
        losses_B = torch.relu(1 - margins_B)
    else:
        share = label_smoothing
        right_B, wrong_B = -F.logsigmoid(margins_B), -F.logsigmoid(-margins_B)
        if kind == "robust":
            losses_B = ((1 - share) * right_B - share * wrong_B) / (1 - 2 * share)
        else:
            losses_B = (1 - share) * right_B + share * wrong_B if share else right_B
    margins_B = margins_B.detach()
    return LossOutput(
        loss=mean_over_rows(losses_B),
        metrics={
            "preference_margin": mean_over_rows(margins_B),
            "preference_accuracy": mean_over_rows((margins_B > 0).float()),
        },
    )


def _check_preference(kind: str, beta: float, label_smoothing: float) -> None:
    if kind not in PREFERENCE_KINDS:
        raise ConfigurationError(
            f"a preference loss of kind {kind!r} was asked for, which is not known. Known kinds: "
            f"{', '.join(PREFERENCE_KINDS)}. Choose one of these."
        )
    if not beta > 0:
        raise ConfigurationError(
            f"the preference loss {kind!r} was given beta {beta}; it must be positive, or nothing "
            f"is preferred. Give a positive beta, for instance 0.1."
        )
    if label_smoothing != 0 and kind not in ("sigmoid", "robust"):
        raise ConfigurationError(
            f"the preference loss {kind!r} was given label_smoothing {label_smoothing}, which it "
            f"does not use. Set it to 0, or choose the kind 'sigmoid' or 'robust'."
        )
    if not 0 <= label_smoothing < 0.5:
        raise ConfigurationError(
            f"the preference loss {kind!r} was given label_smoothing {label_smoothing}; as the "
            f"share of wrong labels it must be at least 0 and below 0.5. Give such a share."
        )
