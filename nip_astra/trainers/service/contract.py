"""The config of custom trainers on trajectories, and checks of their hooks' results."""

from __future__ import annotations

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.rollouts.batch import Batch
from nip_astra.rollouts.trajectory import Trajectory
from nip_astra.scenario_instance import ScenarioInstance

Parts = tuple[HyperParameters, ScenarioInstance, ExperimentSettings | None]
"""The three arguments of every trainer."""


def as_config(values: Mapping[str, Any] | DictConfig) -> DictConfig:
    """Return the values of a trainer; an OmegaConf object is returned as it is.

    Other mappings get `algorithm`, `train_service` and `total_train_steps` where they lack these.
    """
    if isinstance(values, DictConfig):
        return values
    config: DictConfig = OmegaConf.create(
        {"algorithm": {}, "train_service": {}, "total_train_steps": 1} | dict(values)
    )
    return config


def takes_config_alone(function: Callable[..., None]) -> bool:
    """Return whether an `__init__` is `def __init__(self, config)`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return len(parameters) == 1 and parameters[0].kind in kinds


def built_of_parts(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap an `__init__(self, config)` to also accept the three arguments of other trainers.

    These become the attribute `parts`, and the config is that of `config_of_run`.
    """

    @functools.wraps(function)
    def build(
        self: Any,
        config: Any,
        scenario_instance: ScenarioInstance | None = None,
        settings: ExperimentSettings | None = None,
    ) -> None:
        if scenario_instance is not None:
            self.parts = (config, scenario_instance, settings)
            config = self.config_of_run(config)
        function(self, as_config(config))

    return build


# ---- what hooks return

TOKEN_FIELDS = {"input_ids": torch.int64, "attention_mask": torch.bool, "loss_mask": torch.bool}
"""Required token fields of a batch, and their dtypes."""


def check_takes(hook: Callable[..., Any], *given: str) -> None:
    """Raise for a hook that does not accept the given arguments."""
    try:
        inspect.signature(hook).bind(*given)
    except TypeError as error:
        owner, _, name = hook.__qualname__.rpartition(".")
        raise ConfigurationError(
            f"{name} of the trainer {owner} does not take {', '.join(given)}: {error}. "
            f"Define {name}(self, {', '.join(given)})."
        ) from error


def check_batch(given: Any, *, trainer: str, num_rows: int) -> tuple[Batch, dict[str, float]]:
    """Return the result of a class's `_prepare_batch`; raise ConfigurationError with all faults."""
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Batch)):
        raise _error(trainer, "_prepare_batch", [f"it returned {_kind(given)}, not (Batch, dict)"])
    batch, metrics = given
    faults: list[str] = []
    if len(batch) != num_rows:
        faults.append(
            f"the batch has {len(batch)} rows, but it was given {num_rows}; leave a row out by "
            "giving it the advantage 0 or row_weights 0"
        )
    if isinstance(batch.values.get("attention_mask"), Tensor):
        faults += _token_faults(batch)
    else:
        faults.append("values['attention_mask'] is missing")
    faults += _advantage_faults(batch)
    faults += _metric_faults(metrics)
    if faults:
        raise _error(trainer, "_prepare_batch", faults, fields=[*batch.values, *batch.metadata])
    return batch, dict(metrics)


def check_trajectories(
    given: Any, *, trainer: str, needs_advantage: bool, metrics: Any
) -> list[Trajectory]:
    """Return the result of `_prepare_trajectories`; raise ConfigurationError with all faults."""
    name = "_prepare_trajectories"
    if not isinstance(given, list) or not all(isinstance(one, Trajectory) for one in given):
        raise _error(trainer, name, [f"it returned {_kind(given)}, not list[Trajectory]"])
    counts = Counter(filter(None, map(_fault_of_advantage, given if needs_advantage else ())))
    faults = [f"{fault} (in {count} of {len(given)})" for fault, count in counts.items()]
    faults += _metric_faults(metrics)
    if faults:
        fields = sorted({key for one in given for key in one.keys()})  # noqa: SIM118 - no mapping
        raise _error(trainer, name, faults, fields=fields)
    return given


