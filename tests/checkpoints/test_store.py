"""Tests of the checkpoint folder: complete or absent, and checked before use."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import SafetensorError

from nip_astra.checkpoints.store import CheckpointStore
from nip_astra.errors import CheckpointError, ServiceUnreachableError
from nip_astra.resume_check import in_a_fork, killed_at
from tests.kit.messages import says


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights.bin").write_text(text)
        (folder / "state.json").write_text(json.dumps(text))

    return write


def save(store: CheckpointStore, step: int, *, is_best: bool = False) -> Path:
    return store.save(step, writer(f"at {step}"), metadata={"iteration": step}, is_best=is_best)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir() if path.is_dir())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", num_kept=2)


def test_a_saved_checkpoint_is_the_latest_and_verifies(store: CheckpointStore) -> None:
    assert store.latest() is store.best() is None
    with pytest.raises(CheckpointError, match=str(store.directory)):
        store.open_latest()
    path = save(store, 12)
    assert path == store.latest() == store.directory / "step_00000012"
    assert (path / "model" / "weights.bin").read_text() == "at 12"
    opened, manifest = store.open_latest()
    assert opened == path
    assert (manifest["format"], manifest["step"]) == ("nip_astra.checkpoint", 12)
    assert manifest["metadata"] == {"iteration": 12}
    assert sorted(manifest["files"]) == ["model/weights.bin", "state.json"]
    # Without a pointer the newest checkpoint is the latest.
    later = save(store, 13)
    (store.directory / "latest").unlink()
    assert store.open_latest()[0] == later


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2, is_best=True)
    for step in (3, 4, 5):
        save(store, step)
    assert names(store) == ["step_00000002", "step_00000004", "step_00000005"]
    assert store.best() == store.directory / "step_00000002"
    save(store, 6, is_best=True)
    assert names(store) == ["step_00000005", "step_00000006"]


def test_a_best_checkpoint_is_opened_only_whole(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match="best"):
        store.open_best()
    path = save(store, 1, is_best=True)
    save(store, 2)
    assert store.open_best() == path
    # A process killed in a first save that was the best leaves no pointer.
    (store.directory / "best").unlink()
    assert store.open_best() == path
    weights = path / "model" / "weights.bin"
    weights.write_text(weights.read_text().swapcase())
    with pytest.raises(CheckpointError, match=r"step_00000001.*weights\.bin"):
        store.open_best()


def test_every_checkpoint_holds_the_additions_of_the_store(tmp_path: Path) -> None:
    store = CheckpointStore(
        tmp_path / "checkpoints",
        about={"trainer": "mine"},
        also_write=lambda folder: (folder / "more").write_text("more"),
        marker=tmp_path / "marker",
    )
    assert not (tmp_path / "marker").exists()
    path = save(store, 1)
    assert store.verify(path)["metadata"] == {"iteration": 1, "trainer": "mine"}
    assert "more" in store.verify(path)["files"]
    assert (tmp_path / "marker").is_file()


def test_a_step_saved_again_gets_its_own_folder_and_is_the_latest(store: CheckpointStore) -> None:
    first = save(store, 3)
    second = store.save(3, writer("again"), metadata={})
    assert (first.name, second.name) == ("step_00000003", "step_00000003_r2")
    assert store.latest() == second
    assert (first / "state.json").read_text() == '"at 3"'
    save(store, 4)
    assert names(store) == ["step_00000003_r2", "step_00000004"]


def test_a_save_killed_at_any_moment_leaves_the_older_checkpoints_good(tmp_path: Path) -> None:
    made = CheckpointStore(tmp_path / "made", num_kept=2)
    save(made, 1, is_best=True)
    save(made, 2)
    num_killed, status, is_moved = 0, -signal.SIGKILL, False
    while status != 0:
        copy = tmp_path / f"copy_{num_killed}"
        shutil.copytree(made.directory, copy)
        store = CheckpointStore(copy, num_kept=2)

        def save_killed(store: CheckpointStore = store, number: int = num_killed + 1) -> None:
            with killed_at(number):
                save(store, 3)

        status = in_a_fork(save_killed)
        assert status in (0, -signal.SIGKILL)
        _, manifest = store.open_latest()
        assert manifest["step"] in (2, 3)
        # Once `latest` has moved, it stays moved.
        assert manifest["step"] == 3 or not is_moved
        is_moved = manifest["step"] == 3
        best = store.best()
        assert best is not None
        store.verify(best)
        assert store.verify(copy / "step_00000002")["step"] == 2
        # The next save works after any interruption, and removes its remains.
        save(store, 4)
        assert store.open_latest()[1]["step"] == 4
        assert not list(copy.glob(".tmp-*"))
        num_killed += status != 0
    assert num_killed >= 10
    assert is_moved


def corrupt(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_corrupt_latest_is_refused_and_the_newest_intact_checkpoint_named(
    store: CheckpointStore,
) -> None:
    save(store, 1)
    save(store, 2)
    corrupt(store.directory / "step_00000002" / "model" / "weights.bin")
    with pytest.raises(CheckpointError) as caught:
        store.open_latest()
    facts = ("step_00000002", "model/weights.bin", "step_00000001", store.directory / "latest")
    assert says(caught.value, *facts)
    (store.directory / "latest").write_text("step_00000001")
    assert store.open_latest()[1]["step"] == 1
    corrupt(store.directory / "step_00000001" / "state.json")
    with pytest.raises(CheckpointError, match=str(store.directory)):
        store.open_latest()


def change_manifest(path: Path, **changes: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: (path / "state.json").write_text(""), "state.json is corrupt"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json"),
        (lambda path: (path / "manifest.json").write_text("[1]"), "manifest.json"),
        (lambda path: change_manifest(path, format="other"), "not written by nip_astra"),
        (lambda path: change_manifest(path, version=2), "version 2"),
        (lambda path: change_manifest(path, version="x"), "version x"),
        (lambda path: change_manifest(path, metadata={"iteration": 9}), "manifest.json is corrupt"),
        (shutil.rmtree, "folder"),
    ],
)
def test_a_damaged_foreign_or_newer_checkpoint_is_refused_with_the_reason(
    store: CheckpointStore, damage: Callable[[Path], None], reason: str
) -> None:
    path = save(store, 1)
    damage(path)
    with pytest.raises(CheckpointError) as caught:
        store.verify(path)
    assert says(caught.value, path, reason)


@pytest.mark.parametrize(
    ("raised", "expected", "fact"),
    [
        # Not a disk error.
        (ServiceUnreachableError("it does not answer"), ServiceUnreachableError, "answer$"),
        (SafetensorError("while serializing: No space left"), CheckpointError, "No space left"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_save_that_fails_leaves_no_trace_and_the_older_checkpoint(
    store: CheckpointStore,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    expected: type[BaseException],
    fact: str | None,
) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise raised

    save(store, 1)
    with pytest.raises(expected, match=fact):
        store.save(2, write, metadata={})
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setattr(os, "fsync", Mock(side_effect=full))
        with pytest.raises(CheckpointError, match=r"step 2.*No space left on device"):
            save(store, 2)
    assert names(store) == ["step_00000001"]
    assert store.open_latest()[1]["step"] == 1
