"""Try the smallest step of an AST run and estimate what the whole would cost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from nip_astra.distributed.placement import PLACEMENT, Cluster, Work, plans_for
from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.base import LanguageModel
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.rl_objectives.outputs import LossOutput
from nip_astra.rollouts.samples import Sample
from nip_astra.rollouts.tree import RolloutTree
from nip_astra.samplers.trees import MAX_PROBES, num_probes_of
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.trainers.ast.rollouts import Rollouts
from nip_astra.trainers.held_models import memory_of_models, parts_with_models
from nip_astra.trainers.language_model.processes import bytes_read
from nip_astra.trainers.language_model_base import Experience
from nip_astra.utils.processor import peak_memory_bytes


class CostlyTrainer(Protocol):
    """What an estimate asks of a trainer."""

    training: TrainingConfiguration
    rollouts: Rollouts
    policy: LanguageModel
    settings: ExperimentSettings
    scenario_instance: ScenarioInstance
    optimizer: torch.optim.Optimizer

    def digest(self, tree: RolloutTree) -> Experience:
        """What a rollout teaches."""

    def collate_fn(self, samples: Sequence[Sample]) -> TensorDict:
        """One batch."""

    def loss_of(self, batch: TensorDict) -> LossOutput:
        """The loss of a batch, checked."""


def check_size(training: TrainingConfiguration, tree_width: int, tree_depth: int) -> None:
    """Refuse iterations that no memory holds.

    Raises
    ------
    ConfigurationError
        When an iteration would play more than `MAX_PROBES` probes.
    """
    num_probes = training.num_episodes_per_experience * num_probes_of(tree_width, tree_depth)
    if num_probes > MAX_PROBES:
        raise ConfigurationError(
            f"{training.num_episodes_per_experience:,} episodes of tree_width {tree_width} and "
            f"tree_depth {tree_depth} were asked for an iteration. These are {num_probes:,} probes "
            f"to be held at once, and {MAX_PROBES:,} are the most. Lower "
            "training.num_episodes_per_experience or the tree, and see --dry-run for what one "
            "episode takes."
        )


def estimate_cost(trainer: CostlyTrainer) -> dict[str, Any]:
    """Play one episode and take the loss and gradient of what it gives; weights stay as they are.

    Returns
    -------
    dict
        The time is an upper bound: episodes that are played together share forward passes. The
        memory is what one episode and its step took, with the keys and values of all episodes of an
        iteration and the step scaled to a full batch.
    """
    training, rollouts = trainer.training, trainer.rollouts
    at_start = peak_memory_bytes()
    started = time.perf_counter()
    with torch.no_grad():
        tree = rollouts.play_one()
    played = time.perf_counter()
    after_rollout = peak_memory_bytes()
    samples = trainer.digest(tree).samples[: training.minibatch_size]
    loss = None
    if samples:
        loss = trainer.loss_of(trainer.collate_fn(samples)).loss
        torch.autograd.backward(loss)
        trainer.optimizer.zero_grad(set_to_none=True)
    stepped = time.perf_counter()
    after_step = peak_memory_bytes()
    cache = rollouts.cache_bytes(training.num_episodes_per_experience)
    if rollouts.sampler.max_cache_bytes is not None:
        cache = min(cache, rollouts.sampler.max_cache_bytes)
    rollout = after_rollout - at_start + max(cache - rollouts.cache_bytes(1), 0)
    step = (after_step - after_rollout) * training.minibatch_size / max(len(samples), 1)
    update = after_rollout - at_start + step
    work = _work_of(
        trainer,
        tree,
        num_samples=len(samples),
        seconds=(played - started, stepped - played),
        memory=(float(cache), max(float(step), 0.0)),
    )
    num_episodes = training.num_iterations * training.num_episodes_per_experience
    return {
        "num_parameters": trainer.policy.num_parameters(),
        "loss": None if loss is None else float(loss.detach()),
        "seconds_per_episode_alone": played - started,
        "seconds_per_update": stepped - played,
        "predicted_rollout_gib": cache / 2**30,
        "predicted_peak_gib": (at_start + max(rollout, update)) / 2**30,
        "training_target_queries": num_episodes * tree.num_nodes,
        "estimated_training_hours_at_most": num_episodes * (stepped - started) / 3600.0,
        PLACEMENT: plans_for(work, Cluster()),
    }


def _work_of(
    trainer: CostlyTrainer,
    tree: RolloutTree,
    *,
    num_samples: int,
    seconds: tuple[float, float],
    memory: tuple[float, float],
) -> Work:
    """The run as one episode and its step have shown it.

    Parameters
    ----------
    seconds : tuple of float
        That the episode and the step took.
    memory : tuple of float
        Bytes of keys and values of an iteration, and of a full minibatch's step.
    """
    training = trainer.training
    per_iteration = training.num_episodes_per_experience
    rows = training.minibatch_size * training.gradient_accumulation_steps
    # Of one episode the first minibatch alone was learned from.
    num_rows = max(num_samples, 1) * per_iteration
    num_learned = num_rows * training.num_epochs
    learned = sum(p.numel() * p.element_size() for p in trainer.policy.parameters())
    models = memory_of_models(parts_with_models(trainer.scenario_instance))
    work = Work(
        num_iterations=training.num_iterations,
        num_episodes=per_iteration,
        rows_per_step=min(rows, num_rows),
        steps_per_iteration=math.ceil(num_rows / rows) * training.num_epochs,
        rollout_seconds=seconds[0] * per_iteration,
        update_seconds=seconds[1] / max(num_samples, 1) * num_learned,
        tokens_per_iteration=float(tree.nodes["probe_mask"].sum()) * per_iteration,
        gradient_bytes=float(learned),
        memory={
            **{f"weights, {name}": size for name, size in models.items()},
            "gradients": float(learned),
            "optimizer": 2.0 * learned if "adam" in training.optimizer else float(learned),
            "step": memory[1],
        },
        divided_memory={"keys and values": memory[0]},
    )
    if trainer.settings.sharding == "none":
        return work
    return work.with_sharded_weights(bytes_read(trainer.policy))
