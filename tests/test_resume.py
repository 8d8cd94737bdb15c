"""Tests of the checks before a run resumes, and of runs killed at critical moments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from nip_astra.checkpoints.store import write_manifest
from nip_astra.checkpoints.tensors import save_state
from nip_astra.errors import CheckpointError, RunDirectoryError, StopRequested, UnexpectedExitError
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import resume_experiment
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.trainers.registry import TRAINERS
from tests.kit.experiments import run_in
from tests.kit.messages import says


@pytest.fixture
def start(toy: Path, tmp_path: Path) -> Callable[..., Path]:
    def start_toy(run_id: str = "one") -> Path:
        resolved = resolve_experiment(trainer="toy_trainer", scenario=str(toy))
        return run_in(tmp_path, resolved, run_id)

    return start_toy


@pytest.fixture
def stopped(start: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run stopped after two of its four iterations."""
    monkeypatch.setenv("TOY_SIGNAL", "1:SIGTERM")
    with pytest.raises(StopRequested):
        start("one")
    monkeypatch.delenv("TOY_SIGNAL")
    return tmp_path / "one"


def everything_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("log.txt", ".lock")
    }


def refusal_of(
    path: Path, error: type[Exception] = CheckpointError, *, is_trusted: bool = False
) -> str:
    """Messages of resuming; it may change no record of the run."""
    before = everything_in(path)
    with pytest.raises(error) as caught:
        resume_experiment(path, progress=False, is_trusted=is_trusted)
    assert everything_in(path) == before
    return str(caught.value)


