"""State common to all checkpoints: counters, global random generators, run parameters."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from nip_astra.checkpoints.tensors import save_state
from nip_astra.errors import CheckpointError
from nip_astra.parameters.conversion import with_new_names
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters

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
    measurement.
    """

    iteration: int = 0
    num_optimizer_steps: int = 0
    before: dict[str, Any] | None = None
    num_measured_iterations: int = 0

    @property
    def update_count(self) -> int:
        """Increasing number in checkpoint names."""
        return self.iteration

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
    metadata, now = manifest["metadata"], described_run(hyper_params)
    if "parameters" not in metadata:
        raise CheckpointError(
            f"{checkpoint} is from an old nip_astra and lacks generators and parameters. Resume "
            "with the version in environment.json, or start a new run."
        )
    if metadata["trainer"] != now["trainer"]:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of the trainer {metadata['trainer']!r}. Give one of "
            f"{now['trainer']!r}."
        )
    kept = with_new_names(metadata["parameters"], source=str(checkpoint))
    before, given = dict(flatten(kept)), dict(flatten(now["parameters"]))
    is_same_version = before.pop("package_version", None) == given.pop("package_version", None)
    known = before.keys() | given.keys() if is_same_version else before.keys() & given.keys()
    faults = [
        f"{path} was {before.get(path)!r} and is {given.get(path)!r}"
        for path in sorted(known.difference(may_differ, _CODE_PATHS))
        if before.get(path) != given.get(path)
    ]
    if faults:
        raise CheckpointError(
            f"cannot resume from {checkpoint} with other parameters: "
            f"{'; '.join(faults[:5])}{'; and more' if len(faults) > 5 else ''}. Restore them, or "
            "start a new run."
        )
