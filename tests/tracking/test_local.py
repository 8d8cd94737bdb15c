"""Tests of the tracker that writes into the run directory."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import TrackingError
from nip_astra.tracking.local import LocalTracker
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.tracking.tracker import Tracker


def lines(directory: RunDirectory, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory.path / name).read_text().splitlines()]


def contents(directory: RunDirectory) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory.path)): path.read_bytes()
        for path in directory.path.rglob("*.jsonl")
    }


def test_metrics_and_timings_go_to_files_of_their_own(directory: RunDirectory) -> None:
    tracker = LocalTracker(directory)
    tracker.log_metrics({"b": 1, "a/x": 0.1, "time/update": 2.5, "memory/peak": 1}, step=1)
    tracker.log_metrics({"b": math.nan, "c": math.inf, "d": -0.0}, step=2)
    # Each line is on disk before the tracker is closed.
    assert (directory.path / "metrics.jsonl").read_text() == (
        '{"step": 1, "a/x": 0.1, "b": 1}\n{"step": 2, "b": null, "c": null, "d": -0.0}\n'
    )
    assert lines(directory, "timings.jsonl") == [{"step": 1, "time/update": 2.5, "memory/peak": 1}]


def test_a_table_is_a_file_with_an_object_a_row(directory: RunDirectory) -> None:
    tracker = LocalTracker(directory)
    tracker.log_table("train", ["probe", "score"], [["hé\n", math.nan], ["b", 0.5]], step=3)
    tracker.log_table("train", ["probe", "score"], [["c", 1.0]], step=4)
    tracker.log_table("empty", ["probe"], [], step=4)
    assert lines(directory, "rollouts/train.jsonl") == [
        {"step": 3, "probe": "hé\n", "score": None},
        {"step": 3, "probe": "b", "score": 0.5},
        {"step": 4, "probe": "c", "score": 1.0},
    ]


def test_names_of_no_file_or_metric_are_refused(directory: RunDirectory) -> None:
    with pytest.raises(TrackingError, match="'step'"):
        LocalTracker(directory).log_metrics({"step": 1}, step=1)
    with pytest.raises(TrackingError, match=r"'\.\./x'"):
        LocalTracker(directory).log_table("../x", ["a"], [], step=1)


def log_part(tracker: Tracker, start: int, stop: int) -> None:
    for step in range(start, stop):
        tracker.log_metrics({"loss": 1 / (step + 1), "time/x": float(step)}, step=step)
        tracker.log_table("train", ["text"], [[f"at {step}"]], step=step)
        if step > 4:
            tracker.log_table("late", ["text"], [["new"]], step=step)


def test_a_rewound_run_ends_with_the_same_bytes_as_an_uninterrupted_run(tmp_path: Path) -> None:
    whole, cut = (RunDirectory.create(tmp_path, name) for name in ("whole", "cut"))
    log_part(LocalTracker(whole), 0, 8)

    stopped = LocalTracker(cut)
    log_part(stopped, 0, 3)
    position = json.loads(json.dumps(stopped.position()))
    log_part(stopped, 3, 7)
    # A kill in the middle of a line.
    with (cut.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')

    resumed = LocalTracker(RunDirectory(cut.path))
    resumed.rewind(position)
    assert not (cut.rollouts_dir / "late.jsonl").exists()
    log_part(resumed, 3, 8)
    resumed.finish(success=True)
    assert contents(cut) == contents(whole)
    resumed.rewind({})
    assert contents(cut) == {}
    resumed.log_metrics({"a": 1}, step=1)
    assert lines(cut, "metrics.jsonl") == [{"step": 1, "a": 1}]


def test_metrics_that_changed_since_the_checkpoint_are_refused(directory: RunDirectory) -> None:
    tracker = LocalTracker(directory)
    log_part(tracker, 0, 3)
    position = tracker.position()
    path = directory.path / "metrics.jsonl"
    content = bytearray(path.read_bytes())
    content[content.index(b"0.5")] ^= 1
    path.write_bytes(content)
    with pytest.raises(TrackingError, match=r"metrics\.jsonl"):
        LocalTracker(directory).rewind(position)
    del position["metrics_sha256"]  # as in checkpoints of older versions
    LocalTracker(directory).rewind(position)


def test_records_shorter_than_their_checkpoint_are_refused(directory: RunDirectory) -> None:
    tracker = LocalTracker(directory)
    log_part(tracker, 0, 3)
    position = tracker.position()
    (directory.path / "metrics.jsonl").write_text("")
    size = str(position["files"]["metrics.jsonl"])
    with pytest.raises(TrackingError, match=rf"{size} of .*metrics\.jsonl.* 0 bytes"):
        LocalTracker(directory).rewind(position)


def test_a_full_disk_is_reported(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", lambda self, mode: Full())
    with pytest.raises(TrackingError, match=r"metrics.jsonl .*: No space left on device"):
        LocalTracker(directory).log_metrics({"a": 1}, step=1)
