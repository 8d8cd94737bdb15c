"""Training of a policy by several processes, each with full weights or with a shard (FSDP2)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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
from nip_astra.rl_objectives.reductions import LossOutput


@dataclass(frozen=True)
class StepReport:
    """What a process tells the others about its part of a step.

    Attributes
    ----------
    failure : str or None
        Reason why it failed.
    figures : dict[str, float]
        Its share of the step's means.
    has_gradient : list of bool
        Whether each learned weight has a gradient.
    tokens : dict[str, int]
        Tokens that it computed, the fields of `TokenCount`.
    """

    failure: str | None
    figures: dict[str, float]
    has_gradient: list[bool]
    tokens: dict[str, int]


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
        own_figures: dict[str, float] = {}
        with self.model.counting() as spent_tokens:
            try:
                own_figures = self._backward_own_rows(batches, num_samples, loss)
            except NipAstraError as error:
                if self.waits_within_steps:
                    raise
                # All processes wait for each other: a failure ends the step in all of them.
                failure = error
        own_report = StepReport(
            failure=None if failure is None else str(failure),
            figures=own_figures,
            has_gradient=[weight.grad is not None for weight in self.learned],
            tokens=asdict(spent_tokens),
        )
        # Processes exchange plain values only, without pickle.
        reports = [StepReport(**fields) for fields in self.team.all_gather(asdict(own_report))]
        if failure is not None:
            raise failure
        for rank, report in enumerate(reports):
            if report.failure is not None:
                raise NipAstraError(f"process {rank} failed at its step: {report.failure}")
            # This process's own tokens are counted already.
            if rank != self.team.rank:
                self.model.token_count.add(TokenCount(**report.tokens))
        self._sum_gradients([report.has_gradient for report in reports])
        # Not every process has rows, and so figures.
        sums: dict[str, float] = {}
        for report in reports:
            for name, figure in report.figures.items():
                sums[name] = sums.get(name, 0) + figure
        return sums

    def _backward_own_rows(
        self, batches: Sequence[TensorDict], num_samples: int, loss: Loss
    ) -> dict[str, float]:
        """Compute the gradient of this process's rows, and their share of the step's means."""
        own_batches = [batch for batch, num_rows in self._select_rows(batches) if num_rows > 0]
        if not own_batches:
            return {}
        # The step's mean is over all rows, the local service's over those of this process.
        share = sum(len(batch) for batch in own_batches) / num_samples

        def scaled_loss(batch: TensorDict) -> LossOutput:
            output = loss(batch)
            return output._replace(loss=output.loss * share)

        figures = super().forward_backward(own_batches, scaled_loss)
        # The loss is scaled already.
        for name in figures:
            if name != "loss":
                figures[name] *= share
        return figures

    def _select_rows(self, batches: Sequence[TensorDict]) -> Iterator[tuple[TensorDict, int]]:
        """Yield this process's part of a step's batches, each with its number of counting rows.

        Equally many in each process: one without rows of a batch gets a row that does not count.
        """
        # Whole batches as far as each process gets as many; the rest is divided by rows.
        num_whole = len(batches) // self.team.size * self.team.size
        for number in self.team.shard_of(num_whole):
            yield batches[number], len(batches[number])
        for batch in batches[num_whole:]:
            rows = self.team.shard_of(len(batch))
            if rows:
                yield batch[rows.start : rows.stop], len(rows)
            else:
                yield batch[:1], 0

    def _sum_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        """Sum gradients over processes; a weight without any keeps none.

        Parameters
        ----------
        has_gradient : Sequence[Sequence[bool]]
            For each process, whether each learned weight has a gradient there.
        """
        gradients: list[Tensor] = []
        for weight, *has_gradient_by_rank in zip(self.learned, *has_gradient, strict=True):
            # The reduction needs as many tensors in each process.
            if any(has_gradient_by_rank):
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
        learner = find_learner(local.model)
        assert learner is not None
        self.learner = learner
        full_weights = list(self.learner.parameters())
        # The leader's whole model stays as it is: it samples with it.
        module = copy.deepcopy(self.learner.module) if team.is_leader else self.learner.module
        self.reader = RowReader(
            module.get_base_model() if has_adapter(module) else module,
            self.learner.dtype,
            recomputes_layers=self.learner.recomputes_layers,
        )
        shard_layers(self.reader, team, self.learner)
        self._module = module
        self._shards = [weight for weight in module.parameters() if weight.requires_grad]
        self._full_weights = full_weights if team.is_leader else None
        self._is_gathered = True
        # The optimizer was built on the whole weights.
        shard_by_weight = dict(zip(full_weights, self._shards, strict=True))
        for group in self.optimizer.param_groups:
            group["params"] = [shard_by_weight.get(weight, weight) for weight in group["params"]]
        # Those of further modules, such as a value head.
        self._unsharded = [weight for weight in self.learned if weight not in shard_by_weight]
        self.learned = [*self._shards, *self._unsharded]

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers of the leader's requests."""
        return {_SAVE: self._save_shards}

    # ---- learning

    def forward_backward(self, batches: Sequence[TensorDict], loss: Loss) -> dict[str, float]:
        with (
            self.learner.reading_through(self.reader),
            lost_process_errors(self.team, only_if=LOST),
        ):
            return super().forward_backward(batches, loss)

    def _backward_own_rows(
        self, batches: Sequence[TensorDict], num_samples: int, loss: Loss
    ) -> dict[str, float]:
        # A pass waits for all processes, so rows that do not count are computed too.
        selected = self._select_rows(batches)
        return accumulate(((batch, num_rows / num_samples) for batch, num_rows in selected), loss)

    def _sum_gradients(self, has_gradient: Sequence[Sequence[bool]]) -> None:
        # Gradients of the shards are summed in the backward pass of each layer.
        num_shards = len(self._shards)
        no_shards = [False] * num_shards
        super()._sum_gradients([[*no_shards, *of_rank[num_shards:]] for of_rank in has_gradient])

    def optim_step(self, *, lr: float, max_grad_norm: float | None = None) -> OptimizerFigures:
        figures = super().optim_step(lr=lr, max_grad_norm=max_grad_norm)
        self._is_gathered &= not figures.was_taken
        return figures

    def _clip(self, max_grad_norm: float | None) -> float:
        # Each process has other elements of the shards, but the same of the unsharded weights.
        sharded = _local_gradients(self._shards)
        square = sum_of_squares(sharded)
        self.team.all_reduce([square])
        unsharded = _local_gradients(self._unsharded)
        norm = math.sqrt(float(square + sum_of_squares(unsharded)))
        if max_grad_norm is not None and math.isfinite(norm):
            # As in torch.nn.utils.clip_grad_norm_.
            factor = min(1.0, max_grad_norm / (norm + 1e-6))
            torch._foreach_mul_([*sharded, *unsharded], factor)
        return norm

    # ---- the leader's own model

    @torch.no_grad()
    def gather(self) -> None:
        """Update the leader's full model; a collective call."""
        if self._is_gathered:
            return
        # One after the other: a process without the whole model holds one whole weight at a time.
        for number, sharded_weight in enumerate(self._shards):
            with lost_process_errors(self.team, only_if=LOST):
                weight = full_tensor(sharded_weight)
            if self._full_weights is not None:
                self._full_weights[number].copy_(weight)
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
        state = split_optimizer(self.optimizer).unsharded
        content = {"modules": dict(self.modules.state_dict()), "optimizer": state}
        save_state(directory / OPTIMIZER, content)
        self.learner.save_description(directory / self.role)

    def _save_shards(self, folder: str) -> None:
        directory = Path(folder)
        tensors = split_optimizer(self.optimizer).sharded
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
        weights = learned_weights(self._module)
        if (folder / SHARDS).is_dir():
            load_shards(folder / SHARDS, weights)
            return
        saved = saved_weights(folder, is_adapter=has_adapter(self._module))
        for name, weight in weights.items():
            if name not in saved or saved[name].shape != weight.shape:
                raise CheckpointError(
                    f"{folder} is of another model: {name} does not fit. Resume with the "
                    "parameters that wrote it."
                )
            local_tensor(weight).copy_(local_tensor(shard(saved[name], weight)))


