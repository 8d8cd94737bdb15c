"""How much better an action was than expected: over the turns of an episode, or among siblings.

Shape suffixes: `E` episode, `H` step of an episode (turn or token), `P` group, `G` sibling.
No gradient flows through an advantage.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.masked import masked_fill_zero, masked_mean, masked_sum

Baseline = Literal["mean", "leave_one_out", "none"]
"""What a reward is compared with, see `group_advantages`."""

ZeroVarianceRule = Literal["keep", "drop"]
"""Whether siblings that all have one reward stay in the batch, see `group_advantages`."""


class AdvantageEstimate(NamedTuple):
    """Advantages and what the values are to be trained towards.

    Attributes
    ----------
    advantages, returns : Tensor
        `[E, H]`, without gradient; 0 where the mask is False.
    """

    advantages: Tensor
    returns: Tensor


class GroupAdvantages(NamedTuple):
    """Advantages of siblings.

    Attributes
    ----------
    advantages_PG : Tensor
        In the dtype of the rewards, without gradient; 0 where the reward is NaN.
    is_used_PG : Tensor
        bool; False on samples that should not enter a batch: those without a reward, and with
        the rule "drop" those of groups of zero variance.
    is_zero_variance_P : Tensor
        bool; True on groups that have a reward and tell nothing: all rewards are equal, or there
        is one only.
    """

    advantages_PG: Tensor
    is_used_PG: Tensor
    is_zero_variance_P: Tensor


def gae(
    rewards_EH: Tensor,
    values_EH: Tensor,
    mask_EH: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_E: Tensor | None = None,
) -> AdvantageEstimate:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16).

    `A_t = sum_l (gamma * lam)**l * delta_(t+l)` with
    `delta_t = r_t + gamma * V_(t+1) - V_t`, and `return_t = A_t + V_t`. Steps where the mask is
    False do not exist: those around them follow each other. `lam = 1` gives discounted returns
    minus values, `lam = 0` one-step errors.

    Parameters
    ----------
    rewards_EH : Tensor
        Reward of each step.
    values_EH : Tensor
        Expected return from each step on, before acting.
    mask_EH : Tensor
        bool; True on steps that were taken.
    gamma, lam : float
        Discount and trade of bias (0) for variance (1), in [0, 1].
    bootstrap_E : Tensor, optional
        Value after the last step of episodes that were cut off; without it they ended, value 0.
    """
    rewards, values = rewards_EH.detach(), values_EH.detach()
    # Steps that count move to the front in order, so that neighbours stand beside each other.
    order = torch.argsort(mask_EH.logical_not().to(torch.uint8), dim=1, stable=True)
    counts = mask_EH.sum(dim=1, keepdim=True)
    place = torch.arange(rewards.shape[1], device=rewards.device)
    is_step = place < counts
    reward = masked_fill_zero(rewards.gather(1, order), is_step)
    value = masked_fill_zero(values.gather(1, order), is_step)
    following = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    if bootstrap_E is not None:
        following = torch.where(
            place == counts - 1, bootstrap_E.detach().unsqueeze(1).to(value.dtype), following
        )
    delta = masked_fill_zero(reward + gamma * following - value, is_step)
    distance = place.unsqueeze(1) - place
    decay = torch.full((), gamma * lam, dtype=delta.dtype, device=delta.device)
    # weight[s, t] = (gamma * lam)**(s - t) for s >= t: no loop over steps.
    weight = (decay ** distance.clamp(min=0)).tril()
    advantages = torch.zeros_like(delta).scatter(1, order, delta @ weight)
    advantages = masked_fill_zero(advantages, mask_EH)
    return AdvantageEstimate(advantages, masked_fill_zero(advantages + values, mask_EH))


