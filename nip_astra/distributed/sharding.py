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
    # A state of another shape, such as Adam's step, is whole in every process.
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    on_device = whole.to(like.device)
    # Without a source rank nothing is sent: each process takes its part of its own tensor.
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def sum_of_squares(tensors: Sequence[Tensor | None]) -> Tensor:
    """Sum the squares of this process's shards of tensors, float64 scalar."""
    squares = []
    for tensor in tensors:
        norm = torch.linalg.vector_norm(local_tensor(tensor).double())
        squares.append(norm**2)
    return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)


def sum_gradients(module: torch.nn.Module) -> None:
    """Let FSDP2 sum gradients over processes instead of averaging them.

    For losses that are divided by the rows of all processes.
    """
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.set_gradient_divide_factor(1.0)
            # Otherwise it uses averages, which gloo does not have.
            submodule.set_force_sum_reduction_for_comms(True)


# ---- rows of a batch

Compute = Callable[[slice], Sequence[Tensor]]
"""Computes a network's outputs for the rows of a slice, with these rows in front: `[b, ...]`."""


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
            outputs = compute(slice(None))
            return list(_CountedOnce.apply(self.team.is_leader, *outputs))  # type: ignore[no-untyped-call]
        rows = self.team.shard_of(num_rows)
        outputs = compute(slice(rows.start, rows.stop))
        return list(_Joined.apply(self.team, rows, num_rows, *outputs))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """Gathers the rows of all processes; the gradient of own rows flows back."""

    @staticmethod
    def forward(ctx: Any, team: Team, rows: range, num_rows: int, *outputs: Tensor) -> Any:
        ctx.rows = rows
        joined = []
        for output in outputs:
            all_rows = output.new_zeros(num_rows, *output.shape[1:])
            all_rows[rows.start : rows.stop] = output
            joined.append(all_rows)
        # Adding zeros changes no bit, and one exchange fits any number of rows.
        team.all_reduce(joined)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows: range = ctx.rows
        own_gradients = [gradient[rows.start : rows.stop] for gradient in gradients]
        # A gradient for each argument of `forward`.
        return None, None, None, *own_gradients


class _CountedOnce(torch.autograd.Function):
    """Outputs equal in all processes, whose gradient flows in one of them."""

    @staticmethod
    def forward(ctx: Any, has_gradient: bool, *outputs: Tensor) -> Any:
        ctx.has_gradient = has_gradient
        # An output that is an input would be taken for a change of the input in place.
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ctx.has_gradient:
            return None, *gradients
        return None, *(torch.zeros_like(gradient) for gradient in gradients)
