"""What a run on a task would take, by one problem that is played and learnt from."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from tensordict import TensorDict

from nip_astra.distributed.placement import PLACEMENT, Cluster, Work, plans_for
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel
from nip_astra.language_models.services.training import TrainingService
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rollouts.samples import Sample
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.trainers.held_models import memory_of_models, parts_with_models
from nip_astra.trainers.language_model.processes import bytes_read
from nip_astra.trainers.language_model.steps import write_step_totals
from nip_astra.utils.processor import peak_memory_bytes


class LearnsFromTrajectories(Protocol):
    """What an estimate asks of a trainer."""

    training: TrainingConfiguration
    trained_tokens: ClassVar[str]
    policy: LanguageModel
    settings: ExperimentSettings
    scenario_instance: ScenarioInstance
    learned: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer
    service: TrainingService

    def batches(
        self, samples: Sequence[Sample], *, iteration: int, epoch: int
    ) -> Iterator[TensorDict]:
        """An epoch's batches."""

    def loss_of(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, checked."""


@dataclass(frozen=True)
class SmallestStep:
    """What playing one problem and learning from it have taken.

    Attributes
    ----------
    play_seconds, learn_seconds : float
        Of all runs of the problem, and of one minibatch of their samples.
    num_samples, num_learned : int
        Samples that the problem gave, and those of them in the minibatch.
    num_tokens : int
        Tokens that were generated.
    step_bytes : int
        By which the minibatch has raised the most memory that was held.
    loss : float or None
        Of the minibatch; None where there was nothing to learn from.
    """

    play_seconds: float
    learn_seconds: float
    num_samples: int
    num_learned: int
    num_tokens: int
    step_bytes: int
    loss: float | None


def estimate_task_run(
    trainer: LearnsFromTrajectories, collect_one: Callable[[], Sequence[Sample]]
) -> dict[str, Any]:
    """Play one problem and take the gradient of what it gives; weights stay as they are.

    Parameters
    ----------
    collect_one : Callable
        Plays a problem, and gives the samples that it teaches.

    Returns
    -------
    dict
        Times are upper bounds: problems that are played together share forward passes.
    """
    step = _smallest_step(trainer, collect_one)
    work = _work_of(step, trainer)
    per_iteration = work.rollout_seconds + work.update_seconds
    return {
        "num_parameters": trainer.policy.num_parameters(),
        "loss": step.loss,
        "seconds_per_problem_alone": step.play_seconds,
        "seconds_per_minibatch": step.learn_seconds,
        "predicted_peak_gib": (peak_memory_bytes() + work.memory["step"]) / 2**30,
        "generated_tokens": work.num_iterations * work.tokens_per_iteration,
        "estimated_training_hours_at_most": work.num_iterations * per_iteration / 3600.0,
        PLACEMENT: plans_for(work, Cluster()),
    }


def _smallest_step(
    trainer: LearnsFromTrajectories, collect_one: Callable[[], Sequence[Sample]]
) -> SmallestStep:
    started = time.perf_counter()
    with torch.no_grad(), trainer.policy.counting() as spent:
        samples = collect_one()
    played = time.perf_counter()
    before_step = peak_memory_bytes()
    loss, num_learned = None, 0
    for batch in list(trainer.batches(samples, iteration=0, epoch=0))[:1]:
        write_step_totals([batch], trainer.trained_tokens)
        loss = trainer.service.forward_backward([batch], trainer.loss_of)["loss"]
        trainer.optimizer.zero_grad(set_to_none=True)
        num_learned = len(batch)
    return SmallestStep(
        play_seconds=played - started,
        learn_seconds=time.perf_counter() - played,
        num_samples=len(samples),
        num_learned=num_learned,
        num_tokens=spent.generated,
        step_bytes=peak_memory_bytes() - before_step,
        loss=loss,
    )


def _work_of(step: SmallestStep, trainer: LearnsFromTrajectories) -> Work:
    """The whole run, scaled from its smallest step."""
    training = trainer.training
    num_problems = training.num_episodes_per_experience
    num_rows = max(step.num_samples, 1) * num_problems
    rows = min(training.minibatch_size * training.gradient_accumulation_steps, num_rows)
    seconds_per_row = step.learn_seconds / max(step.num_learned, 1)
    rows_of_batch = min(training.minibatch_size, num_rows)
    gradients = float(sum(one.numel() * one.element_size() for one in trainer.learned))
    models = memory_of_models(parts_with_models(trainer.scenario_instance))
    work = Work(
        num_iterations=training.num_iterations,
        num_episodes=num_problems,
        rows_per_step=rows,
        steps_per_iteration=math.ceil(num_rows / rows) * training.num_epochs,
        rollout_seconds=step.play_seconds * num_problems,
        update_seconds=seconds_per_row * num_rows * training.num_epochs,
        tokens_per_iteration=float(step.num_tokens * num_problems),
        gradient_bytes=gradients,
        memory={
            **{f"weights, {name}": size for name, size in models.items()},
            "gradients": gradients,
            "optimizer": gradients * (2 if "adam" in training.optimizer else 1),
            "step": step.step_bytes / max(step.num_learned, 1) * rows_of_batch,
        },
        divided_memory={},
    )
    if trainer.settings.sharding == "none":
        return work
    return work.with_sharded_weights(bytes_read(trainer.policy))
