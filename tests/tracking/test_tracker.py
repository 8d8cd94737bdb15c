"""Tests of the registry of trackers, and of the names and numbers of metrics."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import nip_astra as na
from nip_astra.errors import MissingDependencyError, TrackingError, UnknownNameError
from nip_astra.experiment_settings import ExperimentSettings
from nip_astra.plugins import load_plugin
from nip_astra.tracking import mlflow_tracker
from nip_astra.tracking import tracker as tracker_module
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import (
    TRACKERS,
    CompositeTracker,
    MirrorTracker,
    flat_figures,
    grouped,
    open_tracker,
    plain_numbers,
)

CSV_TRACKER = """
import nip_astra as na

@na.register_tracker("csv")
class CsvTracker(na.Tracker):
    \"\"\"Writes a line for each metric.\"\"\"

    def __init__(self, run_directory, settings, config):
        self.file = (run_directory.path / "metrics.csv").open("a")

    def log_metrics(self, values, *, step):
        self.file.writelines(f"{step},{name},{value}\\n" for name, value in values.items())

    def finish(self, *, success):
        self.file.close()
"""


def opened(directory: RunDirectory, *names: str, **options: bool) -> na.Tracker:
    settings = ExperimentSettings(trackers=list(names)).to_dict()
    return open_tracker(settings, directory, {"seed": 7}, **options)


def test_a_tracker_of_a_plugin_mirrors_a_run(tmp_path: Path, directory: RunDirectory) -> None:
    plugin = tmp_path / "csv_tracker.py"
    plugin.write_text(CSV_TRACKER)
    load_plugin(str(plugin))
    try:
        tracker = opened(directory, "csv", "file", "csv")
        position = tracker.position()
        tracker.log_metrics({"loss": 0.25}, step=2)
        tracker.rewind(position)
        tracker.log_metrics({"loss": 0.5}, step=3)
        tracker.log_table("train", ["probe"], [["hi"]], step=3)
        tracker.log_artifact(tmp_path, name="a", type="model")
        tracker.log_summary({"a": 1})
        tracker.finish(success=True)
    finally:
        TRACKERS.forget("csv")
    base = na.Tracker()
    base.log_metrics({"loss": 0.5}, step=1)
    base.rewind(base.position())
    base.finish(success=False)
    assert (base.position(), vars(base)) == ({}, {"run_directory": None})
    assert (directory.path / "metrics.csv").read_text() == "2,loss,0.25\n3,loss,0.5\n"
    assert (directory.path / "metrics.jsonl").read_text() == '{"step": 3, "loss": 0.5}\n'


def test_a_failing_tracker_ends_the_run_with_a_typed_error_and_is_closed_like_the_others() -> None:
    finished: list[str] = []

    class Broken(na.Tracker):
        def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
            raise ConnectionError("server is gone")

        def finish(self, *, success: bool) -> None:
            finished.append("broken")
            raise ConnectionError("server is gone")

    class Sound(na.Tracker):
        def finish(self, *, success: bool) -> None:
            finished.append("sound")

    both = CompositeTracker([Broken(), Sound()])
    with pytest.raises(TrackingError, match="server is gone"):
        both.log_metrics({"loss": 1.0}, step=1)
    both.finish(success=False)
    assert finished == ["broken", "sound"]


class KeepingTracker(na.Tracker):
    """Keeps metrics and tables where a killed process left some."""

    def __init__(self, stored: set[tuple[int, str]] | None) -> None:
        super().__init__()
        self.stored = stored
        self.entries: list[tuple[int, str]] = []

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.entries += [(step, grouped(name)) for name in values]

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        self.entries.append((step, f"rollouts/{name}"))
        assert (columns, rows) == (["probe"], [["hi"]])

    def stored_entries(self) -> set[tuple[int, str]] | None:
        return self.stored


def mirrored(directory: RunDirectory, tracker: na.Tracker, seconds: float = 30.0) -> MirrorTracker:
    return MirrorTracker(tracker, directory, name="kept", seconds_to_finish=seconds)


def test_a_resumed_run_sends_what_its_tracker_lacks_and_nothing_twice(
    directory: RunDirectory,
) -> None:
    files = opened(directory)
    files.log_metrics({"loss": 1.0, "time/seconds": 2.0}, step=1)
    files.log_table("train", ["probe"], [["hi"]], step=1)
    files.log_metrics({"loss": float("nan"), "lr": 0.1}, step=2)
    files.finish(success=True)
    # The killed process sent a part of step 1, and step 3, which the run repeats.
    stored = {(1, "train/loss"), (3, "train/loss")}
    kept = KeepingTracker(stored)
    tracker = mirrored(directory, kept)
    tracker.rewind({"step": 2})
    tracker.log_metrics({"loss": 0.5, "lr": 0.1}, step=3)
    tracker.log_metrics({"loss": 0.25}, step=4)
    tracker.finish(success=True)
    expected = [(1, "time/seconds"), (2, "train/lr"), (1, "rollouts/train")]
    assert kept.entries == [*expected, (3, "train/lr"), (4, "train/loss")]
    # One that cannot tell is sent nothing again.
    unknown = KeepingTracker(None)
    tracker = mirrored(directory, unknown)
    tracker.rewind({"step": 2})
    tracker.log_metrics({"loss": 0.5}, step=3)
    tracker.finish(success=True)
    assert unknown.entries == [(3, "train/loss")]


def test_a_tracker_that_hangs_holds_neither_the_loop_nor_the_end(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "MAX_WAITING", 3)
    release = threading.Event()

    class Hanging(na.Tracker):
        def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
            release.wait()

    tracker = mirrored(directory, Hanging(), seconds=0.05)
    for step in range(10):
        tracker.log_metrics({"loss": 1.0}, step=step)
    tracker.finish(success=True)
    release.set()
    assert any("the tracker kept lacks at least 10 records" in text for text in caplog.messages)


def test_an_error_of_a_tracker_is_raised_by_the_next_call(directory: RunDirectory) -> None:
    class Broken(na.Tracker):
        def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
            raise ConnectionError("server is gone")

    mirror = mirrored(directory, Broken())
    both = CompositeTracker([opened(directory), mirror])
    both.log_metrics({"loss": 1.0}, step=1)
    with pytest.raises(ConnectionError):
        mirror.finish(success=True)
    with pytest.raises(TrackingError, match=r"Broken.*server is gone"):
        both.log_metrics({"loss": 1.0}, step=2)
    assert (directory.path / "metrics.jsonl").read_text().count("loss") == 2


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_does_not_answer_is_named_before_mlflow_tries_for_minutes(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_tracker, "SECONDS_TO_ANSWER", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if not answers:
            server.close()
        # One that accepts connections and is silent, and one that is not there.
        with pytest.raises(TrackingError, match=address):
            mlflow_tracker.check_server(address)
    mlflow_tracker.check_server(None)
    mlflow_tracker.check_server("sqlite:///runs/mlflow.db")


def test_unknown_trackers_are_refused(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnknownNameError, match="'wandb'"):
        opened(directory, "wand")
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[tensorboard\]"):
        opened(directory, "tensorboard")
    assert not (directory.path / "metrics.jsonl").exists()


def test_tensorboard_gets_finite_numbers_by_group(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, **options: int) -> None:
            calls.append(("open", folder, options))

        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append((name, *given))

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    tracker = opened(directory, "tensorboard")
    tracker.log_metrics({"loss": 0.25}, step=1)
    position = tracker.position()
    tracker.rewind(position)
    tracker.log_metrics({"loss": 0.5, "mean_reward": float("nan")}, step=2)
    tracker.log_table("train", ["probe"], [["hi"]], step=2)
    tracker.log_summary({"after/failure_rate": 0.25})
    tracker.finish(success=True)
    folder, parameters = (
        str(directory.path / "tensorboard"),
        ("add_text", "hyper_parameters", "    seed: 7"),
    )
    assert calls == [
        ("open", folder, {}),
        parameters,
        ("add_scalar", "train/loss", 0.25, 1),
        ("close",),
        ("open", folder, {}),
        parameters,
        # Sent again: a killed process may not have written it.
        ("add_scalar", "train/loss", 0.25, 1),
        ("add_scalar", "train/loss", 0.5, 2),
        ("add_text", "rollouts/train", '    {"probe": "hi"}', 2),
        ("add_scalar", "eval/after/failure_rate", 0.25, 2),
        ("close",),
    ]


GROUPS = {
    "train": ("loss", "lr", "pairs/kept", "prover/loss_value", "of_a_plugin", "time"),
    "rollout": ("failure_rate", "reward/entropy_bonus", "verifier/mean_step_reward"),
    "eval": ("dev/failure_rate", "after/failure_rate", "verifier/test_mean_value", "test_mean_x"),
}


def test_a_metric_is_shown_in_its_group_and_names_stay_apart() -> None:
    for group, names in GROUPS.items():
        assert [grouped(name) for name in names] == [f"{group}/{name}" for name in names]
    for name in ("time/collect_seconds", "tokens/generated"):
        assert grouped(name) == name
    names = ["loss", "train/loss", "mean_reward", "rollout/mean_reward", "after/x", "x", "test_x"]
    assert len({grouped(name) for name in names}) == len(names)


def test_a_summary_holds_numbers_and_both_ends_of_intervals() -> None:
    report = {"rate": 0.2, "rate_interval": [0.05, 0.4], "num_episodes": 20, "is_there": True}
    report |= {"unknown_interval": [None, None], "most_common_probe": "hello ?"}
    figures = {"rate": 0.2, "rate_low": 0.05, "rate_high": 0.4, "num_episodes": 20}
    assert flat_figures(report, "after/") == {f"after/{name}": n for name, n in figures.items()}


def test_scalars_of_numpy_and_torch_can_be_written() -> None:
    loss = torch.tensor(1.5, requires_grad=True)
    values = [np.float32(0.5), np.float64(0.25), np.int64(3), np.bool_(True), loss]
    given = dict(enumerate([*values, np.array([7]), None, 2]))
    written = json.loads(json.dumps(plain_numbers({str(key): one for key, one in given.items()})))
    assert list(written.values()) == [0.5, 0.25, 3, True, 1.5, 7, None, 2]


def test_values_that_are_no_numbers_or_have_no_names_are_refused() -> None:
    for value in (np.zeros(2), torch.zeros(0), [1.0], {"a": 1}, object(), "good"):
        with pytest.raises(TrackingError, match="'mine/share'"):
            plain_numbers({"mine/share": value})
    for figures in (None, [1.0], {1: 1.0}):
        with pytest.raises(TrackingError):
            plain_numbers(figures)  # type: ignore[arg-type]
