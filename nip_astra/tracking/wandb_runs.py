"""Read finished runs from Weights & Biases: their parameters and the models that they left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nip_astra.errors import (
    ConfigurationError,
    MissingDependencyError,
    NipAstraError,
    TrackingError,
)
from nip_astra.tracking.wandb_tracker import ENVIRONMENT_KEY, has_credentials

SCHEME = "wandb://"
"""How references to runs on W&B begin."""
Answer = TypeVar("Answer")


class WandbReference(NamedTuple):
    """A run on W&B."""

    entity: str
    project: str
    run_id: str

    @property
    def path(self) -> str:
        """What W&B calls the run."""
        return "/".join(self)


def parse_reference(reference: str) -> WandbReference:
    """Read `wandb://entity/project/run_id`."""
    parts = reference.removeprefix(SCHEME).split("/")
    if not reference.startswith(SCHEME) or len(parts) != 3 or not all(parts):
        raise ConfigurationError(
            f"{reference!r} was given as a run on W&B, but it does not name entity, project and "
            "run. Write wandb://entity/project/run_id."
        )
    return WandbReference(*parts)


def read_config(reference: str) -> dict[str, Any]:
    """The parameters that a run recorded."""
    run = _find_run(reference)
    config: dict[str, Any] = _ask(reference, lambda: dict(run.config))
    # What it ran on stands beside the parameters.
    config.pop(ENVIRONMENT_KEY, None)
    return config


def download_model(reference: str, folder: Path, version: str = "latest") -> None:
    """Write the files of a model that a run logged into a folder: of the newest, by default.

    Parameters
    ----------
    version : str
        A version, or one of the aliases that W&B knows it by.
    """
    run = _find_run(reference)
    models = _ask(reference, lambda: [one for one in run.logged_artifacts() if one.type == "model"])
    if not models:
        raise TrackingError(
            f"the trained model of {reference} was to be downloaded, but the run logged none. Only "
            "a run that came to its end logs its model; name another run."
        )
    chosen = next((one for one in models if version in (one.version, *one.aliases)), None)
    if chosen is None and version == "latest":
        chosen = models[-1]
    if chosen is None:
        known = ", ".join(str(one.version) for one in models)
        raise TrackingError(
            f"the trained model {version!r} of {reference} was to be downloaded, but the run "
            f"logged {known}. Give one of them as checkpoint_version, or latest."
        )
    newest = chosen
    _ask(reference, lambda: newest.download(root=str(folder)))


def open_api() -> Any:
    """W&B's public interface."""
    if not has_credentials():
        # W&B itself would stop to ask at a terminal.
        raise TrackingError(
            "a run was to be read from W&B, but there is no W&B key on this machine. Log in with "
            "`wandb login`, set WANDB_API_KEY, or give a run directory."
        )
    try:
        import wandb
    except ImportError as error:
        raise MissingDependencyError(
            f"a run was to be read from W&B, but the package wandb cannot be imported: {error}. "
            "Install it with: pip install wandb"
        ) from error
    return wandb.Api()


def _find_run(reference: str) -> Any:
    path = parse_reference(reference).path
    return _ask(reference, lambda: open_api().run(path))


def _ask(reference: str, question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except NipAstraError:
        raise
    except Exception as error:
        # W&B has an error class for each layer of its client.
        raise TrackingError(
            f"{reference} was to be read from W&B, but that failed: {error}. Check the name and "
            "the network, or give a run directory."
        ) from error
