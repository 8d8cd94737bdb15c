"""Opening the models that agents speak through, and what trains them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nip_astra.checkpoints.run_state import STATE
from nip_astra.checkpoints.store import LATEST, CheckpointStore
from nip_astra.checkpoints.tensors import load_state
from nip_astra.errors import CheckpointError, ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.fine_tuning import (
    FineTuningParameters,
    FineTuningService,
    OpenAIFineTuning,
)
from nip_astra.language_models.services.local_fine_tuning import LocalFineTuningService
from nip_astra.language_models.services.retrying import open_chat_model
from nip_astra.parameters.types import ChatModelType
from nip_astra.tracking import wandb_runs
from nip_astra.tracking.run_directory import MODEL_DIR, RESULTS, RunDirectory
from nip_astra.utils.devices import resolve_device

JOBS = "jobs"
"""Folder of a run directory in which models of this process are trained."""
GROUPS = "groups.json"
"""File beside the trained models of a run: the state of each group."""


@dataclass(frozen=True)
class TextModels:
    """A family of models: one to begin with, and those that jobs make of it.

    Attributes
    ----------
    open_model : callable
        Opens the model of a name; that of the beginning for None.
    service : FineTuningService or None
        Trains them; None where nothing does.
    """

    open_model: Callable[[str | None], ChatModel]
    service: FineTuningService | None


def open_text_models(
    parameters: Any,
    *,
    label: str,
    scenario_dir: Path | None,
    settings: ExperimentSettings,
    load_from_run: str | None = None,
    checkpoint_version: str = LATEST,
    agent: str = "",
) -> TextModels:
    """What opens the models of a group of agents, and what trains them.

    A model in this process is trained in this process, and its jobs are kept in the run directory.
    A model behind OpenAI's protocol is trained by jobs of the same service.

    Parameters
    ----------
    parameters : ChatModel.Parameters
        The model that the group begins with.
    label : str
        Who it is in the run, for messages and counts.
    load_from_run : str, optional
        A run whose trained model of `agent` is the first one, held as `parameters` say.
    checkpoint_version : str
        Which of its models.
    """
    service: FineTuningService | None = None

    def open_model(name: str | None) -> ChatModel:
        if name is None and load_from_run is not None:
            trained = _trained_model(load_from_run, checkpoint_version, agent, settings)
            chosen = renamed(parameters, trained if service is None else service.take_up(trained))
        elif name is None:
            chosen = parameters
        else:
            chosen = renamed(parameters, name if service is None else service.place_of(name))
        opened = open_chat_model(chosen, settings, scenario_dir=scenario_dir, label=label)
        # What a run records of a model holds where the run is moved.
        opened.name = name or opened.name
        return opened

    if parameters.type_name == ChatModelType.LOCAL:
        service = LocalFineTuningService(
            _jobs_dir(settings),
            parameters.language_model,
            scenario_dir=scenario_dir,
            device=resolve_device(settings.device),
            num_threads=settings.num_threads,
        )
    elif parameters.type_name == ChatModelType.OPENAI:
        if parameters.service == "local":
            raise ConfigurationError(
                f"{label} was to be a chat model with service: local, which has no jobs that "
                "outlive it to train agents by. Take _type: local, which trains in this process, "
                "or start nip-astra serve and give its base_url."
            )
        service = OpenAIFineTuning(
            FineTuningParameters(
                base_url=parameters.base_url,
                api_key_variable=parameters.api_key_variable,
                timeout=parameters.timeout,
                limits=parameters.limits,
            )
        )
    return TextModels(open_model, service)


def renamed(parameters: Any, name: str) -> Any:
    """Parameters of the same backend with another model.

    Raises
    ------
    ConfigurationError
        When the backend names no model.
    """
    inner = getattr(parameters, "language_model", None)
    if inner is not None and "model" in type(inner).model_fields:
        language_model = inner.model_copy(update={"model": name})
        return parameters.model_copy(update={"language_model": language_model})
    if "model" in type(parameters).model_fields:
        return parameters.model_copy(update={"model": name})
    raise ConfigurationError(
        f"the trained model {name!r} was to take the place of one of the backend "
        f"{parameters.type_name!r}, but its parameters have no field 'model'. Set "
        "freeze_agent=true for its agents, or give the backend's Parameters such a field."
    )


def _jobs_dir(settings: ExperimentSettings) -> Path:
    if settings.run_directory is not None:
        return settings.run_directory.path.resolve() / JOBS
    # A trainer that is built by hand, or a dry run, keeps nothing.
    return Path(tempfile.mkdtemp(prefix="nip_astra-jobs-")) / JOBS


def folder_of_group(name: str) -> str:
    """Name of a group's folder among the trained models of a run."""
    return quote(name, safe="").replace(".", "%2E")


