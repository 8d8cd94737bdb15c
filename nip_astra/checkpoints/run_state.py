"""What every checkpoint of every trainer holds: counters, global generators, whose run it is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from nip_astra.checkpoints.tensors import load_state, save_state
from nip_astra.errors import CheckpointError
from nip_astra.parameters.conversion import with_new_names
from nip_astra.parameters.files import flatten
from nip_astra.parameters.hyper_parameters import HyperParameters

STATE = "state"
"""Name, in a checkpoint, of the files with the run's state and its parts."""
GENERATORS = "generators"
"""Name, in a checkpoint, of the files with the generators' states."""
_PLACES_OF_CODE = ("plugins", "custom_trainer_module_path")
"""Parameters that say where code is: a copy of it may be elsewhere, and a run warns of others."""


@dataclass
class RunState:
    """How far a run has come; a family of trainers adds fields of its own.

    Attributes
    ----------
    iteration : int
        Iterations completed.
    num_optimizer_steps : int
        Optimizer steps taken.
    before : dict or None
        What was measured before training; None until then.
    num_measured_iterations : int
        Iterations in which something was measured.
    """

    iteration: int = 0
    num_optimizer_steps: int = 0
    before: dict[str, Any] | None = None
    num_measured_iterations: int = 0

    @property
    def update_count(self) -> int:
        """A number that grows from one checkpoint to the next, by which they are named."""
        return self.iteration

    def to_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Self:
        """Take what `to_dict` gave."""
        return cls(**plain)


class Part(NamedTuple):
    """Something that a checkpoint holds: `load` takes up what `save` gave.

    What `save` gives is of plain values and tensors.

    Attributes
    ----------
    is_memory : bool
        Whether it only spares work that can be done again, so that a run may go on from a
        checkpoint that lacks it.
    """

    save: Callable[[], Any]
    load: Callable[[Any], object]
    is_memory: bool = False


def save_generators(folder: Path) -> None:
    """Write the states of the global generators into a checkpoint."""
    save_state(folder / GENERATORS, global_generators())


def load_generators(folder: Path) -> dict[str, Any]:
    """Read what `save_generators` wrote.

    Raises
    ------
    CheckpointError
        When the files are missing or broken.
    """
    state: dict[str, Any] = load_state(folder / GENERATORS)
    return state


def global_generators() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, as plain values and tensors.

    NumPy's is the one behind `np.random.rand` and its like; torch's are those of the CPU and of
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
    """Take up what `global_generators` gave.

    Of CUDA devices, those take a state that were there when it was saved and are there now.
    """
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for number, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, number)


def described_run(hyper_params: HyperParameters) -> dict[str, Any]:
    """Trainer and parameters, for a checkpoint's manifest."""
    plain: dict[str, Any] = json.loads(json.dumps(hyper_params.to_dict()))
    return {"trainer": hyper_params.trainer, "parameters": plain}


def check_is_of_run(
    checkpoint: Path,
    manifest: Mapping[str, Any],
    hyper_params: HyperParameters,
    *,
    may_differ: tuple[str, ...] = (),
) -> None:
    """Refuse a checkpoint of another trainer, or of a run with other parameters.

    Of a checkpoint that another version of nip_astra wrote, the parameters are compared that both
    versions know. Where plug-ins are is not compared.

    Parameters
    ----------
    may_differ : tuple of str
        Parameters that may be others.

    Raises
    ------
    CheckpointError
        With what differs.
    """
    asked = f"the run was to go on from {checkpoint}"
    metadata, now = manifest["metadata"], described_run(hyper_params)
    if "parameters" not in metadata:
        raise CheckpointError(
            f"{asked}, but an older nip_astra wrote it, which kept neither all generators nor the "
            "parameters, so the numbers would be others. Go on with the version that "
            "environment.json names, or start a new run."
        )
    if metadata["trainer"] != now["trainer"]:
        raise CheckpointError(
            f"{asked}, but that is a checkpoint of the trainer {metadata['trainer']!r} and the "
            f"run's trainer is {now['trainer']!r}. Give the checkpoint of a run of "
            f"{now['trainer']!r}."
        )
    kept = with_new_names(metadata["parameters"], source=str(checkpoint))
    before, given = dict(flatten(kept)), dict(flatten(now["parameters"]))
    is_same_version = before.pop("package_version", None) == given.pop("package_version", None)
    known = before.keys() | given.keys() if is_same_version else before.keys() & given.keys()
    faults = [
        f"{path} was {before.get(path)!r} and is {given.get(path)!r}"
        for path in sorted(known.difference(may_differ, _PLACES_OF_CODE))
        if before.get(path) != given.get(path)
    ]
    if faults:
        raise CheckpointError(
            f"{asked}, but the parameters have been changed since it was written: "
            f"{'; '.join(faults[:5])}{'; and more' if len(faults) > 5 else ''}. Restore them, or "
            "start a new run with the new ones."
        )
