"""What a loss function gives back."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nip_astra.errors import ConfigurationError


class LossOutput(NamedTuple):
    """A loss and what to log beside it.

    Attributes
    ----------
    loss : Tensor
        Scalar, with gradient.
    metrics : dict[str, Tensor]
        Scalars without gradient.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def as_loss_output(found: Any, *, owner: str) -> LossOutput:
    """What a trainer's `loss` returned: a `LossOutput`, such a pair, or the loss alone.

    Parameters
    ----------
    owner : str
        Name of the trainer's class, for the message.

    Raises
    ------
    ConfigurationError
        When the loss is no single number with a gradient, or a metric no single number.
    """
    loss, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise _wrong(owner, f"returned {_kind(found)}", "a LossOutput, or a scalar tensor")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise _wrong(owner, "returned a loss without a gradient", "a loss of policy_logprobs(...)")
    if not isinstance(metrics, Mapping):
        raise _wrong(owner, f"returned {_kind(metrics)} as metrics", "a dict of numbers by name")
    return LossOutput(
        loss.reshape(()), {name: _scalar(owner, loss, name, x) for name, x in metrics.items()}
    )


def _scalar(owner: str, loss: Tensor, name: Any, value: Any) -> Tensor:
    is_number = isinstance(value, Real)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if not isinstance(name, str) or not is_number:
        raise _wrong(
            owner, f"returned {_kind(value)} as metrics[{name!r}]", "one number for each name"
        )
    return loss.new_tensor(float(value))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{str(value)[:60]!r} ({type(value).__name__})"


def _wrong(owner: str, fault: str, wanted: str) -> ConfigurationError:
    return ConfigurationError(f"loss of the trainer {owner} {fault}. It must return {wanted}.")
