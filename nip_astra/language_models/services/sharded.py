"""Training of a policy by several processes, each with full weights or with a shard (FSDP2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nip_astra.checkpoints.shards import SHARDS, load_shards, save_shards
from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.distributed.sharding import (
    full_tensor,
    local_tensor,
    shard,
    sum_gradients,
    sum_of_squares,
)
from nip_astra.distributed.team import LOST, Handler, Team, lost_process_errors
from nip_astra.errors import CheckpointError, NipAstraError
from nip_astra.language_models.adapters import has_adapter, learned_weights, saved_weights
from nip_astra.language_models.base import TokenCount
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.plain_forward import RowReader, find_layers
from nip_astra.language_models.services.training import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    LocalTrainingService,
    Loss,
    OptimizerFigures,
    accumulate,
    load_optimizer,
)


class DataParallelService(LocalTrainingService):
    """A model and its optimizer in each process of a team, with equal weights.

    Each process takes a part of a step's batches, weighted as among all rows of the step, and
    gradients are summed: losses and weights are those of one process up to rounding. That holds
    for losses that are means over rows, or sums over tokens divided by `num_tokens_in_step`.

    Parameters
    ----------
    local : LocalTrainingService
        This process' model and optimizer; the leader's weights are taken.
    """

    waits_within_steps: ClassVar[bool] = False
    """Whether processes wait for each other within a pass, so that a failure ends it at once."""

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
                # All processes wait for each other: a failure ends the step in all of them.
                failure = error
        part: dict[str, Any] = {
            "failure": None if failure is None else str(failure),
            "figures": mine,
            "has_gradient": [weight.grad is not None for weight in self.learned],
            "tokens": asdict(spent),
        }
        parts = self.team.all_gather(part)
        if failure is not None:
            raise failure
        for rank, one in enumerate(parts):
            if one["failure"] is not None:
                raise NipAstraError(f"process {rank} failed at its step: {one['failure']}")
            if rank != self.team.rank:
                self.model.token_count.add(TokenCount(**one["tokens"]))
        self._add_up_gradients([one["has_gradient"] for one in parts])
        names = dict.fromkeys(name for one in parts for name in one["figures"])
        return {name: sum(one["figures"].get(name, 0.0) for one in parts) for name in names}

    def _part_of_step(
        self, batches: Sequence[TensorDict], num_samples: int, loss: Loss
    ) -> dict[str, float]:
        """Compute the gradient of this process's rows, and their share of the step's means."""
        batches = [batch for batch, num_rows in self._parts_of(batches) if num_rows]
        if not batches:
            return {}
        share = sum(len(batch) for batch in batches) / num_samples

        def scaled(batch: TensorDict) -> Any:
            output = loss(batch)
            return output._replace(loss=output.loss * share)

        figures = super().forward_backward(batches, scaled)
        return {"loss": figures.pop("loss")} | {n: value * share for n, value in figures.items()}

    def _parts_of(self, batches: Sequence[TensorDict]) -> Iterator[tuple[TensorDict, int]]:
        """Yield this process's part of a step's batches, each with its number of counting rows.

        Equally many in each process: one without rows of a batch gets a row that does not count.
        """
        num_whole = len(batches) // self.team.size * self.team.size
        for number in self.team.shard_of(num_whole):
            yield batches[number], len(batches[number])
        for batch in batches[num_whole:]:
            rows = self.team.shard_of(len(batch))
            yield (batch[rows.start : rows.stop], len(rows)) if rows else (batch[:1], 0)

    def _add_up_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        """Sum gradients over processes; a weight without any keeps none."""
        gradients: list[Tensor] = []
        for weight, *has in zip(self.learned, *has_gradient, strict=True):
            if any(has):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                gradients.append(weight.grad)
        self.team.all_reduce(gradients)


_SAVE = "save_sharded_state"


class ShardedService(DataParallelService):
    """A model sharded over the processes of a team: weights, gradients and optimizer.

    Layers are gathered when they are read. The numbers are those of `DataParallelService` up to
    rounding. The weights under an adapter are divided too; further modules are whole everywhere.

    The leader also holds the whole model, since it samples, scores and measures alone; `gather`
    updates it. An engine of vLLM takes changed weights from there.

    Parameters
    ----------
    local : LocalTrainingService
        This process' whole model, and its optimizer before the first step; the leader's weights
        are taken. In the other processes the model is divided in place, and only learns then.
    """

    waits_within_steps: ClassVar[bool] = True

    def __init__(self, local: LocalTrainingService, team: Team) -> None:
        super().__init__(local, team)
        learner = learner_of(local.model)
        assert learner is not None
        self.learner = learner
        whole = list(self.learner.parameters())
        module = copy.deepcopy(self.learner.module) if team.is_leader else self.learner.module
        self.reader = RowReader(
            module.get_base_model() if has_adapter(module) else module,
            self.learner.dtype,
            recomputes_layers=self.learner.recomputes_layers,
        )
        divide(self.reader, team, self.learner)
        self._module = module
        self._parts = [weight for weight in module.parameters() if weight.requires_grad]
        self._whole = whole if team.is_leader else None
        self._is_gathered = True
        part_of = dict(zip(whole, self._parts, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [part_of.get(weight, weight) for weight in group["params"]]
        self._beside = [weight for weight in self.learned if weight not in part_of]
        self.learned = [*self._parts, *self._beside]

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the leader's requests."""
        return {_SAVE: lambda directory: self._save_parts(Path(directory))}

    # ---- learning

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        with (
            self.learner.reading_through(self.reader),
            lost_process_errors(self.team, only_if=LOST),
        ):
            return super().forward_backward(batches, loss)

    def _part_of_step(
        self, batches: Sequence[TensorDict], num_samples: int, loss: Loss
    ) -> dict[str, float]:
        # A pass waits for all processes, so rows that do not count are computed too.
        parts = self._parts_of(batches)
        return accumulate(((batch, rows / num_samples) for batch, rows in parts), loss)

    def _add_up_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        # Gradients of the parts are summed in the backward pass of each layer.
        num_parts = len(self._parts)
        super()._add_up_gradients(
            [[False] * num_parts + [*one[num_parts:]] for one in has_gradient]
        )

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        figures = super().optim_step(lr=lr, max_grad_norm=max_grad_norm)
        self._is_gathered &= not figures.was_taken
        return figures

    def _clip(self, max_grad_norm: float | None) -> float:
        parts = [local_tensor(one.grad) for one in self._parts if one.grad is not None]
        square = sum_of_squares(parts)
        self.team.all_reduce([square])
        beside = [one.grad for one in self._beside if one.grad is not None]
        norm = math.sqrt(float(square + sum_of_squares(beside)))
        if max_grad_norm is not None and math.isfinite(norm):
            # As in torch.nn.utils.clip_grad_norm_.
            gradients = [local_tensor(one.grad) for one in self.learned if one.grad is not None]
            torch._foreach_mul_(gradients, min(1.0, max_grad_norm / (norm + 1e-6)))
        return norm

    # ---- the leader's own model

    @torch.no_grad()
    def gather(self) -> None:
        """Update the leader's full model; a collective call."""
        if self._is_gathered:
            return
        for number, part in enumerate(self._parts):
            with lost_process_errors(self.team, only_if=LOST):
                weight = full_tensor(part)
            if self._whole is not None:
                self._whole[number].copy_(weight)
        self._is_gathered = True

    def save_weights_for_sampler(self, directory: Path) -> None:
        assert self._is_gathered
        assert self.team.is_leader
        super().save_weights_for_sampler(directory)

    # ---- saving

    def save_state(self, directory: Path) -> None:
        """Let each process write its shard; called by the leader while it may send requests."""
        assert self.team.can_request
        self.team.request(_SAVE, [str(directory)] * self.team.size)
        _, state = split_optimizer(self.optimizer)
        save_state(
            directory / OPTIMIZER, {"modules": dict(self.modules.state_dict()), "optimizer": state}
        )
        self.learner.save_description(directory / self.role)

    def _save_parts(self, directory: Path) -> None:
        tensors, _ = split_optimizer(self.optimizer)
        with lost_process_errors(self.team, only_if=LOST):
            save_shards(directory / self.role / SHARDS, learned_weights(self._module))
            save_shards(directory / OPTIMIZER_SHARDS, tensors)

    def load_state(self, directory: Path) -> None:
        content = load_state(directory / OPTIMIZER)
        self._load_weights(directory / self.role)
        self.modules.load_state_dict(content["modules"])
        load_optimizer(self.optimizer, content["optimizer"], directory / OPTIMIZER_SHARDS, shard)
        self._is_gathered = False

    @torch.no_grad()
    def _load_weights(self, folder: Path) -> None:
        """Load this process's shard of weights saved with or without sharding."""
        parts = learned_weights(self._module)
        if (folder / SHARDS).is_dir():
            load_shards(folder / SHARDS, parts)
            return
        saved = saved_weights(folder, is_adapter=has_adapter(self._module))
        for name, part in parts.items():
            if name not in saved or saved[name].shape != part.shape:
                raise CheckpointError(
                    f"{folder} is of another model: {name} does not fit. Resume with the "
                    "parameters that wrote it."
                )
            local_tensor(part).copy_(local_tensor(shard(saved[name], part)))


