"""Optimizers and learning-rate schedules, by name in a `TrainingConfiguration`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.training import build_adamw
from nip_astra.parameters.training import OPTIMIZERS, SCHEDULES, TrainingConfiguration

MakesOptimizer = TypeVar("MakesOptimizer", bound=Callable[..., torch.optim.Optimizer])
Schedule = TypeVar("Schedule", bound=Callable[[float], float])


def register_optimizer(name: str) -> Callable[[MakesOptimizer], MakesOptimizer]:
    """Register an optimizer under its name for `training.optimizer`; a decorator.

    It is a class, or a function that makes an optimizer, with the arguments
    `(parameter_groups, *, lr, weight_decay)`.
    """
    return OPTIMIZERS.register(name)  # type: ignore[return-value]  # gives back what it decorates


def register_schedule(name: str) -> Callable[[Schedule], Schedule]:
    """Register a schedule under its name for `training.lr_schedule`; a decorator.

    The function takes the share of iterations done, in [0, 1], and returns the factor of the
    learning rate.

        @na.register_schedule("halved")
        def halved(progress: float) -> float:
            return 1.0 if progress < 0.5 else 0.5
    """
    return SCHEDULES.register(name)  # type: ignore[return-value]  # gives back what it decorates


def _of_torch(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    def build(groups: Any, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        if cls is torch.optim.AdamW:
            return build_adamw(groups, lr=lr, weight_decay=weight_decay)
        if "weight_decay" in inspect.signature(cls).parameters:
            return cls(groups, lr=lr, weight_decay=weight_decay)  # type: ignore[call-arg]
        if weight_decay:
            raise ConfigurationError(
                f"the optimizer {cls.__name__} has no weight decay. Set training.weight_decay to 0."
            )
        return cls(groups, lr=lr)  # type: ignore[call-arg]

    build.__doc__ = f"`torch.optim.{cls.__name__}`."
    return build


for _cls in (
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam),
    *(torch.optim.Adamax, torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
):
    register_optimizer(_cls.__name__.lower())(_of_torch(_cls))


@register_schedule("constant")
def constant(progress: float) -> float:
    """Return 1 throughout."""
    return 1.0


@register_schedule("linear")
def linear(progress: float) -> float:
    """Fall linearly from 1 to 0."""
    return 1.0 - progress


@register_schedule("cosine")
def cosine(progress: float) -> float:
    """Fall from 1 to 0 on half a cosine period."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(
    config: TrainingConfiguration,
    parameters: Iterable[torch.nn.Parameter],
    *,
    more: Sequence[tuple[Sequence[torch.nn.Parameter], float]] = (),
) -> torch.optim.Optimizer:
    """Build the configured optimizer of the parameters.

    `more` are groups of further parameters with their multiple of the learning rate, stored as
    `lr_factor` in the optimizer's group. Empty groups are left out.

    Raises
    ------
    ConfigurationError
        When a registered function returns something else than an optimizer.
    """
    groups = [(list(parameters), 1.0), *((list(group), factor) for group, factor in more)]
    optimizer: object = OPTIMIZERS.get(config.optimizer)(
        [
            {"params": part, "lr": config.lr * factor, "lr_factor": factor, **decay}
            for group, factor in groups
            for part, decay in _decay_parts(config, group)
            if part
        ],
        lr=config.lr,
        weight_decay=config.weight_decay,
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"the optimizer {config.optimizer!r} returned {type(optimizer).__name__}. Return a "
            "torch.optim.Optimizer of the groups."
        )
    return optimizer


def _decay_parts(
    config: TrainingConfiguration, group: Sequence[torch.nn.Parameter]
) -> list[tuple[list[torch.nn.Parameter], dict[str, float]]]:
    """Return the parts of a group, each with its own options: vectors may be without decay."""
    if config.decays_vectors:
        return [(list(group), {})]
    vectors = [parameter for parameter in group if parameter.ndim < 2]
    others = [parameter for parameter in group if parameter.ndim >= 2]
    return [(others, {}), (vectors, {"weight_decay": 0.0})]


def learning_rate(
    config: TrainingConfiguration, *, step: int, progress: float, num_steps: int
) -> float:
    """Return the learning rate of optimizer step `step`; it rises linearly over `num_warmup_steps`.

    Parameters
    ----------
    progress : float
        Share of iterations done, in [0, 1].
    num_steps : int
        Optimizer steps of the whole training, if later iterations take as many as this one. It is
        read where `config.schedules_steps`.

    Raises
    ------
    ConfigurationError
        When a registered schedule returns something else than a finite number from 0.
    """
    num_warmup = config.num_warmup_steps
    if config.schedules_steps:
        if step < num_warmup:
            return config.lr * step / num_warmup
        warmup = 1.0
        progress = min(1.0, (step - num_warmup) / max(1, num_steps - num_warmup))
    else:
        warmup = min(1.0, (step + 1) / num_warmup) if num_warmup else 1.0
    factor: object = SCHEDULES.get(config.lr_schedule)(progress)
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise ConfigurationError(
            f"the schedule {config.lr_schedule!r} returned {factor!r} at progress {progress:.3g}. "
            "Return a finite number (float) of at least 0."
        )
    return config.lr * warmup * float(factor)
