"""Networks that read a batch's rows in several processes, each some of them.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nip_astra.distributed.team import Team

Compute = Callable[[slice], Sequence[Tensor]]
"""What a network gives for some rows, `[some, ...]` each."""


class RowDivision:
    """Has each process of a team compute some rows, and all of them know what was computed.

    So a loss sees what it would see in one process, with its means, counts and deviations over all
    rows. Its gradient goes back to the rows of each process alone: those of the weights, added up
    over the processes, are the gradients of one.
    """

    def __init__(self, team: Team) -> None:
        self.team = team

    def __call__(self, compute: Compute, num_rows: int) -> list[Tensor]:
        """What the network gives for all rows, `[B, ...]` each, with gradient."""
        if num_rows < self.team.size:
            # Networks are spared empty batches: all compute all, and the leader's gradient counts.
            found = compute(slice(None))
            return list(_CountedOnce.apply(self.team.is_leader, *found))  # type: ignore[no-untyped-call]
        mine = self.team.shard_of(num_rows)
        found = compute(slice(mine.start, mine.stop))
        return list(_Joined.apply(self.team, mine, num_rows, *found))  # type: ignore[no-untyped-call]


class _Joined(torch.autograd.Function):
    """Rows of all processes put together; the gradient of one's own goes back."""

    @staticmethod
    def forward(ctx: Any, team: Team, mine: range, num_rows: int, *found: Tensor) -> Any:
        ctx.mine = mine
        joined = [some.new_zeros(num_rows, *some.shape[1:]) for some in found]
        for whole, some in zip(joined, found, strict=True):
            whole[mine.start : mine.stop] = some
        # Adding zeros changes no bit, and takes one exchange for rows of any number.
        team.add_up(joined)
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine: range = ctx.mine
        return None, None, None, *(whole[mine.start : mine.stop] for whole in gradients)


class _CountedOnce(torch.autograd.Function):
    """The same in all processes; the gradient is that of one and 0 in the others."""

    @staticmethod
    def forward(ctx: Any, counts: bool, *found: Tensor) -> Any:
        ctx.counts = counts
        return tuple(some.clone() for some in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *((one if ctx.counts else torch.zeros_like(one)) for one in gradients)