def learner_of(model: object) -> HuggingFaceLanguageModel | None:
    """Return the model with a policy's weights: its scorer, if an engine samples, else itself."""
    learner = getattr(model, "scorer", model)
    return learner if isinstance(learner, HuggingFaceLanguageModel) else None


def divide(reader: RowReader, team: Team, model: HuggingFaceLanguageModel) -> None:
    """Shard a reader's weights over a team, layer by layer."""
    options: dict[str, Any] = {"mesh": team.mesh(model.device)}
    mixed = options
    if model.dtype != next(reader.parameters()).dtype:
        # Layers are sent rounded; their inputs are left to autocast, as in one process.
        policy = MixedPrecisionPolicy(model.dtype, torch.float32, cast_forward_inputs=False)
        mixed = options | {"mp_policy": policy}
    for layer in find_layers(reader):
        fully_shard(layer, **mixed)
    fully_shard(reader, **options)
    sum_gradients(reader)


def split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split an optimizer's state into sharded tensors, by weight and name, and the rest."""
    state = optimizer.state_dict()
    divided: dict[str, Tensor] = {}
    rest: dict[int, dict[str, Any]] = {}
    for number, values in state["state"].items():
        rest[number] = {}
        for name, value in values.items():
            if isinstance(value, DTensor):
                divided[f"{number}.{name}"] = value
            else:
                rest[number][name] = value
    return divided, {"state": rest, "param_groups": state["param_groups"]}
