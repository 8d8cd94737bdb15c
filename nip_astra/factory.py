"""Construction of a scenario's components from parameters."""

from __future__ import annotations

from pathlib import Path

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.parameters.hyper_parameters import HyperParameters
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.scenarios.registry import SCENARIOS
from nip_astra.trust import active_source


def build_scenario_instance(
    hyper_params: HyperParameters,
    settings: ExperimentSettings,
    *,
    kind: str,
    scenario_dir: Path | None = None,
    trainer_type: str = "rl",
) -> ScenarioInstance:
    """Build the components of the scenario that the parameters describe.

    Parameters
    ----------
    kind : str
        The scenario's kind; its section of `hyper_params` is read.
    scenario_dir : Path, optional
        Folder to which `scenario://` references point.
    trainer_type : str
        What the trainer needs built; see `Trainer.trainer_type`.

    Raises
    ------
    UnknownNameError
        When the kind builds nothing for that trainer type.
    UntrustedRunError
        When the parameters are of a run of others, and name something outside of its folder.
    """
    if (source := active_source()) is not None:
        source.check_outside()
    scenario_class = SCENARIOS.get(kind)
    scenario_class.check_trainer_type(trainer_type)
    return scenario_class.build(
        hyper_params,
        getattr(hyper_params, kind),
        settings,
        scenario_dir=scenario_dir,
        trainer_type=trainer_type,
    )