def _token_faults(batch: Batch) -> list[str]:
    shape = list(batch.values["attention_mask"].shape)
    faults = []
    for name, dtype in TOKEN_FIELDS.items():
        value = batch.values.get(name)
        if not isinstance(value, Tensor):
            faults.append(f"values[{name!r}] is {_kind(value)} and must be a tensor {shape}")
        elif list(value.shape) != shape:
            faults.append(
                f"values[{name!r}] has the shape {list(value.shape)} and must have {shape}, that "
                "of attention_mask"
            )
        elif value.dtype != dtype:
            faults.append(f"values[{name!r}] is {value.dtype} and must be {dtype}")
    return faults


def _advantage_faults(batch: Batch) -> list[str]:
    value = batch.values.get("advantages")
    rows, width = len(batch), batch.width if "attention_mask" in batch.values else "T"
    wanted = f"a floating tensor of shape [{rows}] or [{rows}, {width}]"
    # Without the first column they belong to NexRL's `responses`.
    shapes = [[rows], [rows, width], *([[rows, width - 1]] if isinstance(width, int) else [])]
    if value is None:
        return [f"values['advantages'] is missing and must be {wanted}"]
    if not isinstance(value, Tensor):
        return [f"values['advantages'] is {_kind(value)} and must be {wanted}"]
    if list(value.shape) not in shapes:
        return [f"values['advantages'] has the shape {list(value.shape)} and must be {wanted}"]
    if not value.is_floating_point():
        return [f"values['advantages'] is {value.dtype} and must be {wanted}"]
    is_read = batch.values["loss_mask"].any(dim=1) if "loss_mask" in batch.values else None
    if value.ndim == 2 and "loss_mask" in batch.values:
        is_read = batch.values["loss_mask"][:, -value.shape[1] :]
    if is_read is not None and is_read.shape == value.shape and not value[is_read].isfinite().all():
        return ["values['advantages'] holds NaN or infinity at trained tokens"]
    return []


def _fault_of_advantage(one: Trajectory) -> str | None:
    value = one.advantage
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "fiub":
        value = torch.as_tensor(value.astype(np.float64))
    wanted = "and must be a number, or a tensor with one per token"
    if value is None:
        return f"trajectory.advantage is missing {wanted}"
    if isinstance(value, Tensor) and value.ndim == 1:
        if len(value) != len(one):
            return f"trajectory.advantage has not one entry a token {wanted}"
        is_finite = bool(value[one.loss_mask].isfinite().all())
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0):
        is_finite = math.isfinite(float(value))
    else:
        return f"trajectory.advantage is {_kind(value)} {wanted}"
    return None if is_finite else f"trajectory.advantage is NaN or infinite {wanted}"


def _metric_faults(metrics: Any) -> list[str]:
    if not isinstance(metrics, Mapping):
        return [f"the metrics are {_kind(metrics)} and must be a dict of numbers"]
    return [
        f"metrics[{name!r}] is {_kind(value)} and must be a number; write float(...)"
        for name, value in metrics.items()
        if not isinstance(value, Real)
    ]


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, list) and value:
        return f"a list of {len(value)} {type(value[0]).__name__}"
    return "nothing" if value is None else f"a {type(value).__name__}"


def _error(
    trainer: str, hook: str, faults: Sequence[str], *, fields: Sequence[str] = ()
) -> ConfigurationError:
    lines = "".join(f"\n  - {fault}" for fault in faults)
    known = f"\nFields there: {', '.join(fields)}." if fields else ""
    return ConfigurationError(
        f"{hook} of the trainer {trainer} returned wrong values:{lines}{known}\nSee the guide "
        "training-on-services for a complete example."
    )
