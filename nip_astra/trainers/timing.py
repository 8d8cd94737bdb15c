"""How long the parts of a training iteration take.

A trainer names its parts in `components_to_time`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.trainers.trainer_base import TensorDictTrainer, Trainer

if TYPE_CHECKING:
    from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer
    from nip_astra.trainers.solo_agent import SoloAgentTrainer

Components = dict[str, Callable[[], object]]
"""Parts by name; each can be run any number of times."""


def time_components(
    trainer: Trainer, names: Sequence[str], *, num_repeats: int
) -> dict[str, list[float]]:
    """Seconds of `num_repeats` runs of parts of an iteration, by name; all parts without `names`.

    One more run is not timed. The trainer learns meanwhile and must not be used afterwards.
    """
    with ExitStack() as stack:
        if isinstance(trainer, TensorDictTrainer):
            trainer._build_train_context(stack)
        components = trainer.components_to_time()
        if not components:
            raise ConfigurationError(
                f"the trainer {trainer.hyper_params.trainer!r} has no parts to time. Give it a "
                "method components_to_time, or choose another trainer."
            )
        for name in names:
            if name not in components:
                advice = "A part that needs something to learn is there only where there is some."
                raise UnknownNameError("component", name, components, advice)
        return {name: _times(components[name], num_repeats) for name in names or components}


def _times(component: Callable[[], object], num_repeats: int) -> list[float]:
    seconds = []
    for _ in range(num_repeats + 1):
        started = time.perf_counter()
        component()
        if torch.cuda.is_available():
            # Kernels that were started on a device may still be running.
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def components_of_protocol(trainer: TensorDictRlTrainer) -> Components:
    """`rollout`, `update`, and `forward`: policies and values of an iteration's frames."""
    batch = trainer.collect()
    frames = batch.flatten()

    def update() -> None:
        trainer.agents.train()
        trainer.learner.learn(batch, 0)
        trainer.agents.eval()

    @torch.no_grad()
    def forward() -> None:
        for name in trainer.agents.names:
            trainer.agents.policy(name, frames)
            trainer.agents.values(name, frames)

    return {"rollout": trainer.collect, "update": update, "forward": forward}


def components_of_solo(trainer: SoloAgentTrainer) -> Components:
    """`epoch`, of all agents, and `forward`: what they say of the test datapoints."""

    def epoch() -> None:
        for training in trainer.trainings.values():
            training.run_epoch(0)

    def forward() -> None:
        for training in trainer.trainings.values():
            training.test(trainer.test_environment)

    return {"epoch": epoch, "forward": forward}
