"""Opening the models that agents speak through, and what trains them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.language_models.services.chat import ChatModel
from nip_astra.language_models.services.fine_tuning import FineTuningService
from nip_astra.language_models.services.local_fine_tuning import LocalFineTuningService
from nip_astra.language_models.services.openai_fine_tuning import (
    FineTuningParameters,
    OpenAIFineTuning,
)
from nip_astra.language_models.services.patience import open_chat_model
from nip_astra.parameters.types import ChatModelType
from nip_astra.utils.devices import resolve_device


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
    parameters: Any, *, label: str, scenario_dir: Path | None, settings: ExperimentSettings
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
    """

    def open_model(name: str | None) -> ChatModel:
        chosen = parameters if name is None else renamed(parameters, name)
        return open_chat_model(chosen, settings, scenario_dir=scenario_dir, label=label)

    service: FineTuningService | None = None
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
        return settings.run_directory.path.resolve() / "jobs"
    # A trainer that is built by hand, or a dry run, keeps nothing.
    return Path(tempfile.mkdtemp(prefix="nip_astra-jobs-"))
