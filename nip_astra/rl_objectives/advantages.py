"""Advantages and returns: within groups of samples, along sequences, and in trees.

No gradient flows through any of these. In a tree, `parent_N` int64 is the index of the parent, -1
at the root; `depth_N` int64 counts from 0, a child is one deeper than its parent; nodes may be
in any order. A node whose reward is NaN has no verdict: its own result is NaN, and its parent
ignores it.

Shape suffixes: `N` sample or node, `P` group, `R` run, `E` sequence, `H` step of a sequence (token,
turn or round), `T` token, `...` any further dimensions, for instance agents; `B`
row (sample) of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, JsonValue, model_validator
from torch import Tensor

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.parameters.conditions import where
from nip_astra.parameters.parameters_base import SubParameters
from nip_astra.rl_objectives.reductions import masked_fill_zero, masked_mean
from nip_astra.rl_objectives.registry import (
    ADVANTAGES,
    AdvantageName,
    register_advantage,
    with_options,
)

Baseline = Literal["mean", "leave_one_out", "none"]
"""The baseline of a reward, see `group_advantages`."""

Scale = Literal["group", "batch", "none"]
"""Divisor of reward differences, see `group_advantages`."""

ZeroVarianceRule = Literal["keep", "drop"]
"""Whether samples of a group with equal rewards stay in the batch, see `group_advantages`."""


# ---- samples compared within a group


class GroupAdvantages(NamedTuple):
    """Advantages of samples, with statistics of their groups.

    Attributes
    ----------
    advantages_N : Tensor
        In the dtype of the rewards, without gradient; 0 where the reward is NaN.
    is_used_N : Tensor
        bool; False on samples to be left out of a batch: those without a reward, and with the rule
        "drop" those of groups of zero variance.
    is_zero_variance_P : Tensor
        bool; True on groups with rewards that are all equal, or of one run.
    std_P : Tensor
        Unbiased standard deviation of the runs' rewards; 0 for groups of one run.
    """

    advantages_N: Tensor
    is_used_N: Tensor
    is_zero_variance_P: Tensor
    std_P: Tensor

    def metrics(self) -> dict[str, float]:
        """Return `grpo/advantage_{mean,std,min,max}` and `grpo/used_fraction` over samples, and
        `grpo/num_groups`, `grpo/zero_variance_fraction` and `grpo/group_std_mean` over groups.
        """
        used = self.advantages_N[self.is_used_N].double()
        figures = {"grpo/num_groups": float(len(self.std_P))}
        if len(self.std_P):
            figures |= {
                "grpo/zero_variance_fraction": float(self.is_zero_variance_P.double().mean()),
                "grpo/group_std_mean": float(self.std_P.mean()),
                "grpo/used_fraction": float(self.is_used_N.float().mean()),
            }
        if len(used):
            figures |= {
                "grpo/advantage_mean": float(used.mean()),
                "grpo/advantage_std": float(used.std()) if len(used) > 1 else 0.0,
                "grpo/advantage_min": float(used.min()),
                "grpo/advantage_max": float(used.max()),
            }
        return figures


def codes_of(ids: Sequence[Hashable] | Tensor) -> Tensor:
    """Number ids in order of first appearance, int64 `[N]`; each None is a unique one."""
    numbers: dict[Hashable, int] = {}
    plain = ids.tolist() if isinstance(ids, Tensor) else ids
    keys = [object() if key is None else key for key in plain]
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


@register_advantage("group")
def group_advantages(
    rewards_N: Tensor,
    group_N: Tensor,
    run_N: Tensor | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    std_epsilon: float = 1e-6,
    zero_variance: ZeroVarianceRule = "keep",
) -> GroupAdvantages:
    """Compare each reward with those of its group: `A = (r - mu) / (std + std_epsilon)`.

    `mu` and `std` are mean and unbiased standard deviation of the mean rewards `m_k` of the group's
    runs. A run may give several samples (a trajectory of each agent or turn, as in NexRL), and
    weighs no more than a run that gives one. With one sample per run this is GRPO
    (arXiv:2402.03300) of groups of any size. By `baseline`:

    - `mean`: as above;
    - `leave_one_out`: `mu` is the mean of the other runs, `n / (n - 1)` times the former
      difference (RLOO, arXiv:2402.14740);
    - `none`: `mu` is 0, and no group is of zero variance.

    By `scale`: `group` as above; `batch`: std is that of all runs' means about the mean of all,
    as in TRL; `none`: no division (Dr. GRPO, arXiv:2503.20783).

    A group of one run, or with equal means of all runs (within rounding), gives exactly 0.

    Parameters
    ----------
    rewards_N : Tensor
        NaN where there is no verdict; such samples, and runs without another, are left out.
    group_N, run_N : Tensor
        int64; a number for each group and each run, see `codes_of`. The same run number in two
        groups is two runs. Without runs each sample is one.
    std_epsilon : float
        >= 0.
    zero_variance : "keep" or "drop"
        Whether groups of zero variance stay in the batch: their policy gradient is 0, but they
        count in its denominator and in penalties.

    Raises
    ------
    ConfigurationError
        For an unknown scale or baseline, or a scale without a baseline.
    DataError
        For rewards so large that their squares are not finite.
    """
    _check_choices(baseline, scale)
    known_N, is_known_N, group_N, runs = _runs(rewards_N.detach(), group_N, run_N)
    run_N, mean_R, is_run_R, group_R = runs
    # One row per group, with its runs as columns.
    lengths_P = group_R.bincount()
    order_R = group_R.argsort(stable=True)
    column_R = torch.empty_like(group_R)
    starts_P = lengths_P.cumsum(0) - lengths_P
    place_R = torch.arange(len(group_R), device=group_R.device)
    column_R[order_R] = place_R - starts_P[group_R[order_R]]
    width = int(lengths_P.max()) if len(lengths_P) else 1
    mean_PW = mean_R.new_zeros(len(lengths_P), width)
    is_run_PW = torch.zeros_like(mean_PW, dtype=torch.bool)
    mean_PW[group_R, column_R], is_run_PW[group_R, column_R] = mean_R, is_run_R
    counts_P1 = is_run_PW.sum(dim=1, keepdim=True)
    mean_P1 = masked_mean(mean_PW, is_run_PW, dim=1).unsqueeze(1)
    difference_PW = masked_fill_zero(mean_PW - mean_P1, is_run_PW)
    others_P1 = (counts_P1 - 1).clamp(min=1)
    is_flat_P = _are_flat(runs)
    std_P = (difference_PW.square().sum(dim=1) / others_P1.squeeze(1)).sqrt()
    std_P = masked_fill_zero(std_P, ~is_flat_P)
    if not std_P.isfinite().all() or not mean_R.isfinite().all():
        raise DataError(
            f"rewards of up to {float(known_N.abs().max()):.3g} are too large to compare in "
            f"{str(known_N.dtype).removeprefix('torch.')}. Scale them, for instance to at most 1e6."
        )
    if baseline == "none":
        return GroupAdvantages(known_N, is_known_N, torch.zeros_like(is_flat_P), std_P)
    if baseline == "leave_one_out":
        of_run_PW = difference_PW * counts_P1 / others_P1
        of_run_N = of_run_PW[group_R, column_R][run_N]
        advantages_N = known_N - mean_R[run_N] + of_run_N
    else:
        advantages_N = known_N - mean_P1.squeeze(1)[group_N]
    if scale == "group":
        advantages_N = advantages_N / (std_P[group_N] + std_epsilon)
    elif scale == "batch":
        differences_R = masked_fill_zero(mean_R - masked_mean(mean_R, is_run_R), is_run_R)
        degrees_of_freedom = (is_run_R.sum() - 1).clamp(min=1)
        std = (differences_R.square().sum() / degrees_of_freedom).sqrt()
        advantages_N = advantages_N / (std + std_epsilon)
    is_informative_N = is_known_N & ~is_flat_P[group_N]
    return GroupAdvantages(
        masked_fill_zero(advantages_N, is_informative_N),
        is_known_N if zero_variance == "keep" else is_informative_N,
        is_flat_P & (counts_P1 > 0).squeeze(1),
        std_P,
    )


def zero_variance_groups(rewards_N: Tensor, group_N: Tensor, run_N: Tensor | None = None) -> Tensor:
    """Return only `is_zero_variance_P` of `group_advantages`."""
    *_, runs = _runs(rewards_N.detach(), group_N, run_N)
    num_known_P = runs.group_R[runs.is_known_R].bincount(minlength=_num_codes(runs.group_R))
    return _are_flat(runs) & (num_known_P > 0)


class _Runs(NamedTuple):
    """The run of each sample; the mean reward, if any, and the group of each run."""

    run_N: Tensor
    mean_R: Tensor
    is_known_R: Tensor
    group_R: Tensor


def _runs(
    rewards_N: Tensor, group_N: Tensor, run_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, _Runs]:
    """Return rewards (0 where unknown), which are known, groups numbered from 0, and the runs."""
    is_known_N = ~rewards_N.isnan()
    known_N = masked_fill_zero(rewards_N, is_known_N)
    group_N = torch.unique(group_N, return_inverse=True)[1]
    if run_N is None:
        place_N = torch.arange(len(group_N), device=group_N.device)
        runs = _Runs(place_N, known_N, is_known_N, group_N)
        return known_N, is_known_N, group_N, runs
    run_N = torch.unique(run_N, return_inverse=True)[1].to(group_N)
    run_N = torch.unique(group_N * _num_codes(run_N) + run_N, return_inverse=True)[1]
    zeros_R = known_N.new_zeros(_num_codes(run_N))
    count_R = zeros_R.index_add(0, run_N, is_known_N.to(known_N.dtype))
    mean_R = zeros_R.index_add(0, run_N, known_N) / count_R.clamp(min=1)
    group_R = group_N.new_zeros(len(zeros_R)).scatter_(0, run_N, group_N)
    return known_N, is_known_N, group_N, _Runs(run_N, mean_R, count_R > 0, group_R)


def _num_codes(codes_N: Tensor) -> int:
    return int(codes_N.max()) + 1 if len(codes_N) else 0


def _are_flat(runs: _Runs) -> Tensor:
    """Return which groups have equal mean rewards in all runs, up to rounding, or no rewards."""
    _, mean_R, is_known_R, group_R = runs
    nothing_P = mean_R.new_full((_num_codes(group_R),), torch.inf)
    least_R = torch.where(is_known_R, mean_R, torch.inf)
    most_R = torch.where(is_known_R, mean_R, -torch.inf)
    least_P = nothing_P.scatter_reduce(0, group_R, least_R, "amin")
    most_P = (-nothing_P).scatter_reduce(0, group_R, most_R, "amax")
    scale_P = torch.maximum(least_P.abs(), most_P.abs()).nan_to_num(posinf=0.0)
    return most_P - least_P <= scale_P * torch.finfo(mean_R.dtype).eps * 4


def _check_choices(baseline: str, scale: str) -> None:
    for name, value, choices in (
        ("scale", scale, ("group", "batch", "none")),
        ("baseline", baseline, ("mean", "leave_one_out", "none")),
    ):
        if value not in choices:
            raise ConfigurationError(f"unknown {name} {value!r}. Known: {', '.join(choices)}.")
    if baseline == "none" and scale != "none":
        raise ConfigurationError(
            f"the baseline 'none' cannot be divided by the deviation of the {scale}: equal rewards "
            "would get vast advantages. Set scale to none, or baseline to mean or leave_one_out."
        )


def compute_advantages(
    name: str,
    rewards_N: Tensor,
    group_N: Tensor,
    run_N: Tensor | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **common: Any,
) -> GroupAdvantages:
    """Compute advantages with a registered function; see `group_advantages` for the arguments.

    `options` are those of that function; `common` options are for `group_advantages` alone.

    Raises
    ------
    UnknownNameError
        For an unknown function.
    ConfigurationError
        For an option that the function lacks, or a result of another shape or that is not finite.
    """
    # Options of the same name in a plug-in's function may mean something else.
    common = {n: value for n, value in common.items() if value is not None and name == "group"}
    function, all_options = with_options(ADVANTAGES, name, {**common, **(options or {})})
    advantages = function(rewards_N.detach(), group_N, run_N, **all_options)
    if isinstance(advantages, GroupAdvantages):
        return advantages
    if not isinstance(advantages, Tensor) or advantages.shape != rewards_N.shape:
        is_tensor = isinstance(advantages, Tensor)
        shape = list(advantages.shape) if is_tensor else type(advantages).__name__
        raise ConfigurationError(
            f"the advantage {name!r} returned {shape}. Return a tensor {list(rewards_N.shape)}."
        )
    is_known_N = ~rewards_N.isnan()
    if not advantages[is_known_N].isfinite().all():
        raise ConfigurationError(
            f"the advantage {name!r} returned NaN or infinity for a sample with a reward. Return "
            "finite numbers."
        )
    groups = group_advantages(rewards_N, group_N, run_N)
    return GroupAdvantages(
        masked_fill_zero(advantages.detach(), is_known_N),
        is_known_N,
        groups.is_zero_variance_P,
        groups.std_P,
    )


OF_GROUPS = where("advantage", "group")
"""Condition of the options of `group_advantages`."""


class AdvantageParameters(SubParameters):
    """How rewards become advantages."""

    advantage: AdvantageName = "group"
    """Advantage function: group, or one registered by a plug-in; see `rl_objectives.advantages`."""
    advantage_options: dict[str, JsonValue] = {}
    """Options of a registered advantage function, by name."""
    baseline: Annotated[Baseline | None, OF_GROUPS] = "mean"
    """Baseline of a reward: mean of its group, mean of the others in it (RLOO), or none."""
    scale: Annotated[Scale | None, OF_GROUPS] = "group"
    """Divisor of the difference: standard deviation of the group or of the whole batch, or none
    (Dr. GRPO)."""
    std_epsilon: Annotated[float, OF_GROUPS, where("scale", "group", "batch", None)] = Field(
        default=1e-6, ge=0
    )
    """Added to that deviation."""

    @model_validator(mode="after")
    def _has_options_of_its_advantage(self) -> Self:
        try:
            with_options(ADVANTAGES, self.advantage, self.advantage_options)
        except ConfigurationError as error:
            raise ValueError(str(error)) from error
        return self

    def advantages(
        self, rewards_N: Tensor, group_N: Tensor, run_N: Tensor | None = None, **common: Any
    ) -> GroupAdvantages:
        """Compute the advantages of samples; see `compute_advantages`."""
        own = {"baseline": self.baseline, "scale": self.scale, "std_epsilon": self.std_epsilon}
        return compute_advantages(
            self.advantage,
            rewards_N,
            group_N,
            run_N,
            options=self.advantage_options,
            **(own | common),
        )


# ---- along sequences


class AdvantageEstimate(NamedTuple):
    """Advantages and value targets (advantages plus values), both without gradient."""

    advantages: Tensor
    returns: Tensor


def discounted_sums(terms_EH: Tensor, factor: float | Tensor) -> Tensor:
    """Compute `s_t = x_t + f_t * s_(t+1)` along dimension 1, `[E, H, ...]`.

    Parameters
    ----------
    factor : float or Tensor
        One for all steps, or one per step, broadcast to the terms.
    """
    if isinstance(factor, Tensor):
        total_E = torch.zeros_like(terms_EH[:, 0])
        sums_EH = torch.zeros_like(terms_EH)
        for t in reversed(range(terms_EH.shape[1])):
            total_E = terms_EH[:, t] + factor[:, t] * total_E
            sums_EH[:, t] = total_E
        return sums_EH
    # weights[s, t] = factor**(s - t) for s >= t: no loop over steps.
    place_H = torch.arange(terms_EH.shape[1], device=terms_EH.device)
    distance_HH = (place_H[:, None] - place_H).clamp(min=0)
    base = torch.full((), factor, dtype=terms_EH.dtype, device=terms_EH.device)
    return terms_EH @ (base**distance_HH).tril()


def gae(
    rewards_EH: Tensor,
    values_EH: Tensor,
    mask_EH: Tensor | None = None,
    *,
    gamma: float,
    lam: float,
    bootstrap_E: Tensor | None = None,
    is_end_EH: Tensor | None = None,
) -> AdvantageEstimate:
    """Compute generalised advantage estimates (arXiv:1506.02438, eq. 16), `[E, H, ...]`.

    `A_t = delta_t + gamma * lam * A_(t+1)` with `delta_t = r_t + gamma * V_(t+1) - V_t`, and
    `return_t = A_t + V_t`. After an end, `V_(t+1)` and `A_(t+1)` are 0.

    Parameters
    ----------
    rewards_EH, values_EH : Tensor
        Reward of each step, and the expected return before it.
    mask_EH : Tensor, optional
        bool; False on steps that were not taken: the steps around them follow each other. Results
        are 0 there.
    gamma, lam : float
        Discount, and the trade of bias (0) for variance (1), in [0, 1].
    bootstrap_E : Tensor, optional
        Value after the last step, `[E, ...]`, of sequences that were cut off; 0 by default.
    is_end_EH : Tensor, optional
        bool; True where an episode ended with the step.
    """
    rewards_EH, values_EH = rewards_EH.detach(), values_EH.detach()
    goes_on_EH = (
        torch.ones_like(values_EH) if is_end_EH is None else (~is_end_EH).to(values_EH.dtype)
    )
    advantages_EH = torch.zeros_like(values_EH)
    next_value_E = values_EH.new_zeros(values_EH.shape[:1] + values_EH.shape[2:])
    advantage_E = next_value_E
    if bootstrap_E is not None:
        next_value_E = bootstrap_E.detach().to(values_EH.dtype)
    for t in reversed(range(values_EH.shape[1])):
        goes_on_E = goes_on_EH[:, t]
        delta_E = rewards_EH[:, t] + gamma * next_value_E * goes_on_E - values_EH[:, t]
        step_E = delta_E + gamma * lam * goes_on_E * advantage_E
        if mask_EH is None:
            advantage_E, next_value_E = step_E, values_EH[:, t]
        else:
            advantage_E = torch.where(mask_EH[:, t], step_E, advantage_E)
            next_value_E = torch.where(mask_EH[:, t], values_EH[:, t], next_value_E)
        advantages_EH[:, t] = advantage_E
    returns_EH = advantages_EH + values_EH
    if mask_EH is not None:
        advantages_EH = masked_fill_zero(advantages_EH, mask_EH)
        returns_EH = masked_fill_zero(returns_EH, mask_EH)
    return AdvantageEstimate(advantages_EH, returns_EH)


def reward_to_go(rewards_EH: Tensor, is_end_EH: Tensor, *, gamma: float) -> Tensor:
    """Sum the discounted rewards from each step to the end of its episode, `[E, H, ...]`.

    Where the batch ends before the episode does, it is the sum up to there.
    """
    return discounted_sums(rewards_EH, gamma * (~is_end_EH).to(rewards_EH.dtype))


def nstep_returns(
    rewards_EH: Tensor,
    mask_EH: Tensor,
    *,
    n: int | None,
    gamma: float,
    values_EH: Tensor | None = None,
) -> Tensor:
    """Sum the next n discounted rewards, plus the discounted value after them if values are given.

    `G_t = sum_(j<n) gamma**j r_(t+j) + gamma**n V_(t+n)`, without the last term where no values are
    given or the episode ends before. See `gae` for the mask.

    Parameters
    ----------
    n : int, optional
        At least 1; None sums to the end of the episode (reward to go).
    gamma : float
        In [0, 1].
    values_EH : Tensor, optional
        Expected return from each step on.

    Returns
    -------
    Tensor
        `[E, H]`; 0 where the mask is False.

    Raises
    ------
    ConfigurationError
        When n is below 1.
    """
    if n is not None and n < 1:
        raise ConfigurationError(
            f"n must be at least 1, or None for all steps to the end; got {n}."
        )
    rewards_EH = rewards_EH.detach()
    order = torch.argsort(mask_EH.logical_not().to(torch.uint8), dim=1, stable=True)
    place_H = torch.arange(mask_EH.shape[1], device=mask_EH.device)
    is_step_EH = place_H < mask_EH.sum(dim=1, keepdim=True)
    reward_EH = masked_fill_zero(rewards_EH.gather(1, order), is_step_EH)
    distance_HH = place_H.unsqueeze(1) - place_H
    base = torch.full((), gamma, dtype=reward_EH.dtype, device=reward_EH.device)
    is_within = (distance_HH >= 0) & (distance_HH < (len(place_H) if n is None else n))
    # weight[s, t] = gamma**(s - t) for t <= s < t + n: no loop over steps.
    weight_HH = masked_fill_zero(base ** distance_HH.clamp(min=0), is_within)
    returns_EH = reward_EH @ weight_HH
    if values_EH is not None and n is not None:
        value_EH = masked_fill_zero(values_EH.detach().gather(1, order), is_step_EH)
        later_EH = torch.zeros_like(value_EH)
        later_EH[:, : max(len(place_H) - n, 0)] = value_EH[:, n:]
        returns_EH = returns_EH + base**n * later_EH
    returns_EH = torch.zeros_like(returns_EH).scatter(1, order, returns_EH)
    return masked_fill_zero(returns_EH, mask_EH)


def whiten(
    values: Tensor, mask: Tensor | None = None, *, epsilon: float = 1e-8, min_std: float = 0.0
) -> Tensor:
    """Normalise values to mean 0 and unbiased standard deviation 1, over the mask or over all.

    `(x - mean) / (max(std, min_std) + epsilon)`; 0 where the mask is False, and everywhere if all
    values are equal or only one counts. Any shape. It reads the whole batch: whiten before a batch
    is split.
    """
    values = values.detach()
    if mask is None:
        differences = values - values.mean()
        num_others: int | Tensor = max(values.numel() - 1, 1)
    else:
        differences = masked_fill_zero(values - masked_mean(values, mask), mask)
        num_others = (mask.sum() - 1).clamp(min=1)
    std = (differences.square().sum() / num_others).sqrt()
    counted = values if mask is None else masked_fill_zero(values, mask)
    largest = counted.abs().max() if values.numel() else std
    # Below this, differences are the rounding of the mean.
    is_flat = std <= largest * torch.finfo(values.dtype).eps * 8
    return torch.where(
        is_flat, torch.zeros_like(differences), differences / (std.clamp(min=min_std) + epsilon)
    )


def reverse_kl_advantages(
    student_logprobs_BT: Tensor,
    teacher_logprobs_BT: Tensor,
    mask_BT: Tensor,
    *,
    weight: float = 1.0,
    discount: float = 0.0,
) -> Tensor:
    """Compute advantages whose policy gradient is that of KL(student || teacher), `[B, T]`.

    `A_t = -weight * sum_(s >= t) discount**(s - t) (log S_s - log T_s)` over the tokens that count,
    on tokens sampled from the student (`log S - log T` itself, as a loss, has the gradient 0 on
    average). With a score-function or importance-sampling loss at ratio 1, the expected gradient
    is, with discount

    - 0: that of `sum_t KL(S(. | prefix) || T(. | prefix))` with fixed prefixes: the usual on-policy
      distillation, of low variance;
    - 1: that of the divergence between whole sequences, exactly.

    Parameters
    ----------
    student_logprobs_BT, teacher_logprobs_BT : Tensor
        Of the sampled tokens, nats.
    discount : float
        In [0, 1].
    """
    gap_BT = masked_fill_zero(student_logprobs_BT.detach() - teacher_logprobs_BT.detach(), mask_BT)
    if discount == 0:
        return -weight * gap_BT
    # Tokens between two of the student's are no steps.
    factor_BT = torch.where(mask_BT, discount, 1.0)
    return masked_fill_zero(-weight * discounted_sums(gap_BT, factor_BT), mask_BT)


# ---- in trees


def tree_gae(
    rewards_NT: Tensor,
    values_NT: Tensor,
    mask_NT: Tensor,
    parent_N: Tensor,
    depth_N: Tensor,
    *,
    gamma: float,
    lam: float,
) -> AdvantageEstimate:
    """Compute generalised advantage estimates on the tokens of a tree of turns (arXiv:1506.02438).

    A path of the tree is one sequence of tokens, the turns one after the other. With
    `delta_t = r_t + g_t * V_(t+1) - V_t`, the advantage is `A_t = delta_t + g_t * lam * A_(t+1)`.
    `g_t` is 1 within a turn and `gamma` from a turn's last token to the next turn's first, so that
    long turns are not discounted for their length. Where the conversation branches, `V_(t+1)` and
    `A_(t+1)` are means over the children. In a chain this is the advantage of the whole sequence.

    Parameters
    ----------
    rewards_NT : Tensor
        Reward of each token; that of the turn is at its last token. A turn with a reward of
        NaN has no verdict: it gets NaN throughout, and its parent takes no account of it.
    values_NT : Tensor
        Expected return before each token.
    mask_NT : Tensor
        bool, right-padded; True on sampled tokens, at least one per turn.
    gamma, lam : float
        In [0, 1].

    Returns
    -------
    AdvantageEstimate
        `[N, T]` advantages and returns, no gradient, 0 on padding.
    """
    values_NT = values_NT.detach()
    is_known_N = masked_fill_zero(rewards_NT, mask_NT).sum(dim=1).isnan().logical_not()
    rewards_NT = masked_fill_zero(rewards_NT.detach(), mask_NT & is_known_N[:, None])
    values_NT = masked_fill_zero(values_NT, mask_NT)
    length_N = mask_NT.sum(dim=1)
    place_T = torch.arange(mask_NT.shape[1], device=mask_NT.device)
    is_last_NT = place_T == length_N[:, None] - 1
    next_NT = torch.cat([values_NT[:, 1:], torch.zeros_like(values_NT[:, :1])], dim=1)
    after_N = _mean_of_children(values_NT[:, 0], parent_N, is_known_N)
    next_NT = torch.where(is_last_NT, gamma * after_N[:, None], next_NT)
    delta_NT = masked_fill_zero(rewards_NT + next_NT - values_NT, mask_NT)
    own_NT = discounted_sums(delta_NT, lam)
    # From later turns, deepest first: the next turn reaches token t over length - t steps of lam.
    steps_NT = (length_N[:, None] - place_T).clamp(min=0)
    base = torch.full((), lam, dtype=delta_NT.dtype, device=delta_NT.device)
    reach_NT = gamma * base**steps_NT
    advantage_NT = own_NT
    for level in torch.unique(depth_N).flip(0)[1:]:
        below_N = _mean_of_children(advantage_NT[:, 0], parent_N, is_known_N)
        is_here_N = (depth_N == level)[:, None]
        advantage_NT = torch.where(is_here_N, own_NT + reach_NT * below_N[:, None], advantage_NT)
    advantage_NT = masked_fill_zero(advantage_NT, mask_NT)
    unknown_NT = mask_NT & ~is_known_N[:, None]
    return AdvantageEstimate(
        advantage_NT.masked_fill(unknown_NT, torch.nan),
        masked_fill_zero(advantage_NT + values_NT, mask_NT).masked_fill(unknown_NT, torch.nan),
    )


def best_child_backup(
    reward_N: Tensor, parent_N: Tensor, depth_N: Tensor, *, decay: float
) -> Tensor:
    """Add to each node's reward the decayed return of its best child, `[N]`.

    `b(n) = r(n) + decay * max over children c of b(c)`, and `b(n) = r(n)` without children: an
    optimistic return, since the attacker may choose the branch (the backup of MALIBU).

    Parameters
    ----------
    decay : float
        In [0, 1]. 0 gives the rewards themselves.
    """
    return _carry_up(reward_N, parent_N, depth_N, decay, _best_of)


def mean_child_return(
    reward_N: Tensor, parent_N: Tensor, depth_N: Tensor, *, discount: float
) -> Tensor:
    """Compute discounted returns in a tree, averaged over branches, `[N]`.

    `R(n) = r(n) + discount * mean over children c of R(c)`, and `R(n) = r(n)` without children.
    In a chain this is the return; in a tree an estimate of its mean under the policy that sampled
    the children.

    Parameters
    ----------
    discount : float
        In [0, 1]. 0 gives the rewards themselves.
    """
    return _carry_up(reward_N, parent_N, depth_N, discount, _mean_of)


def _carry_up(
    reward_N: Tensor,
    parent_N: Tensor,
    depth_N: Tensor,
    factor: float,
    gather: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Add `factor` times the aggregate of its children to each node, deepest level first."""
    total_N = reward_N.detach().clone()
    for level in torch.unique(depth_N).flip(0):
        is_child_N = (depth_N == level) & (parent_N >= 0) & total_N.isnan().logical_not()
        below_N = gather(total_N[is_child_N], parent_N[is_child_N], len(total_N))
        total_N = total_N + factor * below_N
    return total_N


def _mean_of_children(values_N: Tensor, parent_N: Tensor, counts_N: Tensor) -> Tensor:
    """Return the mean over the children that count; 0 without any."""
    is_child_N = (parent_N >= 0) & counts_N
    return _mean_of(values_N[is_child_N], parent_N[is_child_N], len(values_N))


def _mean_of(values: Tensor, parents: Tensor, num_nodes: int) -> Tensor:
    """Return the mean by parent, `[N]`; 0 without children."""
    sums = values.new_zeros(num_nodes).index_add(0, parents, values)
    counts = values.new_zeros(num_nodes).index_add(0, parents, torch.ones_like(values))
    return sums / counts.clamp(min=1)


def _best_of(values: Tensor, parents: Tensor, num_nodes: int) -> Tensor:
    """Return the maximum by parent, `[N]`; 0 without children."""
    best = values.new_full((num_nodes,), -torch.inf)
    best = best.scatter_reduce(0, parents, values, "amax")
    return masked_fill_zero(best, best > -torch.inf)
