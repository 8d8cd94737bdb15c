"""Optimizers and learning-rate schedules from a `TrainingConfiguration`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.rl_objectives.outputs import LossOutput

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


class Gradients(NamedTuple):
    """What the backward passes of one optimizer step gave beside the gradients.

    Attributes
    ----------
    metrics : dict[str, float]
        Means over the samples of all batches, `loss` among them.
    norm : float
        Of the gradients before they were scaled down.
    """

    metrics: dict[str, float]
    norm: float

    @property
    def are_finite(self) -> bool:
        """Whether a step may be taken; a fault may show in the norm even where the loss is fine."""
        return math.isfinite(self.metrics["loss"]) and math.isfinite(self.norm)


def accumulate_gradients(
    batches: Sequence[TensorDict],
    step: Callable[[TensorDict], LossOutput],
    parameters: Sequence[torch.nn.Parameter],
    *,
    max_grad_norm: float | None,
) -> Gradients:
    """`parameters` the gradient of the mean loss over the samples of all batches.

    Parameters
    ----------
    step : Callable
        Gives the loss of a batch, a mean over its samples.
    max_grad_norm : float or None
        Gradients are scaled down to this norm.
    """
    num_samples = sum(len(batch) for batch in batches)
    sums: dict[str, Tensor] = {}
    for batch in batches:
        share = len(batch) / num_samples
        loss, metrics = step(batch)
        torch.autograd.backward(loss * share)
        for name, value in {"loss": loss, **metrics}.items():
            added = share * value.detach().double()
            sums[name] = sums[name] + added if name in sums else added
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    # One transfer from the device for all of them.
    values = torch.stack([*sums.values(), norm.detach().double()]).tolist()
    return Gradients(dict(zip(sums, values, strict=False)), values[-1])
