"""nip_astra: models trained against and with each other by reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nip_astra.lazy import lazy_exports
from nip_astra.version import __version__

if TYPE_CHECKING:
    from nip_astra.experiment_settings import ExperimentSettings as ExperimentSettings
    from nip_astra.parameters.hyper_parameters import HyperParameters as HyperParameters
    from nip_astra.parameters.training import TrainingConfiguration as TrainingConfiguration
    from nip_astra.plugins import load_plugin as load_plugin
    from nip_astra.run import prepare_experiment as prepare_experiment
    from nip_astra.run import resume_experiment as resume_experiment
    from nip_astra.run import run_experiment as run_experiment
    from nip_astra.trainers.registry import register_trainer as register_trainer

_HOMES = {
    "ExperimentSettings": "nip_astra.experiment_settings",
    "HyperParameters": "nip_astra.parameters.hyper_parameters",
    "TrainingConfiguration": "nip_astra.parameters.training",
    "load_plugin": "nip_astra.plugins",
    "prepare_experiment": "nip_astra.run",
    "register_trainer": "nip_astra.trainers.registry",
    "resume_experiment": "nip_astra.run",
    "run_experiment": "nip_astra.run",
}

__all__ = ["__version__", *_HOMES]


# Imported on first use: torch takes seconds, and `--help` needs none of it.
__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
