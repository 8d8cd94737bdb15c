"""Trackers with their real packages, offline; see tests/kit/third_party.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import CompositeTracker, open_tracker

pytestmark = pytest.mark.slow
CONFIG = {"training": {"lr": 1e-4, "num_iterations": 3}, "trainer": "mine"}
COLUMNS, ROWS = ["problem", "messages"], [[1, [["user", "1+1="]]], [2, None]]


def opened(directory: RunDirectory, name: str) -> CompositeTracker:
    settings = ExperimentSettings(trackers=[name], wandb_project="mirrors", wandb_group="g")
    return open_tracker(settings.to_dict(), directory, CONFIG, writes_files=False)


def write(tracker: CompositeTracker, step: int, folder: Path) -> None:
    tracker.log_metrics({"loss": 1.0 / step, "rewards/right/mean": float("nan")}, step=step)
    tracker.log_table("train", COLUMNS, ROWS, step=step)
    tracker.log_summary({"after/accuracy": 0.5})
    page = folder / "report.html"
    page.write_text("<p>report</p>")
    tracker.log_report(page)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "weights").write_text("w")
    tracker.log_artifact(model, name="run-model", type="model")
    tracker.finish(success=True)


def test_mlflow_gets_everything_and_a_resumed_run_continues(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for step in (1, 2):
        write(opened(directory, "mlflow"), step, tmp_path)
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mirrors")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("one", "FINISHED")
    given = {"training.lr": "0.0001", "training.num_iterations": "3", "trainer": "mine"}
    assert run.data.params == given
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.0), (2, 0.5)]
    assert run.data.metrics["eval/after/accuracy"] == 0.5
    paths = {one.path for one in client.list_artifacts(run.info.run_id)}
    assert paths == {"hyper_parameters.yaml", "model", "report.html", "rollouts"}
    table = Path(client.download_artifacts(run.info.run_id, "rollouts/train.json"))
    stored: dict[str, Any] = json.loads(table.read_text())
    assert stored["columns"] == [*COLUMNS, "step"]
    assert [row[-1] for row in stored["data"]] == [1, 1, 2, 2]


def test_trackio_gets_metrics_and_a_resumed_run_continues(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    for step in (1, 2):
        write(opened(directory, "trackio"), step, tmp_path)
    (run,) = trackio.Api().runs("mirrors")
    assert run.name == "one"
    logs = trackio.SQLiteStorage.get_logs("mirrors", "one")
    losses = [(one["step"], one["train/loss"]) for one in logs if "train/loss" in one]
    assert losses == [(1, 1.0), (2, 0.5)]
    assert any("rollouts/train" in one for one in logs)


def test_tensorboard_gets_metrics(directory: RunDirectory, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(opened(directory, "tensorboard"), 1, tmp_path)
    events = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [(1, 1.0)]
