"""Advantages of runs of an agent that are grouped by task, however many each group has.

Shape suffixes: `N` sample (trajectory), `R` run, `P` group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.rl_objectives.advantages import Baseline, ZeroVarianceRule
from nip_astra.rl_objectives.masked import masked_fill_zero, masked_mean

Scale = Literal["group", "batch", "none"]
"""What differences of rewards are divided by, see `run_advantages`."""

SCALES: tuple[Scale, ...] = ("group", "batch", "none")


class RunAdvantages(NamedTuple):
    """Advantages of samples, and what is known of their groups.

    Attributes
    ----------
    advantages_N : Tensor
        In the dtype of the rewards, without gradient; 0 where the reward is NaN.
    is_used_N : Tensor
        bool; False on samples that should not enter a batch: those without a reward, and with
        the rule "drop" those of groups of zero variance.
    is_zero_variance_P : Tensor
        bool; True on groups that have a reward and tell nothing: the runs' rewards are all equal,
        or there is one run only.
    std_P : Tensor
        Unbiased standard deviation of the runs' rewards; 0 for groups of one run.
    """

    advantages_N: Tensor
    is_used_N: Tensor
    is_zero_variance_P: Tensor
    std_P: Tensor


def codes_of(ids: Sequence[Hashable] | Tensor) -> Tensor:
    """Numbers of ids in the order in which they first appear, int64 `[N]`."""
    numbers: dict[Hashable, int] = {}
    plain = ids.tolist() if isinstance(ids, Tensor) else ids
    return torch.tensor([numbers.setdefault(one, len(numbers)) for one in plain], dtype=torch.int64)


def run_advantages(
    rewards_N: Tensor,
    group_N: Tensor,
    run_N: Tensor | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    std_epsilon: float = 1e-6,
    zero_variance: ZeroVarianceRule = "keep",
) -> RunAdvantages:
    """Compare each reward with those of the other runs of its task (NexRL's run-aware GRPO).

    A run may give several samples. With `m_k` the mean reward of run k of a group and `mu`, `std`
    mean and unbiased standard deviation (divided by the number of runs less 1) of these:

        `A_i = (r_i - mu) / (std + std_epsilon)`

    so an agent that gives many samples in a run weighs no more than one that gives one. With one
    sample a run this is GRPO (arXiv:2402.03300) of ragged groups. By `baseline`:

    - `mean`: as above;
    - `leave_one_out`: `mu` is the mean of the other runs (RLOO, arXiv:2402.14740);
    - `none`: `mu` is 0, and no group is of zero variance.

    By `scale`: `group` as above; `batch`: std is that of all runs' means about the mean of all,
    over the number of runs less 1, as in TRL; `none`: nothing is divided (Dr. GRPO,
    arXiv:2503.20783).

    **Singletons and zero variance.** A group of one run, or whose runs' means are all equal, gives
    exactly 0 to all its samples, also where the samples within a run differ: nothing was learnt of
    the task. (NexRL gives a lone run its reward, or NaN.)

    Samples whose reward is NaN are left out; so is a run that has no other.

    Parameters
    ----------
    rewards_N : Tensor
        NaN where there is no verdict.
    group_N, run_N : Tensor
        int64; a number for each group and each run, see `codes_of`. A run belongs to its group:
        the same number in two groups are two runs. Without runs each sample is one.

    Raises
    ------
    ConfigurationError
        For an unknown scale or baseline, or a scale without a baseline.
    """
    _check(baseline, scale)
    rewards_N = rewards_N.detach()
    is_known_N = ~rewards_N.isnan()
    known_N = masked_fill_zero(rewards_N, is_known_N)
    group_N = torch.unique(group_N, return_inverse=True)[1]
    found = _figures_of_groups(known_N, is_known_N, group_N, _runs(group_N, run_N))
    is_flat_P = found.is_flat_P
    if baseline == "none":
        return RunAdvantages(known_N, is_known_N, torch.zeros_like(is_flat_P), found.std_P)
    expected_N = found.mean_P[group_N]
    if baseline == "leave_one_out":
        others_N = (found.runs_P[group_N] - 1).clamp(min=1)
        expected_N = (found.mean_P * found.runs_P)[group_N] - found.mean_R[found.run_N]
        expected_N = expected_N / others_N
    advantages_N = known_N - expected_N
    if scale == "group":
        advantages_N = advantages_N / (found.std_P[group_N] + std_epsilon)
    elif scale == "batch":
        advantages_N = advantages_N / (found.std_of_all() + std_epsilon)
    tells_N = is_known_N & ~is_flat_P[group_N]
    return RunAdvantages(
        masked_fill_zero(advantages_N, tells_N),
        is_known_N if zero_variance == "keep" else tells_N,
        is_flat_P & (found.runs_P > 0),
        found.std_P,
    )


class _Groups(NamedTuple):
    """Mean rewards of runs and of groups, and the spread of each group."""

    run_N: Tensor
    mean_R: Tensor
    is_run_R: Tensor
    runs_P: Tensor
    mean_P: Tensor
    is_flat_P: Tensor
    std_P: Tensor

    def std_of_all(self) -> Tensor:
        """The unbiased standard deviation of all runs about their common mean."""
        mean = masked_mean(self.mean_R, self.is_run_R)
        total = masked_fill_zero(self.mean_R - mean, self.is_run_R).square().sum()
        return (total / (self.is_run_R.sum() - 1).clamp(min=1)).sqrt()


def _figures_of_groups(
    known_N: Tensor, is_known_N: Tensor, group_N: Tensor, run_N: Tensor
) -> _Groups:
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    num_runs = int(run_N.max()) + 1 if len(run_N) else 0
    count_R = _sums(is_known_N.to(known_N.dtype), run_N, num_runs)
    is_run_R = count_R > 0
    mean_R = _sums(known_N, run_N, num_runs) / count_R.clamp(min=1)
    group_R = group_N.new_zeros(num_runs).scatter_(0, run_N, group_N)
    runs_P = _sums(is_run_R.to(mean_R.dtype), group_R, num_groups)
    mean_P = _sums(mean_R, group_R, num_groups) / runs_P.clamp(min=1)
    difference_R = masked_fill_zero(mean_R - mean_P[group_R], is_run_R)
    is_flat_P = _is_flat(mean_R, is_run_R, group_R, num_groups)
    square_P = _sums(difference_R.square(), group_R, num_groups)
    std_P = masked_fill_zero((square_P / (runs_P - 1).clamp(min=1)).sqrt(), ~is_flat_P)
    return _Groups(run_N, mean_R, is_run_R, runs_P, mean_P, is_flat_P, std_P)


def _runs(group_N: Tensor, run_N: Tensor | None) -> Tensor:
    """A number for each run of each group; each sample's own without runs."""
    if run_N is None:
        return torch.arange(len(group_N), device=group_N.device)
    pairs_N2 = torch.stack([group_N, run_N.to(group_N)], dim=1)
    run_of_N: Tensor = torch.unique(pairs_N2, dim=0, return_inverse=True)[1]
    return run_of_N


def _sums(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add_(0, index, values)


def _is_flat(mean_R: Tensor, is_run_R: Tensor, group_R: Tensor, num_groups: int) -> Tensor:
    """Whether the runs of a group have all one reward, by equality: rounding is no spread."""
    infinity = torch.full((num_groups,), torch.inf, dtype=mean_R.dtype, device=mean_R.device)
    kept_R, values_R = group_R[is_run_R], mean_R[is_run_R]
    least_P = infinity.scatter_reduce(0, kept_R, values_R, "amin")
    most_P = (-infinity).scatter_reduce(0, kept_R, values_R, "amax")
    scale_P = torch.maximum(least_P.abs(), most_P.abs()).nan_to_num(posinf=0.0)
    rounding_P = scale_P * torch.finfo(mean_R.dtype).eps * 4
    return most_P - least_P <= rounding_P


def _check(baseline: str, scale: str) -> None:
    if scale not in SCALES:
        raise ConfigurationError(
            f"advantages were to be divided by the spread of the {scale!r}, which is not known. "
            f"Known scales: {', '.join(SCALES)}. Choose one of these."
        )
    if baseline not in ("mean", "leave_one_out", "none"):
        raise ConfigurationError(
            f"rewards were to be compared with the baseline {baseline!r}, which is not known. "
            f"Known baselines: mean, leave_one_out, none. Choose one of these."
        )
    if baseline == "none" and scale != "none":
        raise ConfigurationError(
            f"rewards were to be divided by their standard deviation (scale {scale!r}) with the "
            f"baseline 'none', which would give equal rewards a vast advantage. Use the baseline "
            f"'mean' or 'leave_one_out', or the scale 'none'."
        )