def sign(checkpoint: Path, *without: str, **metadata: Any) -> None:
    """Make the manifest agree with the files, and change other fields of the run."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").unlink()
    fields = {name: x for name, x in manifest["metadata"].items() if name not in without}
    write_manifest(checkpoint, manifest["step"], fields | metadata, is_best=False)


def test_a_run_with_edited_parameters_is_not_resumed(stopped: Path) -> None:
    file = stopped / "hyper_parameters.yaml"
    whole = file.read_text()
    values = yaml.safe_load(whole)
    values["toy_trainer"]["offset"] = 7.0
    values["training"]["lr"] = 0.25
    file.write_text(yaml.safe_dump(values))
    message = refusal_of(stopped, is_trusted=True)
    assert says(message, "toy_trainer.offset was 0.5 and is 7.0", "training.lr", "Restore")
    file.write_text(whole)
    assert resume_experiment(stopped, progress=False).results == {"last": 4.5}


def test_a_checkpoint_of_another_trainer_or_without_its_parameters_is_refused(
    stopped: Path,
) -> None:
    checkpoint = stopped / "checkpoints" / "step_00000002"
    sign(checkpoint, trainer="ast_dpo")
    assert says(refusal_of(stopped), "'ast_dpo'", "'toy_trainer'")
    # As in versions that stored only torch's generator.
    sign(checkpoint, "parameters", trainer="toy_trainer")
    assert "environment.json" in refusal_of(stopped)


def test_a_checkpoint_that_the_trainer_cannot_read_is_reported(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_nothing(self: Any, done: int) -> None:
        def write(folder: Path) -> None:
            save_state(folder / "state", {"nothing": 1})

        self._checkpoint_store().save(done + 10, write, metadata={})

    monkeypatch.setattr(TRAINERS.get("toy_trainer"), "_save", save_nothing)
    resume_experiment(stopped, progress=False)
    (stopped / "results.json").unlink()
    assert says(refusal_of(stopped), "'toy_trainer'", "KeyError: 'done'")


@pytest.mark.parametrize("lost", ["*/", "*", ""], ids=["folders", "everything", "the folder"])
def test_a_run_that_lost_its_checkpoints_neither_starts_over_nor_forgets(
    stopped: Path, lost: str
) -> None:
    folder = stopped / "checkpoints"
    for path in folder.glob(lost) if lost else [folder]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert says(refusal_of(stopped), folder, "start a new run")


def test_lost_timings_and_environment_and_remains_of_a_killed_process_do_not_stop_a_resumption(
    stopped: Path, start: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    whole = start("whole")
    # The toy records neither; its checkpoint claims that it did.
    (stopped / "environment.json").unlink()
    state = stopped / "checkpoints" / "step_00000002" / "state.json"
    plain = json.loads(state.read_text())
    plain["tracker"]["files"] |= {"timings.jsonl": 100, "rollouts/train.jsonl": 70}
    state.write_text(json.dumps(plain))
    sign(state.parent)
    (stopped / "timings.jsonl").write_text('{"step": 1}\n{"st')
    (stopped / "checkpoints" / ".tmp-step_00000009" / "model").mkdir(parents=True)
    (stopped / ".settings.yaml.tmp").write_text("half")
    # Without environment.json nothing shows that the run is the user's own.
    resume_experiment(stopped, progress=False, is_trusted=True)
    assert (stopped / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (stopped / "timings.jsonl").read_text() == '{"step": 1}\n'
    assert not [p for p in stopped.rglob(".*") if p.name not in (".lock", ".has_checkpoints")]
    assert says(caplog.text, "timings.jsonl had 100", "train.jsonl had 70", "environment.json")


def test_lost_metrics_and_a_garbled_pointer_to_the_latest_checkpoint_stop_a_resumption(
    stopped: Path,
) -> None:
    latest = stopped / "checkpoints" / "latest"
    right = latest.read_bytes()
    for text in (b"../../elsewhere\n", b"\xff\xfe\x00", b""):
        latest.write_bytes(text)
        assert "step_00000002" in refusal_of(stopped)
    latest.write_bytes(right)
    (stopped / "metrics.jsonl").write_text("")
    assert says(refusal_of(stopped, RuntimeError), "metrics.jsonl", "0 bytes")


def test_a_run_killed_before_its_report_is_finished(start: Callable[..., Path]) -> None:
    path = start("one")
    (path / "report.html").unlink()
    (path / ".report.html.tmp").write_text("<html")
    (path / "checkpoints" / ".tmp-step_00000004").mkdir()
    before = everything_in(path)
    assert resume_experiment(path, progress=False).results == {"last": 4.5}
    after = everything_in(path)
    assert set(after) - set(before) == {"report.html"}
    assert set(before) - set(after) == {".report.html.tmp"}
    assert not list(path.rglob(".tmp-*"))
    assert "has ended" in refusal_of(path, RunDirectoryError)


def test_code_that_exits_does_not_end_an_unfinished_run_in_silence(
    start: Callable[..., Path], tmp_path: Path
) -> None:
    start("first")
    leaves = mock.patch.object(TRAINERS.get("toy_trainer"), "_save", side_effect=SystemExit(0))
    with leaves, pytest.raises(UnexpectedExitError, match=r"sys\.exit\(0\)"):
        start("one")
    assert "sys.exit(0)" in (tmp_path / "one" / "log.txt").read_text()
    assert not (tmp_path / "one" / "results.json").exists()
    assert resume_experiment(tmp_path / "one", progress=False).results == {"last": 4.5}


def test_a_run_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail(new: RunDirectory) -> None:
        new.write_json("half.json", {})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RunDirectory.create(tmp_path, "one", fail)
    assert list(tmp_path.iterdir()) == []
    # Files left by a killed process.
    (tmp_path / ".new-one" / "rollouts").mkdir(parents=True)

    def write(new: RunDirectory) -> None:
        new.write_json("a.json", {})
        # Another process leaves the unfinished directory to this.
        with pytest.raises(RunDirectoryError, match="in use by"):
            RunDirectory.create(tmp_path, "one")

    made = RunDirectory.create(tmp_path, "one", write)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert (made.path / "a.json").is_file()
    assert (made.path / "checkpoints").is_dir()