def group_advantages(
    rewards_PG: Tensor,
    *,
    baseline: Baseline,
    std_epsilon: float | None,
    zero_variance: ZeroVarianceRule = "keep",
) -> GroupAdvantages:
    """Compare each reward with those of its siblings.

    - `mean`: `r - mean` (GRPO, arXiv:2402.03300);
    - `leave_one_out`: `r - mean of the others`, which is `G / (G - 1)` times the former (RLOO,
      arXiv:2402.14740);
    - `none`: `r` itself; no group is of zero variance then.

    With a `std_epsilon` the difference is divided by `std + std_epsilon`, where std is the
    unbiased standard deviation (divided by G - 1) of the rewards of the group.

    Siblings whose reward is NaN are left out of mean, standard deviation and count. A group of
    equal rewards, or with one only, gives exactly 0.

    Parameters
    ----------
    rewards_PG : Tensor
        A row a group; NaN where there is no verdict.
    std_epsilon : float, optional
        >= 0; None divides by nothing.
    zero_variance : "keep" or "drop"
        Whether groups of zero variance stay in the batch: their policy gradient is 0, but they
        count in its denominator and in penalties.

    Raises
    ------
    ConfigurationError
        For an unknown baseline, or a standard deviation without a baseline.
    """
    _check_baseline(baseline, std_epsilon)
    rewards = rewards_PG.detach()
    is_known = rewards.isnan().logical_not()
    known = masked_fill_zero(rewards, is_known)
    if baseline == "none":
        nowhere = torch.zeros(rewards.shape[0], dtype=torch.bool, device=rewards.device)
        return GroupAdvantages(known, is_known, nowhere)
    counts = is_known.sum(dim=1, keepdim=True)
    differences = masked_fill_zero(
        known - masked_mean(known, is_known, dim=1).unsqueeze(1), is_known
    )
    # Equality, not a small deviation: rounding of the mean would be divided by nearly nothing.
    first = known.gather(1, is_known.to(torch.uint8).argmax(dim=1, keepdim=True))
    is_equal = ((known == first) | ~is_known).all(dim=1, keepdim=True)
    advantages = differences
    others = (counts - 1).clamp(min=1)
    if baseline == "leave_one_out":
        advantages = advantages * counts / others
    if std_epsilon is not None:
        std = (differences.square().sum(dim=1, keepdim=True) / others).sqrt()
        advantages = advantages / torch.where(is_equal, 1.0, std + std_epsilon)
    advantages = masked_fill_zero(advantages, is_known & ~is_equal)
    is_used = is_known if zero_variance == "keep" else is_known & ~is_equal
    return GroupAdvantages(advantages, is_used, (is_equal & (counts > 0)).squeeze(1))


def _check_baseline(baseline: str, std_epsilon: float | None) -> None:
    if baseline not in ("mean", "leave_one_out", "none"):
        raise ConfigurationError(
            f"rewards were to be compared with the baseline {baseline!r}, which is not known. "
            f"Known baselines: mean, leave_one_out, none. Choose one of these."
        )
    if baseline == "none" and std_epsilon is not None:
        raise ConfigurationError(
            f"rewards were to be divided by their standard deviation (std_epsilon {std_epsilon}) "
            f"with the baseline 'none', which would give equal rewards a vast advantage. Use the "
            f"baseline 'mean' or 'leave_one_out', or set std_epsilon to null."
        )


def whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale values to mean 0 and unbiased standard deviation 1 over the mask.

    `(x - mean) / (std + epsilon)`; 0 where the mask is False, and everywhere where all values are
    equal or only one counts. Any shape. It reads the whole batch: whiten before a batch is split.
    """
    values = values.detach()
    differences = masked_fill_zero(values - masked_mean(values, mask), mask)
    num_others = (mask.sum() - 1).clamp(min=1)
    std = (differences.square().sum() / num_others).sqrt()
    largest = masked_fill_zero(values, mask).abs().max() if values.numel() else std
    # Below this all that is left of the differences is the rounding of the mean.
    is_flat = std <= largest * torch.finfo(values.dtype).eps * 8
    return torch.where(is_flat, torch.zeros_like(differences), differences / (std + epsilon))


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of returns that values explain, `1 - Var(R - V) / Var(R)`, scalar.

    1 is perfect, 0 as good as a constant, below 0 worse; NaN where the returns do not vary. It is
    no mean over rows: give it a whole iteration.
    """
    values, returns = values.detach(), returns.detach()

    def spread(x: Tensor) -> Tensor:
        return masked_sum((x - masked_mean(x, mask)).square(), mask)

    total = spread(returns)
    nan = torch.full_like(total, torch.nan)
    return torch.where(total > 0, 1 - spread(returns - values) / total, nan)
