"""What NexRL's trainers call beside their hooks: services, loggers and dumps of the run.

Training goes through our loop: data that a trainer sends to a service are handed to the loop, which
takes the optimizer steps when the trainer's step has returned.

Shape suffixes: `B` row, `T` token, `R` token after the first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.base import TokenScorer
from nip_astra.nexrl.nexrl_types import Batch, Trajectory
from nip_astra.rollouts.samples import score_batch
from nip_astra.tracking.tracker import plain_numbers
from nip_astra.trainers.service.base import DistillationParameters

if TYPE_CHECKING:
    from nip_astra.nexrl.trainers import NexRLTrainer


# ---- modules of an experiment


class ActivityTrackerProxy:
    """Receives the metrics of a trainer, and knows its step."""

    def __init__(self, trainer: NexRLTrainer | None = None) -> None:
        self._trainer = trainer

    def experiment_logger_post(
        self, backend: str, data: Mapping[str, Any], step: int | None = None
    ) -> None:
        """Log metrics with those of the iteration, whichever the backend and step."""
        if self._trainer is not None:
            self._trainer.log_metrics(plain_numbers(data))

    @contextmanager
    def track(self, module_name: str, work: str) -> Iterator[None]:
        """Enclose the work of a module; nothing waits for it."""
        yield

    def get_training_step(self) -> int:
        """Return the number of finished iterations."""
        return 0 if self._trainer is None else self._trainer.get_train_step()


class NexRLModule:
    """Base of the parts of an experiment."""

    def __init__(self) -> None:
        self._module_name = "invalid"
        self._activity_tracker: Any = None

    def set_activity_tracker(self, tracker: Any) -> None:
        """Set the object that receives metrics."""
        self._activity_tracker = tracker

    def set_module_name(self, module_name: str) -> None:
        """Set the name of this part."""
        self._module_name = module_name

    def get_module_name(self) -> str:
        """Return the name of this part."""
        return self._module_name

    def health_check(self) -> bool:
        """Return True: a part of this process answers."""
        return True


class DataDumper:
    """Writes stages of an iteration for `compare-dumps`; see `settings.dump_period`."""

    def __init__(self, trainer: NexRLTrainer) -> None:
        self._trainer = trainer

    @property
    def enabled(self) -> bool:
        """Whether anything is dumped."""
        return self._trainer.dumps_period > 0

    def should_dump(self, stage: str, step: int) -> bool:
        """Return whether a stage of the current iteration is dumped."""
        return self._trainer.is_dump_due()

    def dump_old_log_probs(self, step: int, old_log_probs: Any, info: Any = None) -> None:
        """Dump log-probabilities of a batch."""
        self._trainer.dump("old_log_probs", {"old_log_probs": old_log_probs})

    def dump_trajectory(self, step: int, trajectories: Sequence[Trajectory], **unused: Any) -> None:
        """Dump the trajectories of a step."""
        self._trainer.dump("nexrl_trajectories", Batch.from_trajectories(trajectories))

    def dump_prepared_trajectories(
        self, step: int, trajectories: Sequence[Trajectory], **unused: Any
    ) -> None:
        """Dump prepared trajectories."""
        self._trainer.dump("nexrl_prepared_trajectories", Batch.from_trajectories(trajectories))

    def dump_datums(self, step: int, datums_data: Sequence[Mapping[str, Any]]) -> None:
        """Dump data of a training service."""
        self._trainer.dump("datums", {"datums": list(datums_data)})

    def dump_training_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Dump the metrics of a step."""
        self._trainer.dump("training_metrics", plain_numbers(metrics))


# ---- services


