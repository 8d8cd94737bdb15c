"""Tensors of which each of several processes holds a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


def held_of(tensor: Tensor | None) -> Tensor:
    """What this process holds of a tensor: all of it where it is not divided."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: Tensor) -> Tensor:
    """A tensor put together from the parts of all processes, which do so together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided(whole: Tensor, like: Tensor) -> Tensor:
    """What a process holds of a tensor that all have; all of it where `like` is not divided."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    placed = whole.to(like.device)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def sum_of_squares(tensors: Sequence[Tensor | None]) -> Tensor:
    """Of what this process holds of some tensors, a float64 number."""
    norms = [torch.linalg.vector_norm(held_of(one).double()) ** 2 for one in tensors]
    return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)


def add_up_as_they_are(module: torch.nn.Module) -> None:
    """Have gradients of what FSDP2 has divided added up over the processes, not averaged.

    For losses that are divided by the rows of all already.
    """
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)
