"""One iteration of our trainer at a time, with a clock on each of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from measuring import Stopwatch

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.progress import IterationContext, open_progress
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import prepare_experiment
from nip_astra.trainers.rl_tensordict_base import TensorDictRlTrainer

WHOLE, COLLECT, GAE, UPDATE = "iteration", "collect", "GAE", "update"
FORWARD, BACKWARD, CLIP, STEP = "forward", "backward", "clipping", "optimizer"
BUFFER, STATISTICS = "minibatches", "statistics"
PARTS = (WHOLE, COLLECT, GAE, UPDATE, FORWARD, BACKWARD, CLIP, STEP, BUFFER, STATISTICS)
"""What is timed; those from `FORWARD` to `BUFFER` are within `UPDATE`."""

Seconds = dict[str, float]


def graph_trainer(
    num_frames: int, minibatch_size: int, num_epochs: int, num_threads: int
) -> TensorDictRlTrainer:
    """Build a trainer on graph isomorphism at the published shapes, but for the sizes given.

    Its weights are moved a little from their first values, for which two graphs may look the same
    in a way that the next step ends: the difference between them has no one derivative there.
    """
    values: Mapping[str, Any] = {
        "rl.frames_per_batch": num_frames,
        "rl.minibatch_size": minibatch_size,
        "rl.num_epochs": num_epochs,
        "rl.num_iterations": 1_000_000,
        "rl.lr": 3e-4,
        "nip.max_message_rounds": 8,
        "nip.min_message_rounds": 2,
        "graph_isomorphism.dataset.num_train": max(num_frames // 2, 32),
        "graph_isomorphism.dataset.num_test": 32,
        "graph_isomorphism.d_representation": 16,
    }
    agent = {
        "d_gnn": 16,
        "d_gin_mlp": 64,
        "num_transformer_layers": 1,
        "num_heads": 4,
        "d_transformer": 16,
        "d_transformer_mlp": 64,
        "activation_function": "tanh",
    }
    values |= {f"graph_isomorphism.agents.default.{key}": value for key, value in agent.items()}
    values |= {
        "graph_isomorphism.agents.default.num_gnn_layers": 5,
        "graph_isomorphism.agents.verifier.num_gnn_layers": 2,
    }
    resolved = resolve_experiment(
        trainer="vanilla_ppo",
        scenario="graph_isomorphism",
        overrides=[f"{name}={value}" for name, value in values.items()],
        seed=0,
    )
    settings = ExperimentSettings(progress=False, num_threads=num_threads)
    trainer = prepare_experiment(resolved, settings).trainer
    assert isinstance(trainer, TensorDictRlTrainer)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in trainer.agents.parameters():
            weights += 0.01 * torch.randn(weights.shape, generator=generator)
    return trainer


class OurWay:
    """Runs the train loop of a trainer, an iteration at a call.

    Parameters
    ----------
    has_breakdown : bool
        Whether the parts of an update are timed. Where agents learn in threads of their own their
        parts overlap, and say nothing.
    """

    def __init__(self, trainer: TensorDictRlTrainer, *, has_breakdown: bool = True) -> None:
        self.trainer = trainer
        self.has_breakdown = has_breakdown
        self._context = _OneIteration(1_000_000, open_progress(1, enabled=False))

    def iterate(self) -> Seconds:
        """Play and learn once, and give the seconds of each part."""
        trainer, watch = self.trainer, Stopwatch()
        loop: Callable[..., None] = type(trainer)._run_train_loop.__wrapped__  # type: ignore[attr-defined]
        with ExitStack() as stack:
            trainer._build_train_context(stack)
            for owner, name, part in self._timed():
                timed = _timed(getattr(owner, name), watch, part)
                stack.enter_context(mock.patch.object(owner, name, timed))
            if self.has_breakdown:
                buffer = _TimedBuffer(trainer.buffer, watch)
                stack.enter_context(mock.patch.object(trainer.learner, "buffer", buffer))
            started = time.perf_counter()
            loop(trainer, self._context)
            whole = time.perf_counter() - started
        return {WHOLE: whole, **watch.seconds}

    def _timed(self) -> Sequence[tuple[Any, str, str]]:
        trainer = self.trainer
        parts: list[tuple[Any, str, str]] = [
            (trainer.sampler, "collect", COLLECT),
            (trainer.gae, "forward", GAE),
            (trainer.learner, "learn", UPDATE),
            (trainer, "_statistics", STATISTICS),
        ]
        if self.has_breakdown:
            parts += [
                (trainer.loss_module, "agent_losses", FORWARD),
                (torch.autograd, "backward", BACKWARD),
                (trainer.optimizers, "clip", CLIP),
                (trainer.optimizers, "step", STEP),
            ]
        return parts


class _OneIteration(IterationContext):
    """A loop that stops after one more iteration, which is not its last."""

    def iterate(self, start: int = 0) -> Iterator[int]:
        yield start


class _TimedBuffer:
    """A buffer whose taking and giving of frames is timed."""

    def __init__(self, buffer: Any, watch: Stopwatch) -> None:
        self.buffer = buffer
        self.empty = buffer.empty
        self.extend = _timed(buffer.extend, watch, BUFFER)
        self.watch = watch

    def __iter__(self) -> Iterator[Any]:
        minibatches = iter(self.buffer)
        while True:
            with self.watch.phase(BUFFER):
                minibatch = next(minibatches, None)
            if minibatch is None:
                return
            yield minibatch


def _timed(function: Callable[..., Any], watch: Stopwatch, part: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with watch.phase(part):
            return function(*args, **kwargs)

    return run


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch so many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