class TrainServiceClient:
    """The training service of a trainer on batches."""

    def __init__(self, trainer: NexRLTrainer) -> None:
        self._trainer = trainer

    @contextmanager
    def actor_context(self) -> Iterator[None]:
        """Enclose calls; nothing is moved to a device for them."""
        yield

    def compute_log_prob(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the policy's log-probabilities `old_log_probs` of the tokens after the first.

        `batch` is the result of `to_nextrainer_batch`; the result is `{"batch": {...}}`, with
        float32 `[B, R]`, nats, without gradient.
        """
        scored_BT = score_batch(
            Batch.from_nextrainer_batch(batch), self._trainer.service.compute_logprobs
        )
        return {"batch": {"old_log_probs": scored_BT[:, 1:]}}

    def update_actor(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Hand a prepared batch to the loop, which learns from it after the trainer's step."""
        self._trainer.hand_over(Batch.from_nextrainer_batch(batch))
        return {"meta_info": {"metrics": {}}}


class ServiceHolder:
    """The training service of a trainer on trajectories."""

    def __init__(self, trainer: NexRLTrainer) -> None:
        self._trainer = trainer
        self._sampling_path = "initial"

    def forward_backward_and_optim_step(
        self,
        datums_data: Sequence[Mapping[str, Any]],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, float]:
        """Hand data to the loop, which learns from them after the trainer's step.

        Raises
        ------
        ConfigurationError
            For a loss or an optimizer option other than the run's parameters.
        """
        run_options = self._trainer.service_options()
        differing = [
            f"{name} is {value} and {run_options[name]} in the parameters"
            for name, value in {"loss_fn": loss_fn, **options}.items()
            if name in run_options and value != run_options[name]
        ]
        if differing:
            raise ConfigurationError(
                f"the loop trains by the parameters of the run: {'; '.join(differing)}. Set "
                "training and policy_loss there."
            )
        self._trainer.hand_over(
            Batch.from_trajectories([_trajectory_of_datum(datum) for datum in datums_data])
        )
        return {}

    def save_weights_for_sampler(self, name: str) -> str:
        """Return the name: rollouts sample the learned weights without a copy."""
        return name

    def set_current_sampling_path(self, path: str) -> None:
        """Remember a name of `save_weights_for_sampler`."""
        self._sampling_path = path

    def get_current_sampling_path(self) -> str:
        """Return the name of `set_current_sampling_path`."""
        return self._sampling_path

    def get_tokenizer(self) -> Any:
        """Return the policy's tokenizer."""
        return self._trainer.tokenizer

    def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
        """Return the policy's log-probability of each token, None of the first."""
        batch = Batch.from_trajectories([Trajectory(list(tokens), [1] * len(tokens))])
        (scored_T,) = score_batch(batch, self._trainer.service.compute_logprobs).tolist()
        return [None, *scored_T[1:]]

    def load_teacher(self, name: str) -> TokenScorer:
        """Load a frozen model by its path or name on the Hugging Face hub."""
        values = {"teacher": {"_type": "huggingface", "model": name}}
        return self._trainer.load_teacher(DistillationParameters.from_dict(values).teacher)

    def score(self, model: TokenScorer, batch: Batch) -> torch.Tensor:
        """Return another model's log-probabilities of a batch's tokens, `[B, T]`."""
        return self._trainer.score(model, batch)


def _trajectory_of_datum(datum: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a datum; see `functions.convert_trajectories_to_datums`."""
    inputs = datum["loss_fn_inputs"]
    targets = list(inputs["target_tokens"])
    mask = inputs.get("loss_mask", [1] * len(targets))
    return Trajectory(
        [*datum["input_tokens"], targets[-1]],
        [0, *map(int, mask)],
        extra_fields={
            "logprobs": inputs["logprobs"],
            "advantage": torch.tensor([0.0, *inputs["advantages"]]),
        },
    )


class TeacherClient:
    """A frozen model that scores the student's tokens.

    Parameters
    ----------
    sampling_client : TokenScorer
        The model.
    holder : ServiceHolder
        The student's service.
    """

    def __init__(self, sampling_client: TokenScorer, holder: ServiceHolder) -> None:
        self._model, self._holder = sampling_client, holder
        # Trainers score in threads, and a model computes for one of them at a time.
        self._lock = threading.Lock()

    @staticmethod
    def from_config(
        teacher_config: Mapping[str, Any], student_service_holder: ServiceHolder
    ) -> TeacherClient:
        """Load the model named by `checkpoint` or `base_model`.

        Raises
        ------
        ConfigurationError
            For a teacher behind a service (`base_url`).
        """
        if teacher_config.get("base_url"):
            raise ConfigurationError(
                f"the teacher at {teacher_config['base_url']} is behind a service. Give a model of "
                "this process: the path or Hugging Face name as base_model."
            )
        name = teacher_config.get("checkpoint") or teacher_config["base_model"]
        return TeacherClient(student_service_holder.load_teacher(str(name)), student_service_holder)

    def compute_logprobs(self, tokens: Sequence[int]) -> list[float | None]:
        """Return the model's log-probability of each token, None of the first."""
        batch = Batch.from_trajectories([Trajectory(list(tokens), [1] * len(tokens))])
        with self._lock:
            (scored_T,) = self._holder.score(self._model, batch).tolist()
        return [None, *scored_T[1:]]
