"""NexRL's trainers on our loop: `train(trajectories)` is one step, `train()` the whole run."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import JsonValue

from nip_astra.nexrl.functions import log_rollout_metrics
from nip_astra.nexrl.nexrl_types import AnyTrajectory, Batch, Trajectory, as_core
from nip_astra.nexrl.services import (
    ActivityTrackerProxy,
    DataDumper,
    NexRLModule,
    ServiceHolder,
    TrainServiceClient,
)
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.rollouts import trajectory as trajectories_here
from nip_astra.rollouts.batch import Batch as CoreBatch
from nip_astra.rollouts.samples import Sample
from nip_astra.trainers.language_model_base import Experience
from nip_astra.trainers.service import remote_api, self_hosted
from nip_astra.trainers.service.base import ServiceTrainer, logprobs_before_update


def step_or_run(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `train(self, trajectories)` to run the whole loop where no trajectories are given."""

    @functools.wraps(step)
    def train(self: Any, trajectories: list[Trajectory] | None = None) -> Any:
        if trajectories is None:
            return ServiceTrainer.train(self)
        return step(self, trajectories)

    return train


class NexRLTrainer(ServiceTrainer, NexRLModule):
    """What NexRL's trainers have in common: their step, its data, and their parts.

    Each iteration samples trajectories and calls `train(trajectories)`, which returns metrics. What
    it hands to the loop by `hand_over` is then learned from.
    """

    batch_type: ClassVar[type[CoreBatch]] = Batch

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        step = vars(cls).get("train")
        if step is not None:
            cls.train = step_or_run(step)  # type: ignore[method-assign]  # see the docstring

    def __init__(self, config: Any, *parts: Any) -> None:
        super().__init__(config, *parts)
        NexRLModule.__init__(self)
        self._handed_over: list[Sample] | None = None
        self._activity_tracker = ActivityTrackerProxy(self)
        self._data_dumper = DataDumper(self)
        self._train_service_client = TrainServiceClient(self)
        self._service_holder: ServiceHolder | None = None
        self._identifier = "default"
        self._total_train_steps = int(self.config.get("total_train_steps") or 1)
        # One process here; the size of teams is ours.
        self.world_size = 1

    @classmethod
    def config_of_run(cls, hyper_params: HyperParameters) -> DictConfig:
        section = getattr(hyper_params, hyper_params.trainer, None)
        training = hyper_params.training
        service = {
            "identifier": "default",
            "role": "actor",
            "resource": {"world_size": 1, "gpus_per_pod": 1},
            "config": {
                "learning_rate": training.lr,
                "weight_decay": training.weight_decay,
                "grad_clip_norm": training.max_grad_norm,
            },
        }
        config = super().config_of_run(hyper_params)
        values = getattr(section, "trainer_values", {})
        merged = OmegaConf.merge(values, config, {"train_service": service})
        assert isinstance(merged, DictConfig)
        return merged

    # ---- one step

    @abstractmethod
    def train(self, trajectories: list[Trajectory] | None = None) -> Any:
        """Hook: learn from trajectories, and return metrics. Without any, run the whole loop."""

    def prepare(
        self, trajectories: list[trajectories_here.Trajectory]
    ) -> tuple[list[Sample], dict[str, float]]:
        if self._service_holder is None:
            self.set_service_holder(ServiceHolder(self))
        self._handed_over = None
        # The loop collects without gradients, and a trainer may learn by itself.
        with torch.enable_grad():
            metrics = self.train([Trajectory.from_core(trajectory) for trajectory in trajectories])
        return self._handed_over or [], dict(metrics or {})

    def learnt_samples(self, batch: CoreBatch) -> list[Sample]:
        old_logprobs = batch.values.get("old_logprobs")
        is_of_tokens = old_logprobs is None or old_logprobs.shape[1] >= batch.width - 1
        if not is_of_tokens:
            # NexRL's placeholder, one number per row: those of sampling are the old ones.
            batch.values["old_logprobs"] = batch.values["logprobs"]
        return super().learnt_samples(batch)

    def hand_over(self, batch: CoreBatch) -> None:
        """Give a batch with advantages to the loop, to learn from it after this step."""
        batch.values["old_logprobs"] = logprobs_before_update(batch)
        self._handed_over = self.learnt_samples(batch)

    def why_nothing_is_learnt(self, found: Experience) -> str:
        # A trainer that hands nothing over learns by itself.
        return "" if self._handed_over is None else super().why_nothing_is_learnt(found)

    def has_learned(self) -> bool:
        return self._handed_over is None or super().has_learned()

    def _log_rollout_metrics(self, batch: CoreBatch | Sequence[AnyTrajectory]) -> None:
        metrics: dict[str, Any] = {}
        log_rollout_metrics(batch, metrics)
        self.log_metrics(metrics)

    # ---- its parts

    @property
    def _train_step(self) -> int:
        return self.get_train_step()

    def get_train_step(self) -> int:
        """Return the number of finished iterations."""
        return 0 if self.parts is None else int(self.state.iteration)

    def set_service_holder(self, service_holder: ServiceHolder) -> None:
        """Take the training service; called before the first step."""
        self._service_holder = service_holder

    def service_options(self) -> dict[str, Any]:
        """Return the loss and the optimizer's options, as NexRL names them."""
        return {
            "loss_fn": self.parameters.policy_loss.loss,
            "learning_rate": self.training.lr,
            "weight_decay": self.training.weight_decay,
            "grad_clip_norm": self.training.max_grad_norm,
        }

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; without a policy, an object with the padding token 0 alone."""
        if self.parts is None:
            return SimpleNamespace(pad_token_id=0)
        return self.agent.language_model.tokenizer

    @property
    def dumps_period(self) -> int:
        """Iterations between dumps; 0 for none."""
        return self._dumps.period

    def is_dump_due(self) -> bool:
        """Return whether this iteration is dumped."""
        return self.parts is not None and self._dumps.is_due(self.state.iteration)


def on_core(hook: Callable[..., list[Any]]) -> Any:
    """Return a `_prepare_trajectories` of NexRL's trajectories from one of ours."""

    def prepare(
        self: Any, trajectories: Sequence[AnyTrajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        prepared = hook(self, [as_core(trajectory) for trajectory in trajectories], metrics)
        return [Trajectory.from_core(trajectory) for trajectory in prepared]

    return prepare


class BatchParameters(self_hosted.SelfHostedTrainer.Parameters):
    """Rollouts, the loss, and further values of a trainer's configuration."""

    trainer_values: dict[str, JsonValue] = {}
    """Further values of `trainer` in NexRL's file, available as `self._config`."""


class BaseTrainer(NexRLTrainer, self_hosted.SelfHostedTrainer):
    """Base of trainers with a step of their own, `train(trajectories)`.

    The step may hand a batch to the loop (`hand_over`, or `update_actor` of its service), or update
    the weights itself through `self.service`.
    """

    Parameters = BatchParameters

    def _prepare_batch(self, batch: CoreBatch) -> tuple[CoreBatch, dict[str, Any]]:
        """Return a batch unchanged: this step has no part for it."""
        return batch, {}


class SelfHostedTrainer(NexRLTrainer, self_hosted.SelfHostedTrainer):
    """Base of trainers on batches; subclasses implement `_prepare_batch`."""

    Parameters = BatchParameters

    def train(self, trajectories: list[Trajectory] | None = None) -> Any:
        """Prepare a batch of trajectories, and hand it to the loop."""
        if trajectories is None:
            return ServiceTrainer.train(self)
        core = [trajectory.to_core() for trajectory in trajectories]
        self._handed_over, metrics = self_hosted.SelfHostedTrainer.prepare(self, core)
        return metrics


class GrpoBatchParameters(self_hosted.SelfHostedGrpoTrainer.Parameters, BatchParameters):
    """How rewards become advantages, and the loss."""


class SelfHostedGrpoTrainer(SelfHostedTrainer, self_hosted.SelfHostedGrpoTrainer):
    """GRPO on batches; see `trainers.service.self_hosted`."""

    Parameters = GrpoBatchParameters  # type: ignore[assignment]  # of both bases


class DistillationBatchParameters(self_hosted.SelfHostedOpdTrainer.Parameters, BatchParameters):
    """The teacher and the loss."""


class SelfHostedOpdTrainer(SelfHostedTrainer, self_hosted.SelfHostedOpdTrainer):
    """On-policy distillation on batches; see `trainers.service.self_hosted`."""

    Parameters = DistillationBatchParameters  # type: ignore[assignment]  # of both bases


class TrajectoryParameters(remote_api.RemoteApiTrainer.Parameters):
    """Rollouts, the loss, and further values of a trainer's configuration."""

    trainer_values: dict[str, JsonValue] = {}
    """Further values of `trainer` in NexRL's file, available as `self._config`."""


class RemoteApiTrainer(NexRLTrainer, remote_api.RemoteApiTrainer):
    """Base of trainers on trajectories; subclasses implement `_prepare_trajectories`.

    `self._loss_fn` is the loss; a subclass may set it when it is built.
    """

    Parameters = TrajectoryParameters

    def __init__(self, config: Any, *parts: Any) -> None:
        super().__init__(config, *parts)
        training = None if self.parts is None else self.training
        self._learning_rate = None if training is None else training.lr
        self._weight_decay = None if training is None else training.weight_decay
        self._grad_clip_norm = None if training is None else training.max_grad_norm
        # Those of torch's AdamW; the loop has no others, and no bonus for entropy.
        self._beta1, self._beta2, self._eps = 0.9, 0.999, 1e-8
        self._entropy_coeff, self._enable_debug_dump = 0.0, False
        # Counted by steps of NexRL's trainers, to name weights that they save.
        self._step_counter = 0

    @property
    def _loss_fn(self) -> str:
        return str(self.parameters.policy_loss.loss)

    @_loss_fn.setter
    def _loss_fn(self, name: str) -> None:
        options = self.parameters.policy_loss.to_dict() | {"loss": name}
        loss = type(self.parameters.policy_loss).from_dict(options)
        self.parameters = self.parameters.model_copy(update={"policy_loss": loss})

    def train(self, trajectories: list[Trajectory] | None = None) -> Any:
        """Prepare trajectories, and hand them to the loop."""
        if trajectories is None:
            return ServiceTrainer.train(self)
        core = [trajectory.to_core() for trajectory in trajectories]
        self._handed_over, metrics = remote_api.RemoteApiTrainer.prepare(self, core)
        return metrics

    def _call_hook(
        self, trajectories: list[trajectories_here.Trajectory], metrics: dict[str, Any]
    ) -> list[trajectories_here.Trajectory]:
        their_trajectories = [Trajectory.from_core(trajectory) for trajectory in trajectories]
        prepared: Any = self._prepare_trajectories(their_trajectories, metrics)  # type: ignore[arg-type]
        if not isinstance(prepared, list):
            return prepared  # type: ignore[no-any-return]  # reported by the check
        return [as_core(trajectory) for trajectory in prepared]


class GrpoTrajectoryParameters(remote_api.RemoteApiGrpoTrainer.Parameters, TrajectoryParameters):
    """How rewards become advantages, and the loss."""


class RemoteApiGrpoTrainer(RemoteApiTrainer, remote_api.RemoteApiGrpoTrainer):
    """GRPO on trajectories; see `trainers.service.remote_api`."""

    Parameters = GrpoTrajectoryParameters  # type: ignore[assignment]  # of both bases
    _prepare_trajectories = on_core(remote_api.RemoteApiGrpoTrainer._prepare_trajectories)


class DistillationTrajectoryParameters(
    remote_api.RemoteApiOpdTrainer.Parameters, TrajectoryParameters
):
    """The teacher and the loss."""


class RemoteApiOpdTrainer(RemoteApiTrainer, remote_api.RemoteApiOpdTrainer):
    """On-policy distillation on trajectories; see `trainers.service.remote_api`."""

    Parameters = DistillationTrajectoryParameters  # type: ignore[assignment]  # of both bases
    _prepare_trajectories = on_core(remote_api.RemoteApiOpdTrainer._prepare_trajectories)


class CrossEntropyTrajectoryParameters(
    remote_api.RemoteApiCrossEntropyTrainer.Parameters, TrajectoryParameters
):
    """The loss."""


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer, remote_api.RemoteApiCrossEntropyTrainer):
    """Fine-tuning on a task's solutions; see `trainers.service.remote_api`."""

    Parameters = CrossEntropyTrajectoryParameters  # type: ignore[assignment]  # of both bases
    _prepare_trajectories = on_core(remote_api.RemoteApiCrossEntropyTrainer._prepare_trajectories)


# NexRL has one tree of classes; here both kinds of base have loops of ours.
for _base in (SelfHostedTrainer, RemoteApiTrainer):
    BaseTrainer.register(_base)
