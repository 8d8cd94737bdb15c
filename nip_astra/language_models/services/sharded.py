"""A policy of whose weights each of several processes holds and steps a part (FSDP2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
from nip_astra.errors import CheckpointError
from nip_astra.language_models.adapters import has_adapter, learned_weights, saved_weights
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.huggingface import HuggingFaceLanguageModel
from nip_astra.language_models.plain_forward import RowReader, layers_of
from nip_astra.language_models.services.data_parallel import DataParallelService
from nip_astra.language_models.services.optimizer_files import (
    OPTIMIZER,
    OPTIMIZER_SHARDS,
    put_together,
    taken_apart,
)
from nip_astra.language_models.services.training import (
    LocalTrainingService,
    Loss,
    OptimizerFigures,
    check_step,
)

_SAVE = "save_sharded_state"


class ShardedService(DataParallelService):
    """A model of which each process of a team holds a part: weights, gradients and optimizer.

    A part is gathered from all when it is read, layer by layer, and forgotten again. The numbers
    are those of `DataParallelService`, up to rounding: of each step's batches a process takes a
    part, rows weigh as they do among all, and gradients are added up. What learns beside the model
    is small, and whole in each process.

    The weights under an adapter are divided as well, though they do not learn: they have neither
    gradients nor optimizer, and no process but the leader holds them whole.

    The leader holds the model whole beside its part, for it samples, scores and measures alone; it
    is brought up to date by `gather`. An engine of vLLM takes what has changed from there.

    Parameters
    ----------
    local : LocalTrainingService
        This process' model, whole, and its optimizer, which has not stepped; the leader's weights
        are taken. In the other processes the model is divided in place, and only learns then.

    Raises
    ------
    ConfigurationError
        When the model's layers are not known.
    """

    waits_within_steps: ClassVar[bool] = True

    def __init__(self, local: LocalTrainingService, team: Team) -> None:
        super().__init__(local, team)
        self.learner = learner_of(local.model)
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
        """What the leader asks the others for."""
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
        sums: dict[str, float] = {}
        for batch, num_rows in self._parts_of(batches):
            share = num_rows / num_samples
            value, metrics = loss(batch)
            torch.autograd.backward(value * share)
            for name, figure in {"loss": value, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + share * float(figure.detach().double())
        return sums

    def _parts_of(self, batches: Sequence[TensorDict]) -> Iterator[tuple[TensorDict, int]]:
        """The part of a step's batches that this process takes, with the rows that count.

        As many in each: a pass waits for all processes. Where there is no row to take, one is read
        that does not count.
        """
        num_whole = len(batches) // self.team.size * self.team.size
        for number in self.team.shard_of(num_whole):
            yield batches[number], len(batches[number])
        for batch in batches[num_whole:]:
            rows = self.team.shard_of(len(batch))
            yield (batch[rows.start : rows.stop], len(rows)) if rows else (batch[:1], 0)

    def _add_up_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        # Those of the parts were added up when each layer had been gone through backwards.
        num_parts = len(self._parts)
        super()._add_up_gradients(
            [[False] * num_parts + [*one[num_parts:]] for one in has_gradient]
        )

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        check_step(lr, max_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        gradients = [local_tensor(one.grad) for one in self.learned if one.grad is not None]
        norm = self._norm()
        if max_grad_norm is not None and math.isfinite(norm):
            # As torch.nn.utils.clip_grad_norm_ does it.
            torch._foreach_mul_(gradients, min(1.0, max_grad_norm / (norm + 1e-6)))
        figures = OptimizerFigures(norm, was_taken=math.isfinite(norm))
        if figures.was_taken:
            self.optimizer.step()
            self._is_gathered = False
        self.optimizer.zero_grad(set_to_none=True)
        return figures

    def _norm(self) -> float:
        """The norm of all gradients, of which each process has a part."""
        parts = [local_tensor(one.grad) for one in self._parts if one.grad is not None]
        square = sum_of_squares(parts)
        self.team.all_reduce([square])
        beside = [one.grad for one in self._beside if one.grad is not None]
        return math.sqrt(float(square + sum_of_squares(beside)))

    # ---- the leader's own model

    @torch.no_grad()
    def gather(self) -> None:
        """Bring the leader's model up to date; all processes do so together."""
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
        """Have each process write its part; called by the leader while it may ask."""
        assert self.team.can_request
        self.team.request(_SAVE, [str(directory)] * self.team.size)
        _, state = taken_apart(self.optimizer)
        save_state(
            directory / OPTIMIZER,
            {"modules": dict(self.modules.state_dict()), "optimizer": state},
        )
        self.learner.save_description(directory / self.role)

    def _save_parts(self, directory: Path) -> None:
        tensors, _ = taken_apart(self.optimizer)
        with lost_process_errors(self.team, only_if=LOST):
            save_shards(directory / self.role / SHARDS, self._named_parts())
            save_shards(directory / OPTIMIZER_SHARDS, tensors)

    def load_state(self, directory: Path) -> None:
        content = load_state(directory / OPTIMIZER)
        self._load_weights(directory / self.role)
        self.modules.load_state_dict(content["modules"])
        put_together(self.optimizer, content["optimizer"], directory / OPTIMIZER_SHARDS, shard)
        self._is_gathered = False

    @torch.no_grad()
    def _load_weights(self, folder: Path) -> None:
        """Take each process' part of weights that were saved divided or whole."""
        parts = self._named_parts()
        if (folder / SHARDS).is_dir():
            load_shards(folder / SHARDS, parts)
            return
        saved = saved_weights(folder, is_adapter=has_adapter(self._module))
        for name, part in parts.items():
            if name not in saved or saved[name].shape != part.shape:
                raise CheckpointError(
                    f"the weights in {folder} were to be divided, but they are of another model: "
                    f"{name} does not fit. Resume with the parameters that wrote them."
                )
            local_tensor(part).copy_(local_tensor(shard(saved[name], part)))

    def _named_parts(self) -> dict[str, Tensor]:
        return learned_weights(self._module)


def learner_of(model: LanguageModel) -> HuggingFaceLanguageModel:
    """What learns of a policy: the model itself, or beside an engine that samples its scorer."""
    learner = getattr(model, "scorer", model)
    assert isinstance(learner, HuggingFaceLanguageModel)
    return learner


def divide(reader: RowReader, team: Team, model: HuggingFaceLanguageModel) -> None:
    """Leave each process of a team a part of a reader's weights, by layers.

    Raises
    ------
    ConfigurationError
        When its layers are not known.
    """
    options: dict[str, Any] = {"mesh": team.mesh(model.device)}
    mixed = options
    if model.dtype != next(reader.parameters()).dtype:
        # Layers travel rounded; what they are given is left to autocast, as in one process.
        policy = MixedPrecisionPolicy(model.dtype, torch.float32, cast_forward_inputs=False)
        mixed = options | {"mp_policy": policy}
    for layer in layers_of(reader):
        fully_shard(layer, **mixed)
    fully_shard(reader, **options)
    sum_gradients(reader)
