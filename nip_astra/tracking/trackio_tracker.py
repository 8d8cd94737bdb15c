"""Mirrors the run directory to Trackio, Hugging Face's local tracker."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from nip_astra.errors import TrackingError
from nip_astra.lazy import import_extra
from nip_astra.safe_text import to_json
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker, grouped_figures, register_tracker
from nip_astra.trust import read_variable

DEFAULT_PROJECT = "nip_astra"


@register_tracker("trackio")
class TrackioTracker(Tracker):
    """Sends parameters, metrics and tables to Trackio.

    Without TRACKIO_DIR, its database is in `<runs_dir>/trackio`, which `TRACKIO_DIR=runs/trackio
    trackio show` displays. The project is the setting `wandb_project`, or nip_astra. A resumed run
    continues under its name.

    Raises
    ------
    MissingDependencyError
        If the package trackio is not installed.
    TrackingError
        If it cannot start.
    """

    def __init__(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(run_directory)
        self._step = 0
        self._project = settings["wandb_project"] or DEFAULT_PROJECT
        self._name = run_directory.run_id
        if not read_variable("TRACKIO_DIR"):
            # It is read when the package is imported.
            os.environ["TRACKIO_DIR"] = str(run_directory.path.resolve().parent / "trackio")
        trackio = self._trackio = import_extra("trackio", "the tracker", "trackio")
        try:
            with redirect_stdout(io.StringIO()):
                self._run: Any = trackio.init(
                    project=self._project,
                    name=run_directory.run_id,
                    group=settings["wandb_group"],
                    config=dict(config),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:
            raise TrackingError(f"Trackio cannot start: {error}. Check TRACKIO_DIR.") from error

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._step = step
        self._run.log(grouped_figures(values), step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        table = self._trackio.Table(
            columns=list(columns), data=[[_to_cell(value) for value in row] for row in rows]
        )
        self._run.log({f"rollouts/{name}": table}, step=step)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self.log_metrics(values, step=self._step)

    def stored_entries(self) -> set[tuple[int, str]]:
        logs = self._trackio.SQLiteStorage.get_logs(self._project, self._name)
        return {(int(log["step"]), name) for log in logs for name in log if "step" in log}

    def finish(self, *, success: bool) -> None:
        with redirect_stdout(io.StringIO()):
            # Not the run's own finish: the package finishes its current run again at exit.
            self._trackio.finish()


def _to_cell(value: Any) -> str | int | float | bool | None:
    """Return a value as a table of Trackio can hold it."""
    return value if isinstance(value, str | int | float | bool | None) else to_json(value)
