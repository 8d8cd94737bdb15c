"""Tests of W&B as a mirror: an offline run is written and read back, without network or account."""

from __future__ import annotations

import importlib
import json
import os
import socket
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from nip_astra.errors import TrackingError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.report.terminal import print_results
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker, open_tracker
from nip_astra.tracking.wandb_runs import offline_runs
from tests.kit.messages import says
from tests.tracking.wandb_log import WandbLog

pytest.importorskip("wandb")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any W&B account."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("NETRC", raising=False)
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home


def log_a_run(tracker: Tracker, folder: Path) -> None:
    tracker.log_metrics({"loss": 1.5, "distinct_share": float("nan")}, step=1)
    tracker.log_table("train", ["probe", "score"], [["hello ?", 0.25]], step=1)
    # W&B's tables require equal types in a column.
    nested = [[{"prover": 1.0}, [{"decision": None}]], [{}, [{"decision": 1}, {"said": [3]}]]]
    tracker.log_table("nested", ["rewards", "rounds"], nested, step=1)
    tracker.log_metrics({"loss": 0.5, "time/seconds": 2.0}, step=2)
    tracker.log_table("train", ["probe", "score"], [["so ?", 0.75], ["well", 0.5]], step=2)
    (folder / "model").mkdir()
    (folder / "model" / "weights.txt").write_text("one two three")
    tracker.log_artifact(folder / "model", name="attacker-one", type="model", aliases=["best"])
    tracker.log_summary({"after/failure_rate": 0.625})
    (folder / "report.html").write_text("<p>what was found</p>")
    tracker.log_report(folder / "report.html")
    tracker.finish(success=True)


