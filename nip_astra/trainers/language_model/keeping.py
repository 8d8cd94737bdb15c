"""What a trained policy leaves behind."""

from __future__ import annotations

import logging
from pathlib import Path

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.distributed.team import Team
from nip_astra.language_models.services.training import TrainingService
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker

logger = logging.getLogger(__name__)


def keep_policy(
    service: TrainingService,
    run_directory: RunDirectory,
    store: CheckpointStore | None,
    tracker: Tracker,
    *,
    role: str,
) -> Path:
    """Write the trained policy in Hugging Face layout, and hand it to the tracker.

    Parameters
    ----------
    role : str
        What the policy is called.

    Returns
    -------
    Path
        The folder of the model.
    """
    model_dir, run_id = run_directory.path / "model", run_directory.run_id
    service.save_weights_for_sampler(model_dir)
    found = {"latest": store.latest(), "best": store.best()} if store else {}
    for alias, path in found.items():
        if path is not None:
            tracker.log_artifact(
                path, name=f"checkpoint-{run_id}", type="checkpoint", aliases=[alias]
            )
    tracker.log_artifact(model_dir, name=f"{role}-{run_id}", type="model")
    return model_dir


def take_best(service: TrainingService, store: CheckpointStore | None, team: Team) -> None:
    """Give a policy the weights that did best on the dev data.

    Raises
    ------
    CheckpointError
        When their checkpoint is lost or corrupt.
    """
    best = team.from_leader("" if store is None else str(store.open_best()))
    if best:
        service.load_state(Path(best))
        logger.info("restored the best checkpoint %s", Path(best).name)
