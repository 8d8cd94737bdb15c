"""Optimisation parameters shared by all trainers of local models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nip_astra.parameters.conditions import where_above
from nip_astra.parameters.parameters_base import (
    MAX_LR,
    CheckedName,
    RegisteredName,
    SubParameters,
)
from nip_astra.registry import Registry
from nip_astra.tracking.figure_names import current_figure_name

OPTIMIZERS: Registry[Callable[..., Any]] = Registry("optimizer")
"""Optimizers by name; see `nip_astra.trainers.optimization.register_optimizer`."""
SCHEDULES: Registry[Callable[[float], float]] = Registry("schedule")
"""Schedules of the learning rate; see `nip_astra.trainers.optimization.register_schedule`."""


class TrainingConfiguration(SubParameters):
    """Length of training, batch sizes and optimizer."""

    lr: float = Field(default=1e-5, gt=0, le=MAX_LR)
    """Learning rate. Larger learns faster and may diverge."""
    minibatch_size: int = Field(default=8, ge=1)
    """Samples per forward and backward pass. Larger has less noise and uses more memory."""
    batch_order: Literal["shuffled", "by_episode"] = "shuffled"
    """How an iteration's samples are split into minibatches. by_episode keeps the samples of an
    episode together, so that a minibatch shares more of its tokens and is faster but less mixed;
    episodes and minibatches are in random order either way."""
    optimizer: Annotated[str, RegisteredName(OPTIMIZERS)] = "adamw"
    """Optimizer: one of `torch.optim` in lower case, or a registered one; other options than lr and
    weight_decay have torch's defaults."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay per step (decoupled for adamw). Larger pulls weights towards 0."""
    decays_vectors: Annotated[bool, where_above("weight_decay", 0)] = True
    """Whether weight decay also pulls biases and the weights of norms; false as in transformers."""
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    """Minibatches whose gradients are averaged before a step; the last group may be smaller."""
    num_iterations: int = Field(default=1000, ge=1)
    """Iterations: collect experience, then learn from it."""
    num_episodes_per_experience: int = Field(default=8, ge=1)
    """Episodes (trees) per iteration. Larger observes more failures per iteration."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over an iteration's samples. Larger reuses experience more, further off policy."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum gradient norm, by clipping; null does not clip."""
    lr_schedule: Annotated[str, RegisteredName(SCHEDULES)] = "constant"
    """Learning rate schedule over the iterations: constant, linear or cosine (which end at 0), or
    one of a plug-in."""
    num_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly to lr."""
    schedules_steps: bool = False
    """Whether the schedule goes by optimizer steps, as in transformers: the warm-up rises from 0,
    and the schedule begins after it. False goes by iterations, and multiplies it by a warm-up whose
    first step is above 0."""
    eval_period: int = Field(default=0, ge=0)
    """Iterations between dev evaluations, which select the best checkpoint; 0 for none."""
    dev_metric: Annotated[CheckedName, where_above("eval_period", 0)] = "mean_reward"
    """Figure of dev evaluations whose maximum selects the best checkpoint, such as failure_rate of
    stress tests or accuracy of tasks."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Number of consecutive dev evaluations without improvement after which training stops; null
    trains to the end."""

    @field_validator("dev_metric")
    @classmethod
    def _has_current_name(cls, dev_metric: str) -> str:
        return current_figure_name(dev_metric)

    @model_validator(mode="after")
    def _can_stop_early(self) -> Self:
        if self.early_stopping_patience is not None and self.eval_period == 0:
            raise ValueError(
                "early_stopping_patience counts dev evaluations, but eval_period is 0; give an "
                "eval_period, or leave early_stopping_patience null"
            )
        return self
