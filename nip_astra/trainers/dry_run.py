"""Measurement of a run's smallest step or its parts, and estimates of the whole run.

Every estimate uses these names; a family adds counts of its own.

- `num_iterations`; `num_parameters`, weights that learn.
- `seconds_per_episode`: one tree, one problem with all its runs, one rollout of chat models, or an
  iteration in one environment of a protocol. `seconds_per_minibatch`, and its `loss` (None without
  samples).
- `predicted_peak_gib`: peak memory.
- `estimated_training_hours`: an upper bound, since episodes share forward passes; for text
  protocols the hours of sampling, without fine-tuning jobs.
- `placement`: the same run on other numbers of devices (`nip_astra.distributed.placement`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nip_astra.distributed.placement import NUM_DEVICES, PLACEMENT, Cluster, Work, plan_for
from nip_astra.errors import ConfigurationError, UnknownNameError
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.progress import ProgressBar, showing
from nip_astra.trainers.trainer_base import TensorDictTrainer, Trainer
from nip_astra.utils.processor import peak_memory_bytes

MAX_DEPTH = 8
"""Maximum nesting depth of models in the components of a scenario."""
_FOREIGN = {"builtins", "torch", "tensordict", "transformers", "tokenizers", "numpy", "functools"}
"""Packages whose objects are not searched for models: they hold none, or their owner lists it."""


@dataclass(frozen=True)
class SmallestStep:
    """Cost of sampling one episode and training on one minibatch of `num_learned` samples.

    `num_samples` and `num_tokens` are those of the episode, `peak_bytes` the peak memory before the
    minibatch and `step_bytes` its increase. `loss` is None without samples.
    """

    play_seconds: float
    step_seconds: float
    num_samples: int
    num_learned: int
    num_tokens: float
    peak_bytes: int
    step_bytes: int
    loss: float | None


def measure_smallest_step(
    play: Callable[[], tuple[Sequence[Any], float]],
    learn: Callable[[Sequence[Any]], tuple[float | None, int]],
) -> SmallestStep:
    """Sample one episode and train on a minibatch of its samples.

    `play` returns the samples and the number of generated tokens; `learn` takes the samples and
    returns the loss and the number of samples in the minibatch.
    """
    started = time.perf_counter()
    samples, num_tokens = play()
    played, peak = time.perf_counter(), peak_memory_bytes()
    loss, num_learned = learn(samples)
    return SmallestStep(
        play_seconds=played - started,
        step_seconds=time.perf_counter() - played,
        num_samples=len(samples),
        num_learned=num_learned,
        num_tokens=num_tokens,
        peak_bytes=peak,
        step_bytes=max(peak_memory_bytes() - peak, 0),
        loss=loss,
    )


def work_of_language_model(
    step: SmallestStep, training: TrainingConfiguration, memory: Mapping[str, float]
) -> Work:
    """Return the whole run, scaled from its smallest step; `memory` as from `memory_of`."""
    num_episodes = training.num_episodes_per_experience
    num_rows = max(step.num_samples, 1) * num_episodes
    rows = min(training.minibatch_size * training.gradient_accumulation_steps, num_rows)
    seconds_per_row = step.step_seconds / max(step.num_learned, 1)
    bytes_per_row = step.step_bytes / max(step.num_learned, 1)
    return Work(
        num_iterations=training.num_iterations,
        num_episodes=num_episodes,
        rows_per_step=rows,
        steps_per_iteration=math.ceil(num_rows / rows) * training.num_epochs,
        rollout_seconds=step.play_seconds * num_episodes,
        update_seconds=seconds_per_row * num_rows * training.num_epochs,
        tokens_per_iteration=step.num_tokens * num_episodes,
        gradient_bytes=memory["gradients"],
        memory={**memory, "step": bytes_per_row * min(training.minibatch_size, num_rows)},
        divided_memory={},
    )


def estimate_run(
    work: Work, step: SmallestStep, num_parameters: int, *, extra_cache_bytes: float = 0.0
) -> dict[str, Any]:
    """Return the estimate of a run, with the names of this module.

    `extra_cache_bytes` are keys and values of an iteration's episodes beyond those of one.
    """
    seconds = work.rollout_seconds + work.update_seconds
    peak = step.peak_bytes + max(extra_cache_bytes, work.memory["step"])
    return {
        "num_iterations": work.num_iterations,
        "num_parameters": num_parameters,
        "loss": step.loss,
        "seconds_per_episode": step.play_seconds,
        "seconds_per_minibatch": step.step_seconds,
        "predicted_peak_gib": peak / 2**30,
        "generated_tokens": work.num_iterations * work.tokens_per_iteration,
        "estimated_training_hours": work.num_iterations * seconds / 3600.0,
        PLACEMENT: [plan_for(work, count, Cluster()) for count in NUM_DEVICES],
    }


# ---- memory


def memory_of(
    parts: Mapping[str, object], learned: Sequence[Tensor], optimizer_bytes: float
) -> dict[str, float]:
    """Return the bytes of each part's weights, of the gradients, and of the optimizer's state."""
    return {
        **{f"weights, {name}": size for name, size in model_memory(parts).items()},
        "gradients": bytes_of(learned),
        "optimizer": optimizer_bytes,
    }


def bytes_of(tensors: Sequence[Tensor]) -> float:
    """Return the bytes of tensors."""
    return float(sum(one.numel() * one.element_size() for one in tensors))


def state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Return the numbers an optimizer stores per weight: 2 for Adam, 0 for SGD without momentum."""
    options = {name: v for name, v in optimizer.param_groups[0].items() if name != "params"}
    weight = torch.nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.zeros_like(weight)
    trial = type(optimizer)([{**options, "params": [weight]}])  # type: ignore[call-arg]  # as the
    trial.step()  # base, whose defaults each optimizer sets itself
    tensors = _tensors_in(dict(trial.state), {id(weight)}, MAX_DEPTH)
    return sum(one.numel() for one in tensors if one.numel() > 1) / weight.numel()


