"""Timed iterations of our trainer of interactive proofs."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from measuring import Stopwatch

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.progress import IterationContext, open_progress
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer

PARTS = WHOLE, COLLECT, GAE, UPDATE = "iteration", "collect", "GAE", "update"
"""Timed parts."""
NUM_ITERATIONS = 1_000_000
"""More than are run, so that no iteration is the last."""


def graph_trainer(
    num_frames: int, minibatch_size: int, num_epochs: int, num_threads: int, device: Any = "cpu"
) -> TensorDictRlTrainer:
    """Build a trainer on graph isomorphism with the published shapes and the given sizes.

    Noise is added to the initial weights: with these, two graphs may have equal embeddings, where
    the absolute difference between them is not differentiable.
    """
    values = {
        "rl.frames_per_batch": num_frames,
        "rl.minibatch_size": minibatch_size,
        "rl.num_epochs": num_epochs,
        "rl.num_iterations": NUM_ITERATIONS,
        "rl.lr": 3e-4,
        "nip.max_message_rounds": 8,
        "nip.min_message_rounds": 2,
        "graph_isomorphism.dataset.num_train": max(num_frames // 2, 32),
        "graph_isomorphism.dataset.num_test": 32,
    }
    resolved = resolve_experiment(
        trainer="vanilla_ppo",
        scenario="graph_isomorphism",
        overrides=[f"{name}={value}" for name, value in values.items()],
        seed=0,
    )
    settings = ExperimentSettings(progress=False, num_threads=num_threads, device=device)
    trainer = prepare_experiment(resolved, settings).trainer
    assert isinstance(trainer, TensorDictRlTrainer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in trainer.agents.parameters():
            weights.add_(0.01 * torch.randn(weights.shape, generator=generator).to(weights))
    return trainer


def iterate(trainer: TensorDictRlTrainer) -> dict[str, float]:
    """Run one iteration as in a run, and return the seconds of each part."""
    watch = Stopwatch()
    parts = {
        COLLECT: (trainer.sampler, "collect"),
        GAE: (trainer.gae, "forward"),
        UPDATE: (trainer.learner, "learn"),
    }
    with ExitStack() as stack:
        trainer._build_train_context(stack)
        for part, (owner, name) in parts.items():
            timed = watch.phase(part)(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed))
        context = IterationContext(NUM_ITERATIONS, open_progress(1, enabled=False))
        with watch.phase(WHOLE):
            trainer._iterate(context, trainer.state.iteration)
    return watch.seconds
