"""Runs on which other runs build: their parameters as a layer, and their trained agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError, ParameterError, ParameterFault, UnknownNameError
from nip_astra.parameters.content import find_scenario
from nip_astra.parameters.conversion import convert
from nip_astra.parameters.loading import (
    VERSION_KEY,
    Layer,
    flatten,
    literal_layer,
    merge_layers,
)
from nip_astra.parameters.protocols import BaseRunParameters
from nip_astra.scenarios.registry import Scenario
from nip_astra.tracking import run_directory as files
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.trainer_base import Trainer

PARAMETERS, RERUN_TESTS = "parameters", "rerun_tests"
CHOSEN_BY_A_RERUN = ("base_run", "rl.num_test_iterations", "package_version", "plugins")
"""What the new run says itself when it tests the agents of another run again."""
_NEVER_TAKEN_OVER = ("base_run", "package_version", "plugins")
_OF_A_CUSTOM_TRAINER = ("custom_trainer_module_path", "custom_trainer_class_name")


@dataclass(frozen=True)
class BaseRun:
    """A run on which another one builds; without values it is none.

    Attributes
    ----------
    run_id : str
        Its name.
    values : dict
        Its parameters, as the installed version reads them.
    file : Path or None
        Its parameter file; None for a run on W&B.
    """

    run_id: str
    values: dict[str, Any]
    file: Path | None = None

    @property
    def source(self) -> str:
        """What stands as the source of parameters that the new run takes from it."""
        return f"base run {self.run_id}"

    @property
    def plugins(self) -> list[str]:
        """Plug-ins that it loaded."""
        return [str(spec) for spec in self.values.get("plugins") or []]

    def layer(self, asked: Mapping[str, Any]) -> Layer:
        """The layer of its parameters.

        Parameters
        ----------
        asked : Mapping
            What the new run says itself. If that is another trainer, a class that the base run
            names by file is not it.
        """
        is_other = asked.get("trainer", self.values.get("trainer")) != self.values.get("trainer")
        left_out = (*_NEVER_TAKEN_OVER, *(_OF_A_CUSTOM_TRAINER if is_other else ()))
        values = {name: v for name, v in self.values.items() if name not in left_out}
        return literal_layer(self.source, values)

    def layer_about(
        self, layer: Layer, scenario_dir: Path, scenario_class: type[Scenario], kind: str
    ) -> Layer:
        """The layer without what belongs to a scenario that is not the new run's."""
        left_out = set() if _is_scenario(self.values.get("scenario"), scenario_dir) else {kind}
        if not scenario_class.uses_protocol:
            left_out.add("interaction_protocol")
        return only(layer, set(layer.values) - left_out)


def only(layer: Layer, names: Iterable[str]) -> Layer:
    """A layer without groups and sections of other names."""
    known = set(names)
    values = {name: value for name, value in layer.values.items() if name in known}
    return Layer(layer.source, values)


def read_base_run(layers: Sequence[Layer]) -> BaseRun:
    """The run that the layers name as base run, or one without values.

    What a run itself wrote down is complete, so the base run that it names is not asked again.

    Raises
    ------
    ParameterError
        When the group `base_run` is wrong.
    RunDirectoryError, TrackingError
        When it cannot be read.
    ConfigurationError
        When it was written by another version and cannot be converted.
    """
    asked, sources = merge_layers([one for one in layers if not is_complete(one)], resolve=False)
    given = asked.get("base_run")
    if not isinstance(given, Mapping):
        return BaseRun("", {})  # what is no group is told later, with all other faults
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
        return BaseRun("", {})
    if parameters.run.startswith(wandb_runs.SCHEME):
        run_id = wandb_runs.parse_reference(parameters.run).run_id
        values, file = wandb_runs.read_config(parameters.run), None
    else:
        directory = RunDirectory.open(Path(parameters.run).expanduser())
        run_id, values = directory.run_id, directory.read_yaml(files.HYPER_PARAMETERS)
        file = directory.path / files.HYPER_PARAMETERS
    return BaseRun(run_id, convert(values, source=f"the parameters of {parameters.run}"), file)


def is_complete(layer: Layer) -> bool:
    """Say whether a layer is what a run wrote down, which holds every parameter."""
    return VERSION_KEY in layer.values


def check_rerun(base: BaseRun, layers: Sequence[Layer], trainer_class: type[Trainer]) -> None:
    """Refuse what a run that only tests again would not use.

    Parameters
    ----------
    base : BaseRun
        Without values where a complete layer holds them.
    layers : Sequence[Layer]
        What was given for the new run.

    Raises
    ------
    ConfigurationError
        When the trainer cannot test agents that it has not trained, or a parameter differs from
        the base run's.
    """
    if trainer_class.rerun_tests is Trainer.rerun_tests:
        raise ConfigurationError(
            f"base_run.base_run_type {RERUN_TESTS!r} was asked for, but the trainer "
            f"{trainer_class.__name__} does not test agents again that it has trained before. A "
            "run of an AST trainer is tested again by `nip-astra evaluate RUN`; to train anew from "
            f"a run's parameters, set base_run.base_run_type={PARAMETERS}."
        )
    complete = [layer for layer in layers if is_complete(layer)]
    of_base = base.values or merge_layers(complete, resolve=False)[0]
    before = dict(flatten(of_base))
    given, sources = merge_layers([one for one in layers if one not in complete], resolve=False)
    faults = [
        ParameterFault(
            path,
            repr(value),
            f"differs from the base run's {before.get(path)!r}, which is tested again as it is",
            f"Leave it out, or set base_run.base_run_type={PARAMETERS} to train anew.",
            sources.get(path, ""),
        )
        for path, value in flatten(given)
        if not _is_chosen(path) and not _is_same(path, value, before.get(path))
    ]
    if faults:
        raise ParameterError(faults)


def located(parameters: BaseRunParameters) -> BaseRunParameters:
    """The parameters with an absolute path, so that they mean the same in any folder."""
    run = str(parameters.run)
    if run.startswith(wandb_runs.SCHEME):
        return parameters
    return parameters.model_copy(update={"run": str(Path(run).expanduser().resolve())})


def fetch_base_run(parameters: BaseRunParameters, folder: Path) -> Path:
    """The base run's directory; of a run on W&B, one with its trained agents is made.

    Parameters
    ----------
    folder : Path
        Where to make it.

    Raises
    ------
    TrackingError
        When W&B does not give the agents.
    """
    run = str(parameters.run)
    if not run.startswith(wandb_runs.SCHEME):
        return Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    RunDirectory(folder).write_yaml(files.HYPER_PARAMETERS, wandb_runs.read_config(run))
    wandb_runs.download_model(run, folder / "model")
    return folder


def _is_chosen(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in CHOSEN_BY_A_RERUN)


def _is_same(path: str, value: Any, before: Any) -> bool:
    if path == "scenario" and isinstance(value, str) and isinstance(before, str):
        try:
            return _is_scenario(before, find_scenario(value))
        except UnknownNameError:
            return False
    return bool(value == before)


def _is_scenario(name: Any, folder: Path) -> bool:
    """Say whether a base run was about the scenario in a folder."""
    try:
        return find_scenario(str(name)) == folder
    except UnknownNameError:
        return False  # it has moved