def _local_gradients(weights: Sequence[Tensor]) -> list[Tensor]:
    return [local_tensor(weight.grad) for weight in weights if weight.grad is not None]


def find_learner(model: object) -> HuggingFaceLanguageModel | None:
    """Return the model with a policy's weights: its scorer, if an engine samples, else itself."""
    learner = getattr(model, "scorer", model)
    return learner if isinstance(learner, HuggingFaceLanguageModel) else None


def shard_layers(reader: RowReader, team: Team, model: HuggingFaceLanguageModel) -> None:
    """Shard a reader's weights over a team, layer by layer."""
    mesh = team.mesh(model.device)
    layer_options: dict[str, Any] = {}
    if model.dtype != next(reader.parameters()).dtype:
        # Layers are sent rounded; their inputs are left to autocast, as in one process.
        layer_options["mp_policy"] = MixedPrecisionPolicy(
            model.dtype, torch.float32, cast_forward_inputs=False
        )
    for layer in find_layers(reader):
        fully_shard(layer, mesh=mesh, **layer_options)
    # After its layers: it takes the weights that are left, embeddings and head, unrounded.
    fully_shard(reader, mesh=mesh)
    sum_gradients(reader)


class OptimizerState(NamedTuple):
    """An optimizer's state, of which each process has a part.

    Attributes
    ----------
    sharded : dict[str, Tensor]
        Sharded tensors, by weight number and name: "3.exp_avg".
    unsharded : dict[str, Any]
        The rest, in the form of `Optimizer.state_dict`.
    """

    sharded: dict[str, Tensor]
    unsharded: dict[str, Any]


def split_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Split an optimizer's state into sharded tensors and the rest."""
    state = optimizer.state_dict()
    sharded: dict[str, Tensor] = {}
    unsharded: dict[int, dict[str, Any]] = {}
    for number, weight_state in state["state"].items():
        unsharded[number] = {}
        for name, content in weight_state.items():
            if isinstance(content, DTensor):
                sharded[f"{number}.{name}"] = content
            else:
                unsharded[number][name] = content
    return OptimizerState(sharded, {"state": unsharded, "param_groups": state["param_groups"]})
