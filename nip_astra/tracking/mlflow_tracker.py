"""Mirrors the run directory to MLflow."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from nip_astra.errors import TrackingError, reason_of
from nip_astra.lazy import import_extra
from nip_astra.tracking.run_directory import RunDirectory, to_yaml
from nip_astra.tracking.tracker import Tracker, grouped_figures, register_tracker
from nip_astra.trust import read_variable

RUN_FILE = "mlflow.json"
"""File in the run directory with the MLflow run id, for resumed runs."""
DEFAULT_EXPERIMENT = "nip_astra"
SECONDS_TO_ANSWER = 5.0
"""Seconds in which a server must answer at the start."""
_BATCH = 100
"""Parameters or metrics per request: MLflow's limit for parameters."""
_LONGEST = 500
"""Maximum characters of a parameter value in every store; the YAML file has all of it."""


@register_tracker("mlflow")
class MlflowTracker(Tracker):
    """Sends parameters, metrics, tables, artifacts and the report to MLflow.

    Without MLFLOW_TRACKING_URI, the store is `<runs_dir>/mlflow.db`, which `mlflow ui
    --backend-store-uri sqlite:///runs/mlflow.db` shows. The experiment is the setting
    `wandb_project`, MLFLOW_EXPERIMENT_NAME, or nip_astra.

    Raises
    ------
    MissingDependencyError
        If the package mlflow is not installed.
    TrackingError
        If the store cannot be reached.
    """

    def __init__(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(run_directory)
        entities, tracking, pandas = (
            import_extra(name, "the tracker 'mlflow'", "mlflow")
            for name in ("mlflow.entities", "mlflow.tracking", "pandas")
        )
        for noisy in ("mlflow", "alembic"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        self._entities, self._json_normalize, self._step = entities, pandas.json_normalize, 0
        folder = run_directory.path.resolve().parent
        uri = read_variable("MLFLOW_TRACKING_URI")
        self._is_resumed = (run_directory.path / RUN_FILE).is_file()
        check_server(uri)
        try:
            self._client: Any = tracking.MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
            self._run_id = self._begin(run_directory, settings, None if uri else folder)
            self._log_parameters(config)
        except Exception as error:
            raise TrackingError(
                f"MLflow cannot start: {error}. Check MLFLOW_TRACKING_URI and the server."
            ) from error

    def _begin(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], folder: Path | None
    ) -> str:
        """Return the MLflow run id: that in the run directory, or a new one."""
        if (run_directory.path / RUN_FILE).is_file():
            run_id = str(run_directory.read_json(RUN_FILE)["run_id"])
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        name = settings["wandb_project"] or read_variable("MLFLOW_EXPERIMENT_NAME")
        name = name or DEFAULT_EXPERIMENT
        experiment = self._client.get_experiment_by_name(name)
        location = None if folder is None else (folder / "mlflow" / name).as_uri()
        number = (
            self._client.create_experiment(name, artifact_location=location)
            if experiment is None
            else experiment.experiment_id
        )
        tags = dict.fromkeys(settings["wandb_tags"], "")
        if settings["wandb_group"]:
            tags["group"] = settings["wandb_group"]
        run = self._client.create_run(number, run_name=run_directory.run_id, tags=tags)
        run_directory.write_json(RUN_FILE, {"run_id": run.info.run_id})
        return str(run.info.run_id)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        # MLflow refuses to log a parameter of a resumed run again.
        logged = self._client.get_run(self._run_id).data.params
        parameters = [
            self._entities.Param(str(path), str(value)[:_LONGEST])
            for path, value in self._json_normalize(dict(config)).iloc[0].items()
            if str(path) not in logged
        ]
        for start in range(0, len(parameters), _BATCH):
            self._client.log_batch(self._run_id, params=parameters[start : start + _BATCH])
        self._client.log_text(self._run_id, to_yaml(config), "hyper_parameters.yaml")

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._step = step
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, float(value), now, step)
            for name, value in grouped_figures(values).items()
        ]
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _BATCH])

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        data = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        data["step"] = [step] * len(rows)
        self._client.log_table(self._run_id, data, f"rollouts/{name}.json")

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        self._client.log_artifacts(self._run_id, str(path), f"{type}/{name}")

    def log_summary(self, values: Mapping[str, float]) -> None:
        self.log_metrics(values, step=self._step)

    def log_report(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def stored_entries(self) -> set[tuple[int, str]]:
        if not self._is_resumed:
            return set()
        entries = {
            (metric.step, name)
            for name in self._client.get_run(self._run_id).data.metrics
            for metric in self._client.get_metric_history(self._run_id, name)
        }
        for artifact in self._client.list_artifacts(self._run_id, "rollouts"):
            path = Path(self._client.download_artifacts(self._run_id, artifact.path))
            table = json.loads(path.read_text(encoding="utf-8"))
            step_column = table["columns"].index("step")
            name = artifact.path.removesuffix(".json")
            entries |= {(int(row[step_column]), name) for row in table["data"]}
        return entries

    def finish(self, *, success: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if success else "FAILED")


def check_server(uri: str | None) -> None:
    """Raise if a server does not answer soon; MLflow itself tries for minutes."""
    if uri is None or urlsplit(uri).scheme not in ("http", "https"):
        return
    try:
        with urlopen(f"{uri.rstrip('/')}/health", timeout=SECONDS_TO_ANSWER):
            return
    except HTTPError:
        # It answers, perhaps only to those who have a key.
        return
    except (OSError, ValueError, HTTPException) as error:
        raise TrackingError(
            f"the MLflow server {uri} does not answer: {reason_of(error)}. Start it, correct "
            "MLFLOW_TRACKING_URI, or use --track file."
        ) from error
