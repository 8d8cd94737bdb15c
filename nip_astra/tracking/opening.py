"""Choose the trackers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from nip_astra.tracking.local import LocalTracker
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import CompositeTracker, Tracker


class TrackingSettings(Protocol):
    """The settings that choose trackers; `ExperimentSettings` has them."""

    @property
    def wandb(self) -> Literal["disabled", "offline", "online"]:
        """Whether Weights & Biases mirrors the run directory."""

    @property
    def wandb_project(self) -> str | None:
        """W&B project; None for that of the environment, or nip_astra."""

    @property
    def wandb_entity(self) -> str | None:
        """W&B user or team; None for that of the environment, or the account's own."""

    @property
    def wandb_group(self) -> str | None:
        """Group of runs; None for that of the environment, or none."""

    @property
    def wandb_tags(self) -> list[str]:
        """Tags; with none, those of the environment."""


def open_tracker(
    settings: TrackingSettings, run_directory: RunDirectory, config: Mapping[str, Any]
) -> Tracker:
    """The local tracker and, unless it is disabled, W&B as its mirror.

    Parameters
    ----------
    config : Mapping
        The run's parameters, shown beside its metrics.

    Raises
    ------
    TrackingError
        When W&B cannot be used as asked.
    """
    trackers: list[Tracker] = [LocalTracker(run_directory)]
    if settings.wandb != "disabled":
        from nip_astra.tracking.wandb_tracker import WandbLabels, WandbTracker

        trackers.append(
            WandbTracker(
                run_directory,
                mode=settings.wandb,
                labels=WandbLabels(
                    settings.wandb_project,
                    settings.wandb_entity,
                    settings.wandb_group,
                    tuple(settings.wandb_tags),
                ),
                config=config,
            )
        )
    return CompositeTracker(trackers)
