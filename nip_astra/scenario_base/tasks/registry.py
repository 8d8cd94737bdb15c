"""The registry of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nip_astra.parameters.parameters_base import claim_parameters
from nip_astra.parameters.types import TaskType
from nip_astra.registry import Registry
from nip_astra.scenario_base.tasks.base import Task

TASKS: Registry[type[Task]] = Registry(
    "task", package="nip_astra.scenario_base.tasks", members=TaskType
)


def register_task(name: str) -> Callable[[type[Task]], type[Task]]:
    """Register a `Task` subclass under the `_type` by which parameter files name it."""

    def decorate(cls: type[Task]) -> type[Task]:
        claim_parameters(cls, name)
        return TASKS.register(name)(cls)

    return decorate


def build_task(
    parameters: Any, *, seed: int, device: torch.device, scenario_dir: Path | None
) -> Task:
    """The task that the parameters describe."""
    return TASKS.get(parameters.type_name)(
        parameters, seed=seed, device=device, scenario_dir=scenario_dir
    )
