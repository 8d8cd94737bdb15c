"""NexRL's functions, over our formulas.

Shape suffixes: `B` row, `T` token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn.functional import pad

from nip_astra.errors import ConfigurationError, DataError, UnknownNameError
from nip_astra.nexrl.nexrl_types import AnyTrajectory, as_core
from nip_astra.rl_objectives import advantages, reductions
from nip_astra.rl_objectives.kl import AdaptiveKl, KlKind, kl_estimate
from nip_astra.rollouts import batch as batches
from nip_astra.rollouts.trajectory import advantages_of
from nip_astra.trainers.service import metrics as metrics_here
from nip_astra.trust import read_variable

Metrics = MutableMapping[str, Any]

# ---- masks, divergences and advantages


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Average over the positions that count; see `rl_objectives.reductions.masked_mean`."""
    return reductions.masked_mean(values, mask.bool(), dim=axis)


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Normalise over the positions that count; see `rl_objectives.advantages.whiten`."""
    return advantages.whiten(values, mask.bool(), epsilon=epsilon)


class AdaptiveKLController:
    """Weight of a KL penalty that holds the divergence near a target; see `AdaptiveKl`."""

    def __init__(self, init_kl_coef: float, target_kl: float | None, horizon: float) -> None:
        self._controller = AdaptiveKl(weight=init_kl_coef, target=target_kl, horizon=horizon)

    @property
    def value(self) -> float:
        """The weight."""
        return self._controller.weight

    @property
    def target(self) -> float | None:
        """The divergence to hold."""
        return self._controller.target

    @property
    def horizon(self) -> float:
        """Samples after which a weight that is off by 20 % or more has changed by 20 %."""
        return self._controller.horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt the weight to the divergence of `n_steps` samples."""
        self._controller.update(float(current_kl), num_samples=n_steps)


class FixedKLController(AdaptiveKLController):
    """Weight of a KL penalty that stays."""

    def __init__(self, kl_reward_coef: float) -> None:
        super().__init__(kl_reward_coef, None, 1.0)


_KL_KINDS: dict[str, KlKind] = {"kl": "k1", "abs": "k1", "mse": "k2", "low_var_kl": "k3"}


def compute_kl_penalty(
    logprob: Tensor,
    ref_logprob: Tensor,
    kl_penalty_type: str = "kl",
    *,
    kl_penalty: str | None = None,
) -> Tensor:
    """Estimate the divergence of each token, nats; see `rl_objectives.kl.kl_estimate`.

    `kl` is k1, `mse` k2 and `low_var_kl` k3; `abs` is the amount of k1. `kl_penalty` is the earlier
    name of `kl_penalty_type`.
    """
    name = kl_penalty or kl_penalty_type
    if name not in _KL_KINDS:
        raise UnknownNameError("KL penalty", name, _KL_KINDS, "Choose one of them.")
    estimate = kl_estimate(logprob, ref_logprob, _KL_KINDS[name])
    return estimate.abs() if name == "abs" else estimate


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    eos_mask: Tensor,
    index: Sequence[Hashable] | Tensor,
    epsilon: float = 1e-6,
    run_ids: Sequence[Hashable] | Tensor | None = None,
) -> tuple[Tensor, Tensor, dict[Any, float]]:
    """Compare the sums of token rewards within groups; see `group_advantages`.

    Parameters
    ----------
    token_level_rewards, eos_mask : Tensor
        `[B, T]`; the mask is 1 on tokens that count.
    index, run_ids : Sequence or Tensor
        The group of each row, and its run.

    Returns
    -------
    tuple of Tensor, Tensor and dict
        Advantages `[B, T]`, the same as returns, and the standard deviation of each group.
    """
    groups = index.tolist() if isinstance(index, Tensor) else list(index)
    compared = advantages.group_advantages(
        token_level_rewards.sum(dim=-1),
        advantages.codes_of(groups),
        None if run_ids is None else advantages.codes_of(run_ids),
        std_epsilon=epsilon,
    )
    of_tokens_BT = compared.advantages_N.unsqueeze(1) * eos_mask
    std_of_group = dict(zip(dict.fromkeys(groups), compared.std_P.tolist(), strict=True))
    return of_tokens_BT, of_tokens_BT, std_of_group


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[AnyTrajectory],
    epsilon: float = 1e-6,
    logger: logging.Logger | None = None,
    use_run_ids: bool = False,
) -> list[AnyTrajectory]:
    """Set `advantage` of each trajectory, and return them; see `group_advantages`."""
    options = advantages.AdvantageParameters(std_epsilon=epsilon)
    rows = [as_core(trajectory) for trajectory in trajectories]
    compared = advantages_of(rows, options, use_run_ids=use_run_ids)
    for trajectory, advantage in zip(trajectories, compared.advantages_N.tolist(), strict=True):
        trajectory.advantage = advantage
    if logger is not None:
        flat = compared.is_zero_variance_P
        logger.info("%d of %d groups have rewards without a signal", int(flat.sum()), len(flat))
    return list(trajectories)


