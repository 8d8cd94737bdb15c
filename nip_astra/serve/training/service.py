"""The application that trains models for clients."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from fastapi import APIRouter, FastAPI

from nip_astra.serve.app import guarded_app
from nip_astra.serve.settings import ServiceSettings, TrainingProtocol
from nip_astra.serve.training.bases import Bases
from nip_astra.serve.training.routes import TrainingHost, training_routes
from nip_astra.serve.training.tinker.host import TinkerHost
from nip_astra.serve.training.tinker.messages import schema as require_messages
from nip_astra.serve.training.tinker.rest_routes import tinker_rest_routes
from nip_astra.serve.training.tinker.routes import tinker_routes
from nip_astra.serve.training.work import WorkQueue
from nip_astra.utils.devices import resolve_device

ABOUT = {
    "http": "those under /training/v1/models",
    "tinker": "those of Tinker's under /api/v1",
}


@contextmanager
def open_training(
    models: Mapping[str, str],
    settings: ServiceSettings,
    protocols: Collection[TrainingProtocol],
) -> Iterator[FastAPI]:
    """Load models, and work on what clients ask for within the block.

    Raises
    ------
    ModelLoadError
        When a model cannot be loaded.
    """
    if "tinker" in protocols:
        require_messages()
    bases = Bases(models, resolve_device(settings.device))
    work = WorkQueue(settings.max_waiting)
    routers: list[APIRouter] = []
    if "http" in protocols:
        routers.append(training_routes(TrainingHost(bases, work, settings)))
    if "tinker" in protocols:
        host = TinkerHost(bases, work, settings)
        routers += [tinker_routes(host), tinker_rest_routes(host)]
    about = " and ".join(ABOUT[name] for name in protocols)
    try:
        yield guarded_app(routers, settings, about=about)
    finally:
        work.close()
