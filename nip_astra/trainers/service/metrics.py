"""Metrics of rollouts and their advantages."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.rollouts.trajectory_advantages import advantages_of

Metrics = MutableMapping[str, Any]


def log_rollout_metrics(
    trajectories: Sequence[Trajectory] | Batch, metrics: Metrics | None = None
) -> Metrics:
    """Add statistics of trajectories to `metrics`, and return them.

    `rollout/reward_{mean,std,min,max}` over trajectories with a reward, `rollout/num_trajectories`,
    `rollout/num_groups`, `rollout/prompt_tokens_mean`, `rollout/response_tokens_{mean,max}` and,
    where they are known, `rollout/cut_share`: of trajectories in which a turn had no room to end,
    and `rollout/entropy`: nats a token of the policy that sampled, estimated from its samples
    (`-log pi`, without bias where it samples at temperature 1).
    """
    metrics = {} if metrics is None else metrics
    rows = trajectories.to_trajectories() if isinstance(trajectories, Batch) else trajectories
    rewards = torch.tensor([one.reward for one in rows if one.reward is not None])
    metrics.update(_figures("rollout/reward", rewards[~rewards.isnan()]))
    metrics["rollout/num_trajectories"] = float(len(rows))
    metrics["rollout/num_groups"] = float(len({one.get("group_id", id(one)) for one in rows}))
    lengths = torch.tensor([one.num_response_tokens for one in rows], dtype=torch.float32)
    prompts = torch.tensor([one.num_prompt_tokens for one in rows], dtype=torch.float32)
    if len(rows):
        metrics["rollout/prompt_tokens_mean"] = float(prompts.mean())
        metrics["rollout/response_tokens_mean"] = float(lengths.mean())
        metrics["rollout/response_tokens_max"] = float(lengths.max())
        nlls = [-float(o.logprobs[o.loss_mask].sum()) for o in rows if o.logprobs is not None]
        if len(nlls) == len(rows) and lengths.sum() > 0:
            metrics["rollout/entropy"] = sum(nlls) / float(lengths.sum())
        cut = [float(one["is_cut"]) for one in rows if one.get("is_cut") is not None]
        if cut:
            metrics["rollout/cut_share"] = sum(cut) / len(cut)
    return metrics


def log_grpo_metrics(trajectories: Sequence[Trajectory], metrics: Metrics) -> Metrics:
    """Add statistics of advantages and groups to `metrics`, and return them.

    Those of `GroupAdvantages.metrics`, of the trajectories' own advantages.
    """
    found = advantages_of(trajectories)
    metrics.update(found.metrics())
    values = [one.advantage for one in trajectories if one.advantage is not None]
    flat = [torch.as_tensor(value, dtype=torch.float64).reshape(-1) for value in values]
    metrics.update(_figures("grpo/advantage", torch.cat(flat) if flat else torch.zeros(0)))
    return metrics


def _figures(name: str, values: Tensor) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std()) if len(values) > 1 else 0.0,
        f"{name}_min": float(values.min()),
        f"{name}_max": float(values.max()),
    }
