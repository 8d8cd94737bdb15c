"""Optimizers and learning-rate schedules, by name in a `TrainingConfiguration`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError
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


BLOCK = 1 << 16
"""Elements of a weight that `AdamW` updates at once on a CPU: with gradient and moments they fit in
its cache, from which a step reads them several times."""


class AdamW(torch.optim.AdamW):
    """Torch's AdamW with equal results and state that updates large weights in blocks."""

    def _init_group(
        self,
        group: dict[str, Any],
        weights: list[Tensor],
        gradients: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        largest_squares: list[Tensor],
        steps: list[Tensor],
    ) -> bool:
        """Fill the lists that torch's step updates; large tensors become views of their blocks."""
        columns = (weights, gradients, means, squares)
        has_complex: bool = super()._init_group(group, *columns, largest_squares, steps)  # type: ignore[no-untyped-call]
        if largest_squares or all(x.numel() <= BLOCK for x in weights):
            return has_complex
        counts = [_num_blocks(*row) for row in zip(*columns, strict=True)]
        for column in columns:
            column[:] = [
                part
                for x, count in zip(column, counts, strict=True)
                for part in (torch.split(x.view(-1), BLOCK) if count > 1 else [x])
            ]
        # Every block counts a step, the first of a weight in the count that is kept.
        steps[:] = [
            step.clone() if i else step
            for step, count in zip(steps, counts, strict=True)
            for i in range(count)
        ]
        return has_complex


def _num_blocks(*tensors: Tensor) -> int:
    """Return the number of blocks in which a weight, its gradient and moments are updated."""
    is_flat = all(
        type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu" and x.is_contiguous()
        for x in tensors
    )
    return max(-(-tensors[0].numel() // BLOCK), 1) if is_flat else 1


def _of_torch(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    def build(groups: Any, *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
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
    *(torch.optim.Adamax, AdamW, torch.optim.ASGD, torch.optim.NAdam),
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
            {"params": group, "lr": config.lr * factor, "lr_factor": factor}
            for group, factor in groups
            if group
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


def learning_rate(config: TrainingConfiguration, *, step: int, progress: float) -> float:
    """Return the learning rate of optimizer step `step`; it rises linearly over `num_warmup_steps`.

    `progress` is the share of iterations done, in [0, 1]; the number of steps is not known in
    advance.

    Raises
    ------
    ConfigurationError
        When a registered schedule returns something else than a finite number from 0.
    """
    warmup = min(1.0, (step + 1) / config.num_warmup_steps) if config.num_warmup_steps else 1.0
    factor: object = SCHEDULES.get(config.lr_schedule)(progress)
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise ConfigurationError(
            f"the schedule {config.lr_schedule!r} returned {factor!r} at progress {progress:.3g}. "
            "Return a finite number (float) of at least 0."
        )
    return config.lr * warmup * float(factor)
