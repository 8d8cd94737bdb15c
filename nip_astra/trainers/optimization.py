"""Optimizers and learning-rate schedules from a `TrainingConfiguration`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from nip_astra.parameters.training import TrainingConfiguration

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}


def build_optimizer(
    config: TrainingConfiguration,
    parameters: Iterable[torch.nn.Parameter],
    *,
    more: Sequence[tuple[Sequence[torch.nn.Parameter], float]] = (),
) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters.

    Parameters
    ----------
    more : Sequence[tuple[Sequence[Parameter], float]]
        Further parameters, each group with its learning rate as a multiple of the configured one,
        which its group of the optimizer keeps as `lr_factor`. Empty groups are left out.
    """
    groups = [(list(parameters), 1.0), *((list(group), factor) for group, factor in more)]
    return OPTIMIZERS[config.optimizer](  # type: ignore[call-arg]
        [
            {"params": group, "lr": config.lr * factor, "lr_factor": factor}
            for group, factor in groups
            if group
        ],
        lr=config.lr,
        weight_decay=config.weight_decay,
    )


def learning_rate(config: TrainingConfiguration, *, step: int, progress: float) -> float:
    """The learning rate of one optimizer step.

    Parameters
    ----------
    step : int
        Optimizer steps already taken; the first `num_warmup_steps` rise linearly to `lr`.
    progress : float
        Share of the training iterations done, in [0, 1]; the schedule falls to 0 at 1. Steps are
        not known beforehand, since an iteration gives as many pairs as it finds.
    """
    warmup = min(1.0, (step + 1) / config.num_warmup_steps) if config.num_warmup_steps else 1.0
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_schedule]
    return config.lr * warmup * decay
