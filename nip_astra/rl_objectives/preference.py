"""Preference losses: on pairs, on single answers, and without a reference.

Log-ratios are `log policy - log reference` of whole answers, nats, with gradient;
log-probabilities are those of `sequence_logprobs`.

Shape suffixes: `B` pair, answer or row, `T` token.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.reductions import LossOutput, masked_mean, masked_sum, mean_over_rows

PreferenceKind = Literal["sigmoid", "hinge", "robust", "ipo"]
"""Losses of `preference_loss`."""

PairKind = Literal["nca", "sppo", "apo_zero", "apo_down"]
"""Losses of `pair_loss`."""

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
"""Divergences of `divergence_scores`."""

PREFERENCE_KINDS: tuple[PreferenceKind, ...] = ("sigmoid", "hinge", "robust", "ipo")


def sequence_logprobs(logprobs_BT: Tensor, mask_BT: Tensor, *, length_normalised: bool) -> Tensor:
    """Return each row's log-probability, `[B]` nats: the sum over its tokens, or their mean.

    The mean keeps preference losses from growing with length, and from preferring short probes; the
    sum is the sequence's own log-probability. A row without tokens gives 0.
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
    """Compute the loss on pairs of a chosen and a rejected answer, mean over pairs.

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

    Metrics: `preference_margin`, mean of `beta h`, and `preference_accuracy`, the share of pairs
    where it is positive. The loss is 0 without pairs.

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

    Raises
    ------
    ConfigurationError
        For an unknown kind, or a value that the kind cannot use.
    """
    if kind not in PREFERENCE_KINDS:
        raise ConfigurationError(
            f"unknown preference loss {kind!r}. Known: {', '.join(PREFERENCE_KINDS)}."
        )
    _check_positive(kind, beta=beta)
    if label_smoothing != 0 and kind not in ("sigmoid", "robust"):
        raise ConfigurationError(
            f"the preference loss {kind!r} does not read label_smoothing {label_smoothing}. Set it "
            "to 0, or choose sigmoid or robust."
        )
    if not 0 <= label_smoothing < 0.5:
        raise ConfigurationError(
            f"label_smoothing must be at least 0 and below 0.5; got {label_smoothing}."
        )
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
    return LossOutput(mean_over_rows(losses_B), _metrics(margins_B))


def pair_loss(
    chosen_logratios_B: Tensor, rejected_logratios_B: Tensor, *, kind: PairKind, beta: float
) -> LossOutput:
    """Compute the loss of pairs from the log-ratio of each answer, mean over pairs; 0 if none.

    With `c`, `r` the log-ratios of chosen and rejected and `s` the sigmoid:

    - `nca`: `-log s(beta c) - 1/2 log s(-beta c) - 1/2 log s(-beta r)` (arXiv:2402.05369);
    - `sppo`: `(c - 1/(2 beta))**2 + (r + 1/(2 beta))**2` (arXiv:2405.00675, eq. 4.7, with hard
      wins); it has the square of the scale of log-ratios: choose beta for sums or for means;
    - `apo_zero`: `1 - s(beta c) + s(beta r)`: for answers better than the policy's own
      (arXiv:2408.06266, eq. 7);
    - `apo_down`: `s(beta c) + 1 - s(beta (c - r))`: for worse ones (eq. 8).

    `beta` is > 0; larger stays closer to the reference. Metrics as of `preference_loss`.
    """
    _check_positive(kind, beta=beta)
    chosen_B, rejected_B = chosen_logratios_B, rejected_logratios_B
    margins_B = beta * (chosen_B - rejected_B)
    if kind == "nca":
        away_B = F.logsigmoid(-beta * chosen_B) + F.logsigmoid(-beta * rejected_B)
        losses_B = -F.logsigmoid(beta * chosen_B) - away_B / 2
    elif kind == "sppo":
        losses_B = (chosen_B - 0.5 / beta).square() + (rejected_B + 0.5 / beta).square()
    elif kind == "apo_zero":
        losses_B = torch.sigmoid(-beta * chosen_B) + torch.sigmoid(beta * rejected_B)
    elif kind == "apo_down":
        losses_B = torch.sigmoid(beta * chosen_B) + torch.sigmoid(-margins_B)
    else:
        kinds = "nca, sppo, apo_zero, apo_down"
        raise ConfigurationError(f"unknown loss of pairs {kind!r}. Known: {kinds}.")
    return LossOutput(mean_over_rows(losses_B), _metrics(margins_B))