def models_of_run(run: Path, version: str = LATEST) -> dict[str, Any]:
    """The models that a run has trained, by group, as `set_state` takes them.

    Models in the run directory are found there also where it was moved, or holds no more than its
    folder `model`.

    Parameters
    ----------
    version : str
        The name of a checkpoint, whose models they are then; "latest" is the end of the run, or
        else its newest checkpoint.

    Raises
    ------
    ConfigurationError
        When the run names no models.
    CheckpointError
        When it has no such checkpoint, or that is corrupt.
    """
    groups = _groups_of(RunDirectory(run), version)
    if not groups:
        raise ConfigurationError(
            f"the models of {run} were to be taken up, but it names none. Give a run of a trainer "
            "of chat models."
        )
    return {
        name: state | {"model": _found(run, name, state["model"])} for name, state in groups.items()
    }


def _groups_of(directory: RunDirectory, version: str) -> dict[str, Any]:
    store = CheckpointStore(directory.checkpoints_dir)
    if version == LATEST:
        for name in (RESULTS, f"{MODEL_DIR}/{GROUPS}"):
            if (directory.path / name).is_file():
                kept = directory.read_json(name)
                return dict(kept.get("groups") or {}) if name == RESULTS else dict(kept)
        checkpoint, _ = store.open_latest()
    else:
        checkpoint = store.named(version)
    return dict(load_state(checkpoint / STATE)["run"].get("groups") or {})


def _found(run: Path, group: str, model: str | None) -> str | None:
    """Where a model is now."""
    parts = Path(model or "").parts
    if JOBS not in parts:
        return model
    place = len(parts) - 1 - parts[::-1].index(JOBS)
    kept = (Path(*parts[place:]), Path(MODEL_DIR, folder_of_group(group)))
    places = [run.resolve() / one for one in kept]
    return next((str(one) for one in places if one.exists()), model)


def _trained_model(run: str, version: str, agent: str, settings: ExperimentSettings) -> str:
    """The model of an agent of another run."""
    if run.startswith(wandb_runs.SCHEME):
        name = quote(f"{run}@{version}", safe="")
        jobs = _jobs_dir(settings)
        # Without a run directory `jobs` is a temporary folder, whose parent is everyone's.
        folder = (jobs if settings.run_directory is None else jobs.parent) / "loaded" / name
        if not folder.exists():
            unfinished = folder.with_name(f".new-{folder.name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            wandb_runs.download_model(run, unfinished / MODEL_DIR, version)
            unfinished.rename(folder)
        states = models_of_run(folder)
    else:
        states = models_of_run(RunDirectory.find(run, settings.runs_dir).path, version)
    # Older runs do not name the members of a group.
    anyone = [agent] if len(states) == 1 else []
    found = [one for name, one in states.items() if agent in one.get("agents", [name, *anyone])]
    if not found or found[0]["model"] is None:
        trained = sorted(name for name, one in states.items() if one["model"] is not None)
        raise CheckpointError(
            f"the run {run} has no trained model of the agent {agent!r}; it has trained the groups "
            f"{', '.join(trained) or '(none)'}. Name another run, or set load_from_run to null."
        )
    return str(found[0]["model"])
