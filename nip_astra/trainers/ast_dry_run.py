"""Try the smallest step of an AST run and estimate what the whole would cost."""

from __future__ import annotations

import time
from typing import Any

import torch

from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.trainers.harness import Harness


def estimate_cost(
    harness: Harness, optimizer: torch.optim.Optimizer, training: TrainingConfiguration
) -> dict[str, Any]:
    """Play one episode and take the loss and gradient of what it gives; weights stay as they are.

    Returns
    -------
    dict
        The time is an upper bound: episodes that are played together share forward passes.
    """
    started = time.perf_counter()
    with torch.no_grad():
        tree = harness.sampler.sample(
            harness.prompts[:1],
            tree_width=harness.tree_width,
            tree_depth=harness.tree_depth,
            key=(harness.seed, "dry run"),
        )
    played = time.perf_counter()
    samples = harness.algorithm.flatten(tree)[: harness.batch_size]
    loss = None
    if samples:
        loss = harness.step(harness.algorithm.collate_fn(samples)).loss
        torch.autograd.backward(loss)
        optimizer.zero_grad(set_to_none=True)
    stepped = time.perf_counter()
    num_episodes = training.training_steps * training.num_episodes_per_experience
    return {
        "num_parameters": harness.sampler.attacker.language_model.num_parameters(),
        "loss": None if loss is None else float(loss.detach()),
        "seconds_per_episode_alone": played - started,
        "seconds_per_update": stepped - played,
        "training_target_queries": num_episodes * tree.num_nodes,
        "estimated_training_hours_at_most": num_episodes * (stepped - started) / 3600.0,
    }
