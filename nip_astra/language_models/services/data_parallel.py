"""A policy whose weights are in several processes, each of which works out a part of every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from nip_astra.distributed.team import Team
from nip_astra.errors import NipAstraError
from nip_astra.language_models.base import TokenCount
from nip_astra.language_models.services.training import LocalTrainingService, Loss


class DataParallelService(LocalTrainingService):
    """A model and its optimizer in each process of a team, with equal weights.

    All go through the same steps. Of each step's batches a process takes a part, its rows weigh as
    they do among all rows of the step, and gradients are added up: so losses and weights are those
    of one process, up to rounding. That holds for losses that are means over rows, or sums over
    tokens divided by `num_tokens_in_step`, as `TrainingService.forward_backward` asks for.

    Parameters
    ----------
    local : LocalTrainingService
        This process' model and optimizer; the leader's weights are taken.
    """

    waits_within_steps: ClassVar[bool] = False
    """Whether others wait for each pass of a process, so that one that fails ends at once."""

    def __init__(self, local: LocalTrainingService, team: Team) -> None:
        super().__init__(
            local.model,
            local.optimizer,
            learned=local.learned,
            modules=local.modules,
            role=local.role,
        )
        self.team = team
        team.broadcast_tensors([*self.learned, *self.modules.buffers()])

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        num_samples = sum(len(batch) for batch in batches)
        failure: NipAstraError | None = None
        mine: dict[str, float] = {}
        with self.model.counting() as spent:
            try:
                mine = self._part_of_step(batches, num_samples, loss)
            except NipAstraError as error:
                if self.waits_within_steps:
                    raise
                # All wait for all: what one cannot do ends the step in each of them.
                failure = error
        part: dict[str, Any] = {
            "failure": None if failure is None else str(failure),
            "figures": mine,
            "has_gradient": [weight.grad is not None for weight in self.learned],
            "tokens": asdict(spent),
        }
        told = self.team.all_gather(part)
        if failure is not None:
            raise failure
        for rank, one in enumerate(told):
            if one["failure"] is not None:
                raise NipAstraError(f"process {rank} could not take its step: {one['failure']}")
            if rank != self.team.rank:
                self.model.token_count.add(TokenCount(**one["tokens"]))
        self._add_up_gradients([one["has_gradient"] for one in told])
        names = dict.fromkeys(name for one in told for name in one["figures"])
        return {name: sum(one["figures"].get(name, 0.0) for one in told) for name in names}

    def _part_of_step(
        self, batches: Sequence[TensorDict], num_samples: int, loss: Loss
    ) -> dict[str, float]:
        """The gradient of this process' rows, and what they add to the means of the step."""
        batches = parts_of(batches, self.team)
        if not batches:
            return {}
        mine = sum(len(batch) for batch in batches)
        share = mine / num_samples
        figures = super().forward_backward(batches, lambda batch: _scaled(loss(batch), share))
        return {"loss": figures.pop("loss")} | {n: value * share for n, value in figures.items()}

    def _add_up_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        """Sum gradients; a weight that has one nowhere keeps none."""
        gradients: list[Tensor] = []
        for weight, *has in zip(self.learned, *has_gradient, strict=True):
            if any(has):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                gradients.append(weight.grad)
        self.team.all_reduce(gradients)


def parts_of(batches: Sequence[TensorDict], team: Team) -> list[TensorDict]:
    """The part of a step's batches that a process takes.

    Whole batches while there is one for each process, of the others some rows.
    """
    num_whole = len(batches) // team.size * team.size
    found: list[TensorDict] = [batches[number] for number in team.shard_of(num_whole)]
    for batch in batches[num_whole:]:
        rows = team.shard_of(len(batch))
        if rows:
            found.append(batch[rows.start : rows.stop])
    return found


def _scaled(output: Any, share: float) -> Any:
    return output._replace(loss=output.loss * share)
