"""Try the smallest step of an AST run and estimate what the whole would cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from nip_astra.errors import ConfigurationError
from nip_astra.language_models.services.patience import PatientChatModel
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.samplers.sizes import MAX_PROBES, num_probes_of
from nip_astra.trainers.ast.harness import Harness
from nip_astra.utils.processor import peak_memory_bytes


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


def estimate_cost(
    harness: Harness, optimizer: torch.optim.Optimizer, training: TrainingConfiguration
) -> dict[str, Any]:
    """Play one episode and take the loss and gradient of what it gives; weights stay as they are.

    Returns
    -------
    dict
        The time is an upper bound: episodes that are played together share forward passes. The
        memory is what one episode and its step took, with the keys and values of all episodes of an
        iteration and the step scaled to a full batch.
    """
    at_start = peak_memory_bytes()
    started = time.perf_counter()
    with torch.no_grad():
        tree = harness.sampler.sample(
            harness.prompts[:1],
            tree_width=harness.tree_width,
            tree_depth=harness.tree_depth,
            key=(harness.seed, "dry run"),
        )
    played = time.perf_counter()
    after_rollout = peak_memory_bytes()
    samples = harness.digest(tree).samples[: harness.batch_size]
    loss = None
    if samples:
        loss = harness.step(harness.algorithm.collate_fn(samples)).loss
        torch.autograd.backward(loss)
        optimizer.zero_grad(set_to_none=True)
    stepped = time.perf_counter()
    after_step = peak_memory_bytes()
    sampler = harness.sampler
    size = {"tree_width": harness.tree_width, "tree_depth": harness.tree_depth}
    cache_of_one = sampler.cache_bytes(harness.prompts[:1], **size)
    cache = sampler.cache_bytes(harness.prompts[: training.num_episodes_per_experience], **size)
    if sampler.max_cache_bytes is not None:
        cache = min(cache, sampler.max_cache_bytes)
    rollout = after_rollout - at_start + max(cache - cache_of_one, 0)
    step = (after_step - after_rollout) * harness.batch_size / max(len(samples), 1)
    update = after_rollout - at_start + step
    num_episodes = training.training_steps * training.num_episodes_per_experience
    return {
        "num_parameters": harness.sampler.attacker.language_model.num_parameters(),
        "loss": None if loss is None else float(loss.detach()),
        "seconds_per_episode_alone": played - started,
        "seconds_per_update": stepped - played,
        "predicted_rollout_gib": cache / 2**30,
        "predicted_peak_gib": (at_start + max(rollout, update)) / 2**30,
        "training_target_queries": num_episodes * tree.num_nodes,
        "estimated_training_hours_at_most": num_episodes * (stepped - started) / 3600.0,
    }


def estimate_services(
    services: Mapping[str, PatientChatModel], num_episodes: float
) -> dict[str, Any]:
    """What chat models would take in a whole run, by what one episode took.

    Parameters
    ----------
    num_episodes : float
        Episodes of the run, those of evaluations included, in episodes of training.
    """
    found: dict[str, Any] = {}
    for name, model in services.items():
        use = model.use
        tokens = use.prompt_tokens + use.completion_tokens
        key = name.replace(" ", "_")
        found[f"{key}_requests"] = round(use.num_requests * num_episodes)
        found[f"{key}_tokens"] = round(tokens * num_episodes)
        found[f"{key}_cost"] = None if use.cost is None else use.cost * num_episodes
        found[f"{key}_seconds_per_request"] = use.median_seconds
    return found
