"""Choose the trackers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nip_astra.tracking.local import LocalTracker
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import CompositeTracker, Tracker

if TYPE_CHECKING:
    from nip_astra.experiment_settings import ExperimentSettings


def open_tracker(
    settings: ExperimentSettings, run_directory: RunDirectory, config: Mapping[str, Any]
) -> Tracker:
    """Give the local tracker and, unless it is disabled, W&B as its mirror."""
    trackers: list[Tracker] = [LocalTracker(run_directory)]
    if settings.wandb != "disabled":
        from nip_astra.tracking.wandb_tracker import WandbTracker

        trackers.append(
            WandbTracker(
                run_directory,
                mode=settings.wandb,
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                config=config,
            )
        )
    return CompositeTracker(trackers)
