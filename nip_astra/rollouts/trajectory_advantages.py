"""Advantages of trajectories, compared with those of the same task."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from nip_astra.rl_objectives.advantages import Baseline
from nip_astra.rl_objectives.run_advantages import RunAdvantages, Scale, codes_of, run_advantages
from nip_astra.rollouts.trajectory import Trajectory


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    use_run_ids: bool = True,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    std_epsilon: float = 1e-6,
    logger: logging.Logger | None = None,
) -> list[Trajectory]:
    """Set `advantage` of each trajectory; see `run_advantages` for the rules.

    Parameters
    ----------
    trajectories : Sequence[Trajectory]
        One without a group is compared with nothing and gets 0, as does one without a reward.
    use_run_ids : bool
        Whether the trajectories of one run count as one; else each counts as a run.
    logger : Logger, optional
        Where to say how many groups tell nothing.

    Returns
    -------
    list[Trajectory]
        The same objects in the same order.
    """
    found = advantages_of(
        trajectories,
        use_run_ids=use_run_ids,
        baseline=baseline,
        scale=scale,
        std_epsilon=std_epsilon,
    )
    for trajectory, advantage in zip(trajectories, found.advantages_N.tolist(), strict=True):
        trajectory.advantage = advantage
    if logger is not None:
        flat = found.is_zero_variance_P
        logger.info("%d of %d groups have rewards that tell nothing", int(flat.sum()), len(flat))
    return list(trajectories)


def advantages_of(
    trajectories: Sequence[Trajectory],
    *,
    use_run_ids: bool = True,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    std_epsilon: float = 1e-6,
) -> RunAdvantages:
    """The advantages, and what is known of the groups in order of first appearance."""
    rewards = [math.nan if one.reward is None else one.reward for one in trajectories]
    own = range(len(trajectories))
    groups = codes_of(
        [
            ("own", i) if one.group_id is None else ("group", one.group_id)
            for i, one in zip(own, trajectories, strict=True)
        ]
    )
    runs = None
    if use_run_ids:
        runs = codes_of(
            [
                ("own", i) if one.run_id is None else ("run", one.run_id)
                for i, one in zip(own, trajectories, strict=True)
            ]
        )
    return run_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        groups,
        runs,
        baseline=baseline,
        scale=scale,
        std_epsilon=std_epsilon,
    )
