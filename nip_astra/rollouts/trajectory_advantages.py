"""Advantages of trajectories, compared with those of the same task."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from nip_astra.rl_objectives.advantages import AdvantageParameters, GroupAdvantages, codes_of
from nip_astra.rollouts.trajectory import Trajectory


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    use_run_ids: bool = True,
    logger: logging.Logger | None = None,
    **options: Any,
) -> list[Trajectory]:
    """Set `advantage` of each trajectory; see `group_advantages` for the rules.

    Parameters
    ----------
    trajectories : Sequence[Trajectory]
        One without a group is compared with nothing and gets 0, as does one without a reward.
    use_run_ids : bool
        Whether the trajectories of one run count as one; else each counts as a run.
    options : Any
        Of `AdvantageParameters`: `baseline`, `scale`, `std_epsilon`, `advantage`.
    logger : Logger, optional
        Reports how many groups have no signal.

    Returns
    -------
    list[Trajectory]
        The same objects in the same order.
    """
    parameters = AdvantageParameters.from_dict(options)
    found = advantages_of(trajectories, parameters, use_run_ids=use_run_ids)
    for trajectory, advantage in zip(trajectories, found.advantages_N.tolist(), strict=True):
        trajectory.advantage = advantage
    if logger is not None:
        flat = found.is_zero_variance_P
        logger.info("%d of %d groups have rewards without a signal", int(flat.sum()), len(flat))
    return list(trajectories)


def advantages_of(
    trajectories: Sequence[Trajectory],
    parameters: AdvantageParameters | None = None,
    *,
    use_run_ids: bool = True,
) -> GroupAdvantages:
    """The advantages, and statistics of the groups in order of first appearance."""
    rewards = [math.nan if one.reward is None else one.reward for one in trajectories]
    groups, runs = (
        codes_of(
            [
                ("own", i) if getattr(one, name) is None else (name, getattr(one, name))
                for i, one in enumerate(trajectories)
            ]
        )
        for name in ("group_id", "run_id")
    )
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    parameters = parameters or AdvantageParameters()
    return parameters.advantages(rewards_N, groups, runs if use_run_ids else None)
