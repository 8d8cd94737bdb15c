"""What a trainer of one's own may read by name, and how one that takes only that is built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.scenario_instance import ScenarioInstance


class TrainerConfig:
    """The values of a trainer as attributes, and the parts that it is built from.

    Attributes
    ----------
    algorithm : DictConfig
        The trainer's own values: `config.algorithm.my_param`, `config.algorithm.get("x", 0.5)`.
    train_service : DictConfig
        Where the policy learns.
    total_train_steps : int
        Iterations of training.
    values : dict
        All of them as they were given.
    parts : tuple or None
        Hyper-parameters, scenario instance and settings; None for a trainer that is built of
        values alone, to try its hooks.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        parts: tuple[HyperParameters, ScenarioInstance, ExperimentSettings | None] | None = None,
    ) -> None:
        self.algorithm: DictConfig = OmegaConf.create(dict(values.get("algorithm") or {}))
        self.train_service: DictConfig = OmegaConf.create(dict(values.get("train_service") or {}))
        self.total_train_steps = int(values.get("total_train_steps", 1))
        plain: Any = OmegaConf.to_container(OmegaConf.create(dict(values)))
        self.values: dict[str, Any] = plain
        self.parts = parts

    @classmethod
    def of_run(
        cls,
        hyper_params: HyperParameters,
        scenario_instance: ScenarioInstance,
        settings: ExperimentSettings | None,
    ) -> TrainerConfig:
        """The values that a run gives its trainer."""
        section = getattr(hyper_params, hyper_params.trainer, None)
        service = getattr(section, "train_service", None)
        values = {
            "algorithm": getattr(section, "algorithm", {}),
            "train_service": {} if service is None else service.to_dict(),
            "total_train_steps": hyper_params.training.num_iterations,
        }
        return cls(values, (hyper_params, scenario_instance, settings))


def takes_config_alone(function: Callable[..., None]) -> bool:
    """Whether an `__init__` is written as `def __init__(self, config)`."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    return len(parameters) == 1 and parameters[0].kind in kinds


def built_of_parts(function: Callable[..., None]) -> Callable[..., None]:
    """An `__init__(self, config)` that can also be called as those of all trainers are."""

    @functools.wraps(function)
    def build(
        self: Any,
        config: Any,
        scenario_instance: ScenarioInstance | None = None,
        settings: ExperimentSettings | None = None,
    ) -> None:
        if scenario_instance is not None:
            config = TrainerConfig.of_run(config, scenario_instance, settings)
        elif not isinstance(config, TrainerConfig):
            config = TrainerConfig(config)
        function(self, config)

    return build