def model_memory(parts: Mapping[str, object]) -> dict[str, float]:
    """Return the bytes of the tensors of each part, including weights prepared for generation.

    Tensors shared by several parts count for the first; parts without any are left out.
    """
    seen: set[int] = set()
    storages: set[int] = set()
    sizes = {}
    for name, part in parts.items():
        size = 0.0
        for tensor in _tensors_in(part, seen, MAX_DEPTH):
            storage = tensor.untyped_storage()
            # Freed matrices all share one empty storage.
            if storage.nbytes() and storage.data_ptr() not in storages:
                storages.add(storage.data_ptr())
                size += storage.nbytes()
        if size:
            sizes[name] = size
    return sizes


def parts_with_models(instance: Any) -> dict[str, object]:
    """Return the components of a scenario instance that may hold models, by name."""
    parts = vars(instance)
    others = {
        "scorer": getattr(parts.get("sampler"), "scorer", None),
        "task": parts.get("task"),
        "reward terms": parts.get("reward_terms"),
        **instance.services,
    }
    return {**instance.agents, **{name: one for name, one in others.items() if one is not None}}


def _tensors_in(value: object, seen: set[int], depth: int) -> Iterator[Tensor]:
    """Yield tensors reachable through attributes and collections; each object is visited once."""
    if id(value) in seen or depth == 0:
        return
    if isinstance(value, Tensor):
        yield value
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
        return
    if isinstance(value, Mapping):
        inner: list[object] = list(value.values())
    elif isinstance(value, list | tuple):
        inner = list(value)
    elif type(value).__module__.partition(".")[0] in _FOREIGN or not hasattr(value, "__dict__"):
        return
    else:
        inner = list(vars(value).values())
    for item in inner:
        yield from _tensors_in(item, seen, depth - 1)


# ---- parts of an iteration


def time_components(
    trainer: Trainer, names: Sequence[str], *, num_repeats: int
) -> dict[str, list[float]]:
    """Time `num_repeats` runs of parts of an iteration, in seconds by name; default: all parts.

    The first run is not timed. The trainer is trained meanwhile and must not be used afterwards.
    """
    with ExitStack() as stack:
        if isinstance(trainer, TensorDictTrainer):
            stack.enter_context(trainer.train_context())
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
        names = names or list(components)
        total, enabled = len(names) * (num_repeats + 1), trainer.settings.progress
        bar = stack.enter_context(showing("Timing", total, enabled=enabled))
        return {name: _times(components[name], num_repeats, bar) for name in names}


def _times(component: Callable[[], object], num_repeats: int, bar: ProgressBar) -> list[float]:
    seconds = []
    for _ in range(num_repeats + 1):
        started = time.perf_counter()
        component()
        if torch.cuda.is_available():
            # Kernels that were started on a device may still be running.
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        bar.step()
    return seconds[1:]
