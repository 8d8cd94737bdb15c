"""Weights and batches sharded over several processes.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from nip_astra.distributed.team import Team

# ---- sharded weights


def local_tensor(tensor: Tensor | None) -> Tensor:
    """Return the shard of a tensor in this process; all of it if it is not sharded."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from all processes; a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a full tensor; all of it if `like` is not sharded."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    placed = whole.to(like.device)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def sum_of_squares(tensors: Sequence[Tensor | None]) -> Tensor:
    """Sum the squares of this process's shards of tensors, float64 scalar."""
    norms = [torch.linalg.vector_norm(local_tensor(one).double()) ** 2 for one in tensors]
    return torch.stack(norms).sum() if norms else torch.zeros((), dtype=torch.float64)


def sum_gradients(module: torch.nn.Module) -> None:
    """Let FSDP2 sum gradients over processes instead of averaging them.

    For losses that are divided by the rows of all processes.
    """
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.set_gradient_divide_factor(1.0)
            one.set_force_sum_reduction_for_comms(True)


# ---- rows of a batch

Compute = Callable[[slice], Sequence[Tensor]]
"""Computes a network's outputs for some rows, `[some, ...]` each."""


class RowDivision:
    """Distributes the rows of a batch over a team and gathers the outputs.

    A loss sees all rows, as in one process. Its gradient flows to each process' own rows: the
    gradients of the weights, summed over processes, are those of one process.
    """

    def __init__(self, team: Team) -> None:
        self.team = team

    def __call__(self, compute: Compute, num_rows: int) -> list[Tensor]:
        """Return the outputs for all rows, `[B, ...]` each, with gradient."""
        if num_rows < self.team.size:
            # No process may get an empty batch: all compute all rows, and one gradient counts.
            found = compute(slice(None))
            return list(_CountedOnce.apply(self.team.is_leader, *found))  # type: ignore[no-untyped-call]
        mine = self.team.shard_of(num_rows)
        found = compute(slice(mine.start, mine.stop))
        return list(_Joined.apply(self.team, mine, num_rows, *found))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """Gathers the rows of all processes; the gradient of own rows flows back."""

    @staticmethod
    def forward(ctx: Any, team: Team, mine: range, num_rows: int, *found: Tensor) -> Any:
        ctx.mine = mine
        joined = [some.new_zeros(num_rows, *some.shape[1:]) for some in found]
        for whole, some in zip(joined, found, strict=True):
            whole[mine.start : mine.stop] = some
        # Adding zeros changes no bit, and one exchange fits any number of rows.
        team.all_reduce(joined)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine: range = ctx.mine
        return None, None, None, *(whole[mine.start : mine.stop] for whole in gradients)


class _CountedOnce(torch.autograd.Function):
    """Values equal in all processes, whose gradient flows in one of them."""

    @staticmethod
    def forward(ctx: Any, counts: bool, *found: Tensor) -> Any:
        ctx.counts = counts
        return tuple(some.clone() for some in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *((one if ctx.counts else torch.zeros_like(one)) for one in gradients)
