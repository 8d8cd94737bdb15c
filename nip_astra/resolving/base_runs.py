"""Runs on which other runs build: their parameters as a layer, and their trained agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, ParameterError, ParameterFault, UnknownNameError
from nip_astra.parameters.content import find_scenario
from nip_astra.parameters.conversion import convert
from nip_astra.parameters.files import VERSION_KEY, Layer, flatten, merge_layers
from nip_astra.parameters.protocols import BaseRunParameters
from nip_astra.scenarios.registry import Scenario
from nip_astra.tracking import run_directory as files
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.trainer_base import Trainer

PARAMETERS, RERUN_TESTS = "parameters", "rerun_tests"
_OF_THE_NEW_RUN = ("base_run", VERSION_KEY, "plugins")
"""Values that a run never takes from its base run."""
SET_FOR_A_RERUN = (*_OF_THE_NEW_RUN, "rl.num_test_iterations")
"""Values that may differ when a run tests the agents of another run again."""
_CUSTOM_TRAINER = ("custom_trainer_module_path", "custom_trainer_class_name")


@dataclass(frozen=True)
class BaseRun:
    """A run on which another one builds; without values there is none.

    Attributes
    ----------
    run_id : str
        Its name.
    values : dict
        Its parameters, as the installed version reads them.
    file : Path or None
        Its parameter file; None for a run on W&B.
    """

    run_id: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    @property
    def source(self) -> str:
        """The source of parameters that the new run takes from it."""
        return f"base run {self.run_id}"

    @property
    def plugins(self) -> list[str]:
        """Plug-ins that it loaded."""
        return [str(spec) for spec in self.values.get("plugins") or []]

    def layer(self, given: Mapping[str, Any]) -> Layer:
        """The layer of its parameters.

        Parameters
        ----------
        given : Mapping
            The new run's own values. If they name another trainer, the custom trainer class of the
            base run is left out.
        """
        trainer = self.values.get("trainer")
        is_other = given.get("trainer", trainer) != trainer
        left_out = (*_OF_THE_NEW_RUN, *(_CUSTOM_TRAINER if is_other else ()))
        return Layer.literal(self.source, self.values).without(left_out)

    def layer_about(
        self, layer: Layer, scenario_dir: Path, scenario_class: type[Scenario], kind: str
    ) -> Layer:
        """The layer without values about another scenario than the new run's."""
        is_same = _is_scenario(self.values.get("scenario"), scenario_dir)
        left_out = set() if is_same else {kind}
        if not scenario_class.uses_protocol:
            left_out.add("interaction_protocol")
        return layer.without(left_out)


def read_base_run(layers: Sequence[Layer]) -> BaseRun:
    """The base run that the layers name, or one without values.

    The parameter file of a run is complete, so its own base run is not read again.

    Raises
    ------
    ParameterError
        If the group `base_run` is wrong.
    RunDirectoryError, TrackingError
        If the run cannot be read.
    ConfigurationError
        If another version wrote it and it cannot be converted.
    """
    values, sources = merge_layers([one for one in layers if not one.is_complete], resolve=False)
    given = values.get("base_run")
    if not isinstance(given, Mapping):
        return BaseRun()  # A malformed group is reported later, with all other faults.
    try:
        parameters = BaseRunParameters.from_dict(given)
    except ParameterError as error:
        paths = [f"base_run.{fault.path}".rstrip(".") for fault in error.faults]
        raise ParameterError(
            [
                fault._replace(path=path, source=sources.get(path, ""))
                for path, fault in zip(paths, error.faults, strict=True)
            ]
        ) from None
    if parameters.run is None:
        return BaseRun()
    if parameters.run.startswith(wandb_runs.SCHEME):
        run_id = wandb_runs.parse_reference(parameters.run).run_id
        stored, file = wandb_runs.read_config(parameters.run), None
    else:
        directory = RunDirectory.open(Path(parameters.run).expanduser())
        run_id, stored = directory.run_id, directory.read_yaml(files.HYPER_PARAMETERS)
        file = directory.path / files.HYPER_PARAMETERS
    return BaseRun(run_id, convert(stored, source=f"the parameters of {parameters.run}"), file)


def check_rerun(base: BaseRun, layers: Sequence[Layer], trainer_class: type[Trainer]) -> None:
    """Refuse values that a run that only tests again would not use.

    Parameters
    ----------
    base : BaseRun
        Without values if a complete layer holds them.
    layers : Sequence[Layer]
        The layers given for the new run.

    Raises
    ------
    ConfigurationError
        If the trainer cannot test agents that it has not trained, or a parameter differs from the
        base run's.
    """
    if trainer_class.rerun_tests is Trainer.rerun_tests:
        raise ConfigurationError(
            f"base_run.base_run_type {RERUN_TESTS!r} is not available for {trainer_class.__name__}."
            f" Use `nip-astra evaluate RUN`, or base_run.base_run_type={PARAMETERS} to train again."
        )
    complete = [layer for layer in layers if layer.is_complete]
    before = dict(flatten(base.values or merge_layers(complete, resolve=False)[0]))
    own = [layer for layer in layers if not layer.is_complete]
    given, sources = merge_layers(own, resolve=False)
    faults = [
        ParameterFault(
            path,
            repr(value),
            f"differs from the base run's {before.get(path)!r}, which is tested again unchanged",
            f"Leave it out, or set base_run.base_run_type={PARAMETERS} to train again.",
            sources.get(path, ""),
        )
        for path, value in flatten(given)
        if not any(f"{path}.".startswith(f"{one}.") for one in SET_FOR_A_RERUN)
        and not _is_same(path, value, before.get(path))
    ]
    if faults:
        raise ParameterError(faults)


def with_absolute_path(parameters: BaseRunParameters) -> BaseRunParameters:
    """The parameters with an absolute path, so that they mean the same in any folder."""
    run = str(parameters.run)
    if run.startswith(wandb_runs.SCHEME):
        return parameters
    return parameters.model_copy(update={"run": str(Path(run).expanduser().resolve())})


def fetch_base_run(parameters: BaseRunParameters, folder: Path) -> Path:
    """The base run's directory; for a run on W&B, one with its trained agents is made.

    Parameters
    ----------
    folder : Path
        Where to make it.

    Raises
    ------
    TrackingError
        If W&B does not provide the agents.
    """
    run = str(parameters.run)
    if not run.startswith(wandb_runs.SCHEME):
        return Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    RunDirectory(folder).write_yaml(files.HYPER_PARAMETERS, wandb_runs.read_config(run))
    wandb_runs.download_model(run, folder / "model")
    return folder


def _is_same(path: str, value: Any, before: Any) -> bool:
    if path == "scenario" and isinstance(value, str) and isinstance(before, str):
        try:
            return _is_scenario(before, find_scenario(value))
        except UnknownNameError:
            return False
    return bool(value == before)


def _is_scenario(name: Any, folder: Path) -> bool:
    """Whether a base run's scenario is the one in a folder."""
    try:
        return find_scenario(str(name)) == folder
    except UnknownNameError:
        return False  # It has moved.
