"""What a tracker takes. The base does nothing, and serves where nothing is to be tracked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Tracker:
    """Takes metrics, tables and artifacts of a run; this one ignores them."""

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Record numbers at a step. Names that begin with `time/` or `memory/` differ between
        equal runs.
        """

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        """Record rows of a table at a step."""

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        """Record a folder of files."""

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Record the run's final numbers."""

    def log_report(self, path: Path) -> None:
        """Record the run's report, a web page."""

    def position(self) -> dict[str, Any]:
        """How far the records go, for a checkpoint."""
        return {}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Forget what was recorded after `position`; called when a run is resumed."""

    def finish(self, *, success: bool) -> None:
        """Close the records."""


class CompositeTracker(Tracker):
    """Hands everything to several trackers.

    The position is the first one's; the others are mirrors that cannot be rewound.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        for tracker in self.trackers:
            tracker.log_metrics(values, step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        for tracker in self.trackers:
            tracker.log_table(name, columns, rows, step=step)

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        for tracker in self.trackers:
            tracker.log_artifact(path, name=name, type=type, aliases=aliases)

    def log_summary(self, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log_summary(values)

    def log_report(self, path: Path) -> None:
        for tracker in self.trackers:
            tracker.log_report(path)

    def position(self) -> dict[str, Any]:
        return self.trackers[0].position()

    def rewind(self, position: Mapping[str, Any]) -> None:
        self.trackers[0].rewind(position)

    def finish(self, *, success: bool) -> None:
        for tracker in self.trackers:
            tracker.finish(success=success)
