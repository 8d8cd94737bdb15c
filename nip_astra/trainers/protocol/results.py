"""What a run of agents in a protocol leaves behind: results, and what a whole run would cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer


def results_of(trainer: TensorDictRlTrainer) -> dict[str, Any]:
    """What goes into results.json beside the statistics after training."""
    state = trainer.state
    return {
        "kind": "interaction_proof",
        "protocol": trainer.hyper_params.interaction_protocol,
        "agents": list(trainer.agents.names),
        "before": state.before,
        "training": {
            "num_iterations": state.iteration,
            "num_frames": state.iteration * trainer.frames_per_iteration,
            "num_optimizer_steps": state.num_optimizer_steps,
            "last": state.last,
        },
    }


def as_of_test(statistics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of test statistics with the prefix `test_` before each figure."""
    found = {}
    for name, value in statistics.items():
        agent, slash, figure = name.rpartition("/")
        if isinstance(value, float):
            found[f"{agent}{slash}test_{figure}"] = value
    return found


def estimate_cost(trainer: TensorDictRlTrainer) -> dict[str, Any]:
    """Play and learn from one batch, and estimate the time of a whole run."""
    rl = trainer.rl
    started = time.perf_counter()
    batch = trainer.collect()
    collected = time.perf_counter()
    trainer.learner.learn(batch, 0)
    seconds = time.perf_counter() - started
    tests = 2 * rl.num_test_iterations * (collected - started)
    return {
        "num_parameters": sum(weights.numel() for weights in trainer.agents.parameters()),
        "num_iterations": rl.num_iterations,
        "num_frames": rl.num_iterations * batch.numel(),
        "seconds_per_iteration": seconds,
        "estimated_hours": (rl.num_iterations * seconds + tests) / 3600,
    }
