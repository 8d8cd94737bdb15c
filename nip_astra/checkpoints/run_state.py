"""State common to all checkpoints: counters, global random generators, run parameters."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from nip_astra.checkpoints.tensors import save_state
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.parameters.conversion import with_new_names
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.parameters.training import TrainingConfiguration
from nip_astra.utils.seeding import SeedPart, derive_seed

logger = logging.getLogger(__name__)
STATE = "state"
"""File name of the run's state and parts in a checkpoint."""
GENERATORS = "generators"
"""File name of the generators' states in a checkpoint."""
_CODE_PATHS = ("plugins", "custom_trainer_module_path")
"""Paths of code, which may have moved; changed code raises a warning elsewhere."""


@dataclass
class RunState:
    """Progress of a run; a trainer family adds fields.

    `iteration` and `num_optimizer_steps` count completed ones; `before` holds the
    figures before training, None until measured; `num_measured_iterations` are those with a
    measurement; `best_dev_value` is the best dev figure so far, and `num_evals_since_best` counts
    the dev evaluations after it.
    """

    iteration: int = 0
    num_optimizer_steps: int = 0
    before: dict[str, Any] | None = None
    num_measured_iterations: int = 0
    best_dev_value: float | None = None
    num_evals_since_best: int = 0

    @property
    def update_count(self) -> int:
        """Increasing number in checkpoint names."""
        return self.iteration

    def count_evaluation(self, value: float) -> bool:
        """Count a dev evaluation; return whether it is the best so far (NaN never is)."""
        is_best = not math.isnan(value) and (
            self.best_dev_value is None or value > self.best_dev_value
        )
        if is_best:
            self.best_dev_value = value
        self.num_evals_since_best = 0 if is_best else self.num_evals_since_best + 1
        return is_best

    def has_stopped_early(self, training: TrainingConfiguration) -> bool:
        """Return whether the dev evaluations have not improved for too long."""
        patience = training.early_stopping_patience
        return patience is not None and self.num_evals_since_best >= patience

    def log_early_stop(self, training: TrainingConfiguration) -> None:
        """Log why training ends before its last iteration."""
        logger.info(
            "stopped after iteration %d: no better dev/%s in %d evaluations",
            self.iteration,
            training.dev_metric,
            self.num_evals_since_best,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values and tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(**plain)


class Part(NamedTuple):
    """A part of a checkpoint: `load` restores the result of `save`, plain values and tensors.

    With `is_memory` it is only a cache, and a run can resume without it; `if_missing` says what
    that means for a run whose checkpoint was saved by an earlier version.
    """

    save: Callable[[], Any]
    load: Callable[[Any], object]
    is_memory: bool = False
    if_missing: str = "it starts empty"


STATE_METHODS = (
    # torch's modules, optimizers and schedulers
    ("state_dict", "load_state_dict"),
    # samplers and controllers of this package
    ("state", "load_state"),
    # torch.Generator
    ("get_state", "set_state"),
    # random.Random
    ("getstate", "setstate"),
)
"""Names of the methods by which an object gives its state, and takes it back."""


def part_of_object(name: str, keeper: object) -> Part:
    """Return the part of a checkpoint that keeps an object's state.

    Raises
    ------
    ConfigurationError
        When the object has no methods that give and restore its state.
    """
    for save_name, load_name in STATE_METHODS:
        save, load = getattr(keeper, save_name, None), getattr(keeper, load_name, None)
        if callable(save) and callable(load):
            return Part(save, load)
    pairs = ", ".join(f"{save} and {load}" for save, load in STATE_METHODS)
    raise ConfigurationError(
        f"{name!r} is a {type(keeper).__name__}, whose state cannot be kept. Give an object with "
        f"one of: {pairs}."
    )


def save_generators(folder: Path) -> None:
    """Write the states of the global generators into a checkpoint."""
    save_state(folder / GENERATORS, global_generators())


def global_generators() -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators, as plain values and tensors.

    NumPy's is the legacy global generator (`np.random.rand`); torch's are those of the CPU and of
    each CUDA device.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_global_generators(state: dict[str, Any]) -> None:
    """Restore the result of `global_generators`, for the CUDA devices that still exist."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(cuda_state, device)


def described_run(hyper_params: HyperParameters) -> dict[str, Any]:
    """Return trainer and parameters for a checkpoint's manifest."""
    plain: dict[str, Any] = json.loads(json.dumps(hyper_params.to_dict()))
    return {"trainer": hyper_params.trainer, "parameters": plain}


def seed_global_generators(*key: SeedPart) -> None:
    """Seed the global generators of Python, NumPy and torch, all devices included."""
    seed = derive_seed(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def seeded_global_generators(*key: SeedPart) -> Iterator[None]:
    """Seed the global generators within the block, and restore them after it."""
    before = global_generators()
    seed_global_generators(*key)
    try:
        yield
    finally:
        set_global_generators(before)


def check_is_of_run(
    checkpoint: Path,
    manifest: Mapping[str, Any],
    hyper_params: HyperParameters,
    *,
    may_differ: tuple[str, ...] = (),
) -> None:
    """Raise for a checkpoint of another trainer, or of a run that differs beyond `may_differ`.

    If another version of nip_astra wrote the checkpoint, only the parameters known to both are
    compared. Paths of plug-ins are not compared.
    """
    metadata, current = manifest["metadata"], described_run(hyper_params)
    if "parameters" not in metadata:
        raise CheckpointError(
            f"{checkpoint} is from an old nip_astra and lacks generators and parameters. Resume "
            "with the version in environment.json, or start a new run."
        )
    if metadata["trainer"] != current["trainer"]:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of the trainer {metadata['trainer']!r}. Give one of "
            f"{current['trainer']!r}."
        )
    stored_parameters = with_new_names(metadata["parameters"], source=str(checkpoint))
    stored_values = dict(flatten(stored_parameters))
    values = dict(flatten(current["parameters"]))
    stored_version = stored_values.pop("package_version", None)
    if stored_version == values.pop("package_version", None):
        paths = stored_values.keys() | values.keys()
    else:
        # A parameter that a version lacks had no effect there.
        paths = stored_values.keys() & values.keys()
    faults = [
        f"{path} was {stored_values.get(path)!r} and is {values.get(path)!r}"
        for path in sorted(paths.difference(may_differ, _CODE_PATHS))
        if stored_values.get(path) != values.get(path)
    ]
    if faults:
        raise CheckpointError(
            f"cannot resume from {checkpoint} with other parameters: "
            f"{'; '.join(faults[:5])}{'; and more' if len(faults) > 5 else ''}. Restore them, or "
            "start a new run."
        )
