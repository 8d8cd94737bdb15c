"""Start a text service in a process of its own, and stop it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nip_astra.language_models.services.service_process import SECONDS_TO_START, ServiceProcess
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol


class LocalService(ServiceProcess):
    """A text service in a process of its own; also a context manager that stops it.

    The process ends with the one that started it, however that ends.

    Parameters
    ----------
    models : Mapping[str, str]
        Folder, hub id or `.gguf` file by name.
    settings : ServiceSettings, optional
        Where it listens, if not on a free port of this machine, and its limits. Without a
        `state_dir` its files, jobs and trained models are gone when it is stopped.
    num_threads : int, optional
        CPU cores that it computes with.
    protocols : Sequence[TrainingProtocol]
        By which clients train the models, "http" and "tinker"; without one, the models answer
        texts.
    """

    def __init__(
        self,
        models: Mapping[str, str],
        settings: ServiceSettings | None = None,
        *,
        num_threads: int | None = None,
        protocols: Sequence[TrainingProtocol] = (),
        seconds_to_start: float = SECONDS_TO_START,
    ) -> None:
        given = settings or ServiceSettings(port=0)
        super().__init__(
            models,
            given.to_dict(),
            num_threads=num_threads,
            protocols=protocols,
            seconds_to_start=seconds_to_start,
        )


def start_service(
    models: Mapping[str, str],
    settings: ServiceSettings | None = None,
    *,
    num_threads: int | None = None,
    protocols: Sequence[TrainingProtocol] = (),
) -> LocalService:
    """Start a text service on a free port and wait until it answers.

    For instance, with a model that a scenario ships:

        with start_service({"target": "scenario://pocket_chat/models/target"}) as service:
            client = openai.OpenAI(base_url=service.base_url, api_key="any")

    Raises
    ------
    ServiceError
        When it cannot be started.
    """
    return LocalService(models, settings, num_threads=num_threads, protocols=protocols)