def divergence_scores(logratios_B: Tensor, kind: Divergence, *, alpha: float = 0.5) -> Tensor:
    """Compute `f'(policy / reference)`, f-DPO's (arXiv:2309.16240) substitute for the log-ratio.

    The difference of the scores of chosen and rejected enters `preference_loss`, with reference
    log-ratios 0. With `t = policy / reference`:

    - `reverse_kl`: `log t`, which is DPO itself;
    - `forward_kl`: `-1 / t`;
    - `js`: `log(2 t / (1 + t))`;
    - `alpha`: `(t**(alpha - 1) - 1) / (alpha - 1)`, alpha in (0, 1), of TRL; 1 minus that of the
      paper. It nears `reverse_kl` as alpha nears 1 and `forward_kl` as it nears 0, but for a
      constant.

    Powers of t are held within those of 80 nats.
    """
    if kind == "reverse_kl":
        return logratios_B
    if kind == "forward_kl":
        return -torch.exp((-logratios_B).clamp(max=80))
    if kind == "js":
        return math.log(2) + F.logsigmoid(logratios_B)
    if kind != "alpha":
        raise ConfigurationError(
            f"unknown divergence {kind!r}. Known: reverse_kl, forward_kl, js, alpha."
        )
    if not 0 < alpha < 1:
        raise ConfigurationError(
            f"alpha must lie between 0 (forward_kl) and 1 (reverse_kl); got {alpha}."
        )
    return torch.expm1(((alpha - 1) * logratios_B).clamp(max=80)) / (alpha - 1)


def simpo_loss(
    chosen_logprobs_B: Tensor, rejected_logprobs_B: Tensor, *, beta: float, margin: float
) -> LossOutput:
    """`-log sigmoid(beta (c - r) - margin)` without a reference (SimPO, arXiv:2405.14734, eq. 6).

    `c` and `r` are *means* of log-probabilities over the tokens of each answer. `beta` is > 0, 2 to
    10 in the paper, since means are small; `margin`, the gamma of the paper, is >= 0.
    """
    _check_positive("simpo", beta=beta)
    logits_B = beta * (chosen_logprobs_B - rejected_logprobs_B)
    return LossOutput(mean_over_rows(-F.logsigmoid(logits_B - margin)), _metrics(logits_B))


def orpo_loss(
    chosen_logprobs_B: Tensor, rejected_logprobs_B: Tensor, chosen_nll_B: Tensor, *, weight: float
) -> LossOutput:
    """`nll - weight log sigmoid(log odds(c) - log odds(r))` (ORPO, arXiv:2403.07691).

    `odds = p / (1 - p)`, with `log p` the *mean* of log-probabilities over an answer's tokens;
    `chosen_nll_B` are nats per token, with gradient. `weight` is the lambda of the paper, > 0;
    larger prefers more and imitates less.
    """
    _check_positive("orpo", weight=weight)
    odds_B = _log_odds(chosen_logprobs_B) - _log_odds(rejected_logprobs_B)
    return LossOutput(
        mean_over_rows(chosen_nll_B - weight * F.logsigmoid(odds_B)), _metrics(odds_B)
    )


def _log_odds(logprobs_B: Tensor) -> Tensor:
    # log(1 - p) of a probability near 1 needs expm1; p = 1 is clamped below.
    logprobs_B = logprobs_B.clamp(max=-torch.finfo(logprobs_B.dtype).eps)
    return logprobs_B - torch.log(-torch.expm1(logprobs_B))


def kto_loss(
    logratios_B: Tensor,
    is_desirable_B: Tensor,
    *,
    beta: float,
    baseline: Tensor | float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossOutput:
    """Compute the mean loss on single answers, desirable or not (KTO, arXiv:2402.01306, eq. 7).

    `w_d (1 - sigmoid(beta (h - z)))` for desirable ones, `w_u (1 - sigmoid(beta (z - h)))` for
    others, with `h` the log-ratio and `z` the baseline: the divergence of the policy from the
    reference, estimated on mismatched answers and held at 0 or above; no gradient flows. A baseline
    of 0 leaves it out (the unpaired loss of APO-zero). `is_desirable_B` is bool.
    """
    _check_positive("kto", beta=beta)
    z = torch.as_tensor(baseline, dtype=logratios_B.dtype, device=logratios_B.device)
    z = z.detach().clamp(min=0)
    sign_B = torch.where(is_desirable_B, 1.0, -1.0).to(logratios_B.dtype)
    weight_B = torch.where(is_desirable_B, desirable_weight, undesirable_weight)
    margins_B = beta * sign_B * (logratios_B - z)
    losses_B = weight_B.to(logratios_B.dtype) * torch.sigmoid(-margins_B)
    return LossOutput(mean_over_rows(losses_B), _metrics(margins_B))


def _metrics(margins_B: Tensor) -> dict[str, Tensor]:
    margins_B = margins_B.detach()
    return {
        "preference_margin": mean_over_rows(margins_B),
        "preference_accuracy": mean_over_rows((margins_B > 0).float()),
    }


def _check_positive(kind: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigurationError(
                f"{name} of the preference loss {kind!r} must be positive; got {value}."
            )
