"""The state of a service: one service at a time has the folder, and works on its jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.serve.app import build_app
from nip_astra.serve.completions import CompletionStore
from nip_astra.serve.job_routes import job_routes
from nip_astra.serve.job_runner import JobRunner
from nip_astra.serve.job_store import JobStore
from nip_astra.serve.settings import ServiceSettings
from nip_astra.serve.shelf import Shelf
from nip_astra.tracking.run_lock import run_lock


@dataclass
class Service:
    """An application with its jobs at work, and the log of what it answered."""

    app: FastAPI
    store: JobStore
    runner: JobRunner
    completions: CompletionStore


@contextmanager
def open_service(shelf: Shelf, settings: ServiceSettings) -> Iterator[Service]:
    """Have the state folder to oneself and work on its jobs within the block.

    Raises
    ------
    ConfigurationError
        When the folder cannot be used, or another service has it.
    """
    folder = settings.state_folder()
    with _lock(folder):
        store = JobStore(folder)
        store.clear_unfinished()
        runner = JobRunner(store, shelf)
        completions = CompletionStore(folder)
        jobs = job_routes(store, runner, shelf, settings)
        app = build_app(shelf, settings, completions, routers=[jobs])
        runner.start()
        try:
            yield Service(app, store, runner, completions)
        finally:
            runner.close()
            shelf.close()
            completions.close()


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = run_lock(folder)
        lock.__enter__()
    except (OSError, RunDirectoryError) as error:
        raise ConfigurationError(
            f"a text service was to keep its files and jobs in {folder}, but cannot: {error} Give "
            "it another folder: --state-dir DIR."
        ) from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