def test_an_offline_run_is_read_back_with_config_metrics_tables_and_artifact(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(address: Any, *args: Any, **kwargs: Any) -> None:
        # W&B connects to its own process on this machine.
        assert address[0] in ("127.0.0.1", "localhost"), f"connection to {address}"
        return connect(address, *args, **kwargs)

    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", refuse)
    directory = RunDirectory.create(tmp_path / "runs", "one")
    environment = {"git": {"commit": "abc", "is_dirty": False}}
    directory.write_json("environment.json", environment)
    settings = ExperimentSettings(
        wandb="offline", wandb_project="rude", wandb_group="all", wandb_tags=["a", "b"]
    )
    config = {"trainer": "ast_dpo", "training": {"lr": 1e-3, "optimizer": "adamw"}}
    log_a_run(open_tracker(settings.to_dict(), directory, config), tmp_path)
    # W&B's own process writes the last records after the run has finished, and then ends.
    importlib.import_module("wandb").teardown()

    (file,) = directory.path.glob("wandb/offline-run-*/*.wandb")
    log = WandbLog(file)
    assert (log.run_id, log.project, log.exit_code) == ("one", "rude", 0)
    assert (log.group, log.tags) == ("all", ["a", "b"])
    assert {name: log.config[name] for name in config} == config
    assert log.config["environment"] == environment

    by_step: dict[int, dict[str, Any]] = {1: {}, 2: {}}
    *rows, last = log.history
    assert (file.parent / "files" / last["report"]["path"]).read_text() == "<p>what was found</p>"
    for row in rows:
        by_step[row["iteration"]].update(row)
    assert (by_step[1]["train/loss"], by_step[2]["train/loss"]) == (1.5, 0.5)
    assert "rollout/distinct_share" not in by_step[1]
    assert by_step[2]["time/seconds"] == 2.0

    tables = {}
    for name, step, num_rows in (("train", 1, 1), ("train", 2, 2), ("nested", 1, 2)):
        entry = by_step[step][f"rollouts/{name}"]
        assert (entry["_type"], entry["nrows"]) == ("table-file", num_rows)
        tables[name] = json.loads((file.parent / "files" / entry["path"]).read_text())
    assert tables["train"]["columns"] == ["probe", "score"]
    assert tables["train"]["data"] == [["so ?", 0.75], ["well", 0.5]]
    assert tables["nested"]["data"][1] == ["{}", '[{"decision": 1}, {"said": [3]}]']

    (model,) = [artifact for artifact in log.artifacts if artifact.type == "model"]
    assert (model.name, sorted(model.aliases)) == ("attacker-one", ["best", "latest"])
    (entry,) = model.manifest.contents
    assert (entry.path, entry.size) == ("weights.txt", 13)
    assert Path(entry.local_path).read_text() == "one two three"
    assert directory.path.resolve() in Path(entry.local_path).parents
    assert log.summary["eval/after/failure_rate"] == 0.625

    # Nothing is left outside the run directory, printed to the terminal, or changed.
    assert list(home.iterdir()) == []
    assert not [name for name in os.environ if name.startswith("WANDB_")]
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
    assert str(tmp_path).encode() not in log.text.replace(str(directory.path).encode(), b"")
    # The run directory is still complete.
    assert len((directory.path / "metrics.jsonl").read_text().splitlines()) == 2
    assert (directory.path / "rollouts" / "train.jsonl").is_file()


def test_a_resumed_offline_run_has_one_folder_with_each_step_once(
    home: Path, tmp_path: Path
) -> None:
    directory = RunDirectory.create(tmp_path / "runs", "one")
    settings = ExperimentSettings(wandb="offline").to_dict()
    tracker = open_tracker(settings, directory, {})
    tracker.rewind({})
    tracker.log_metrics({"loss": 3.0}, step=1)
    tracker.log_table("train", ["probe"], [["hi"]], step=1)
    position = tracker.position()
    tracker.log_metrics({"loss": 2.0}, step=2)
    tracker.finish(success=False)
    # W&B names the folder by the second.
    (folder,) = offline_runs(directory.path)
    folder.rename(folder.with_name("offline-run-20200101_000000-one"))
    tracker = open_tracker(settings, directory, {})
    tracker.rewind(position)
    tracker.log_metrics({"loss": 2.0}, step=2)
    tracker.finish(success=True)
    importlib.import_module("wandb").teardown()
    (file,) = directory.path.glob("wandb/offline-run-*/*.wandb")
    rows = WandbLog(file).history
    losses = [(row["iteration"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 3.0), (2, 2.0)]
    assert sum("rollouts/train" in row for row in rows) == 1


def test_a_failed_start_is_reported_and_leaves_the_environment_unchanged(
    home: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    failure = wandb.errors.CommError("the server refused")
    monkeypatch.setattr(wandb, "init", Mock(side_effect=failure))
    before = dict(os.environ)
    with pytest.raises(TrackingError, match="the server refused"):
        open_tracker(ExperimentSettings(wandb="offline").to_dict(), directory, {})
    assert dict(os.environ) == before
    with pytest.raises(TrackingError) as caught:
        open_tracker(ExperimentSettings(wandb="online").to_dict(), directory, {})
    assert says(caught.value, "no W&B key", "wandb login", "WANDB_API_KEY", "--wandb offline")


@pytest.mark.parametrize(
    ("options", "project"), [({}, "of_the_environment"), ({"wandb_project": "x"}, "x")]
)
def test_unset_options_are_taken_from_the_variables_of_wandb(
    home: Path, directory: RunDirectory, monkeypatch: Any, options: dict[str, str], project: str
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "of_the_environment")
    monkeypatch.setenv("WANDB_RUN_GROUP", "group_of_the_environment")
    settings = ExperimentSettings(wandb="offline", **options)
    open_tracker(settings.to_dict(), directory, {}).finish(success=True)
    importlib.import_module("wandb").teardown()
    (folder,) = offline_runs(directory.path)
    log = WandbLog(next(folder.glob("*.wandb")))
    assert (log.project, log.group) == (project, "group_of_the_environment")
    stream = StringIO()
    print_results({}, directory.path, Console(file=stream))
    assert f"wandb sync {folder}" in stream.getvalue()
