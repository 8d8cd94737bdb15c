"""Attackers that are folders of models, and not runs: checkpoints and adapters from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.cli.text_attackers import is_text_attacker
from nip_astra.errors import ConfigurationError, ModelLoadError, RunDirectoryError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.sources import is_model_folder
from nip_astra.parameters.types import TrainerType
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.scenario_base.agents import ConversationAgent, build_agent, load_language_model
from nip_astra.scenario_instance import ScenarioInstance
from nip_astra.utils.devices import resolve_device


@dataclass(frozen=True)
class Surroundings:
    """What an attacker talks to where its folder does not say so.

    Attributes
    ----------
    scenario, parameter_file : str or None
        As for a run; one of them at least.
    """

    scenario: str | None = None
    parameter_file: str | None = None

    @property
    def are_given(self) -> bool:
        """Whether either was asked for."""
        return self.scenario is not None or self.parameter_file is not None


def resolve_around(
    folder: Path,
    given: Surroundings,
    overrides: Sequence[str],
    plugins: Sequence[str],
    *,
    is_trusted: bool = False,
) -> ResolvedExperiment:
    """The experiment that a folder's model is to attack in.

    Raises
    ------
    RunDirectoryError
        When the folder holds neither a run nor a model, or nothing says which scenario.
    """
    if not is_model_folder(folder) and not is_text_attacker(str(folder)):
        raise RunDirectoryError(
            f"the attacker of {folder} was to be evaluated, but it is neither a run nor one of its "
            "checkpoints, and holds no model. Give a run, for instance runs/<run id>, one of its "
            "checkpoints, such as runs/<run id>/checkpoints/latest or .../step_<number>, or a "
            "folder with the config.json or adapter_config.json of a model. Probes are given as a "
            ".csv, .tsv, .jsonl, .json or .txt file, a chat model that attacks as a .yaml file."
        )
    if not given.are_given:
        raise RunDirectoryError(
            f"the attacker of {folder} was to be evaluated, but that is no run and does not "
            "say whom it attacks. Give --scenario NAME, or --parameters FILE."
        )
    # No trainer is built; it only completes the parameters.
    trainer = None if given.parameter_file is not None else str(TrainerType.AST_DPO)
    return resolve_experiment(
        trainer=trainer,
        scenario=given.scenario,
        parameter_file=given.parameter_file,
        overrides=overrides,
        plugins=plugins,
        is_trusted=is_trusted,
    )


def attacker_of_folder(
    folder: Path, instance: ScenarioInstance, section: Any, settings: ExperimentSettings
) -> ConversationAgent:
    """The attacker whose model is in a folder; it speaks as the scenario's own does.

    Raises
    ------
    ConfigurationError
        When the backend of the scenario's attacker loads no folders.
    ModelLoadError
        When the model has another vocabulary than the scenario's attacker, under which its probes
        are measured.
    """
    parameters = section.attacker.language_model
    known = type(parameters).model_fields
    if "model" not in known:
        raise ConfigurationError(
            f"the model in {folder} was to be evaluated, but the backend of the scenario's "
            "attacker loads none. Give a scenario whose attacker has a `model`."
        )
    changes = {"model": str(folder.resolve())} | ({"lora": None} if "lora" in known else {})
    model: Any = load_language_model(
        parameters.model_copy(update=changes),
        device=resolve_device(settings.device),
        scenario_dir=instance.scenario_dir,
        trainable=False,
    )
    reference: Any = instance.agents["reference"].language_model
    if model.tokenizer.get_vocab() != reference.tokenizer.get_vocab():
        raise ModelLoadError(
            f"the model in {folder} was to be evaluated, but its vocabulary is not that of the "
            f"scenario's attacker, {parameters.model!r}, under which its probes are measured. Give "
            "a model of the same family, or a scenario or --set ast_chat.attacker.language_model."
            "model=... with the model that this one was trained from."
        )
    return build_agent("attacker", section.attacker, model)