# ---- padding


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad the last dimension to a length, on the right or on the left."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def padding_data(
    input_ids: batches.Batch | Tensor | list[int],
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: str = "error",
    multiple: int = 1,
) -> Any:
    """Pad or truncate ids to a length; of a batch, strip its redundant padding.

    Parameters
    ----------
    input_ids : Batch, Tensor or list of int
        A batch, for `rollouts.batch.padding_data`, or ids `[B, T]`, or the ids of one row.
    max_length : int, optional
        Tokens of each row; required for ids.
    truncation : "error", "left", "right" or "ignore"
        What happens to longer ids: refused, truncated on this side, or returned as they are.
    multiple : int
        Of a batch: the number of rows becomes a multiple.
    """
    if isinstance(input_ids, batches.Batch):
        return batches.padding_data(input_ids, pad_token_id=pad_token_id, multiple=multiple)
    if max_length is None:
        raise DataError("padding_data of ids needs max_length, the number of tokens of a row.")
    ids_BT = torch.as_tensor(input_ids)
    if ids_BT.ndim == 1:
        ids_BT = ids_BT.unsqueeze(0)
    width = ids_BT.shape[-1]
    cuts: dict[str, Callable[[Tensor], Tensor]] = {
        "left": lambda ids: ids[:, -max_length:],
        "right": lambda ids: ids[:, :max_length],
        "ignore": lambda ids: ids,
    }
    if width <= max_length:
        return pad_sequence_to_length(ids_BT, max_length, pad_token_id, left_pad)
    if truncation == "error":
        raise DataError(
            f"{width} tokens are more than max_length {max_length}. Raise it, or truncate to the "
            "left or right."
        )
    if truncation not in cuts:
        raise UnknownNameError("truncation", truncation, ["error", *cuts], "Choose one of them.")
    return cuts[truncation](ids_BT)


# ---- metrics and logging


def log_rollout_metrics(
    trajectories: Sequence[AnyTrajectory] | batches.Batch, metrics: Metrics
) -> None:
    """Add statistics of the rollout, and the mean of each number in `score`, as `rollout/NAME`."""
    rows: Sequence[AnyTrajectory]
    if isinstance(trajectories, batches.Batch):
        rows = trajectories.to_trajectories()
    else:
        rows = trajectories
    core_rows = [as_core(trajectory) for trajectory in rows]
    metrics_here.log_rollout_metrics(core_rows, metrics)
    values: dict[str, list[float]] = {}
    for row in core_rows:
        score = row.get("score", {})
        for name, value in score.items() if isinstance(score, dict) else ():
            if isinstance(value, bool | int | float):
                values.setdefault(str(name), []).append(float(value))
    metrics.update(
        {f"rollout/{name}": sum(numbers) / len(numbers) for name, numbers in values.items()}
    )


def log_grpo_metrics(trajectories: Sequence[AnyTrajectory], metrics: Metrics) -> None:
    """Add statistics of advantages and groups; see `trainers.service.metrics`."""
    metrics_here.log_grpo_metrics([as_core(trajectory) for trajectory in trajectories], metrics)


def set_logging_basic_config() -> None:
    """Log to the terminal from the level of `LOG_LEVEL` on, which is INFO by default."""
    name = (read_variable("LOG_LEVEL") or "INFO").upper()
    level = logging.getLevelNamesMapping().get(name, logging.INFO)
    logging.basicConfig(level=level, format="[%(asctime)s][%(name)s][%(levelname)s] - %(message)s")


# ---- configuration


def insert_config(target: DictConfig, key: str, value: Any, restore_struct: bool = True) -> None:
    """Set a value of a configuration, also of one that is closed to new names."""
    is_closed = OmegaConf.is_struct(target)
    OmegaConf.set_struct(target, False)
    target[key] = value
    OmegaConf.set_struct(target, is_closed if restore_struct else False)


def get_train_service_config_by_role(train_service: DictConfig, role: str) -> DictConfig:
    """Return the training service of a role: the service itself, or one of several by name.

    Raises
    ------
    ConfigurationError
        If none, or more than one without a role, can be meant.
    """
    if "backend" in train_service or "url" in train_service:
        return train_service
    services: dict[str, DictConfig] = {
        str(name): service
        for name, service in train_service.items()
        if isinstance(service, DictConfig)
    }
    with_role = [service for service in services.values() if service.get("role") == role]
    without_role = [service for service in services.values() if service.get("role") is None]
    candidates = with_role[:1] or without_role
    if len(candidates) != 1:
        raise ConfigurationError(
            f"no single service of the role {role!r} among {', '.join(services) or 'no services'}. "
            f"Write role: {role} below one of them."
        )
    return candidates[0]


def get_actor_train_service_config(config: DictConfig) -> DictConfig:
    """Return the training service of the policy from a whole configuration."""
    return get_train_service_config_by_role(config.service.train_service, "actor")


def use_tinker(config: DictConfig) -> bool:
    """Return whether a whole configuration samples through Tinker."""
    return bool(config.service.inference_service.backend == "tinker")


def use_weaver(config: DictConfig) -> bool:
    """Return whether a whole configuration samples through Weaver."""
    return bool(config.service.inference_service.backend == "weaver")


# ---- calls and requests


def execute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of another part of the experiment, which is in this process."""
    return function(*args, **kwargs)


def convert_trajectories_to_datums(trajectories: Sequence[AnyTrajectory]) -> list[dict[str, Any]]:
    """Return the data of a training service, without trajectories whose advantages are all 0.

    Each has `input_tokens`, and in `loss_fn_inputs` for each following token `target_tokens`,
    `logprobs`, `advantages` and `loss_mask`.
    """
    datums = []
    for trajectory in map(as_core, trajectories):
        if trajectory.advantage is None or trajectory.logprobs is None:
            raise DataError(
                "a trajectory has no advantage or no logprobs. Set both before it is converted."
            )
        mask_T = trajectory.loss_mask.float()
        advantages_T = torch.as_tensor(trajectory.advantage, dtype=torch.float32) * mask_T
        if not advantages_T[1:].any():
            continue
        inputs = {
            "target_tokens": trajectory.tokens[1:].tolist(),
            "logprobs": trajectory.logprobs[1:].tolist(),
            "advantages": advantages_T[1:].tolist(),
            "loss_mask": mask_T[1:].tolist(),
        }
        datums.append({"input_tokens": trajectory.tokens[:-1].tolist(), "loss_fn_inputs": inputs})
    return datums
