"""Tests of the directory of a run."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from nip_astra.errors import RunDirectoryError
from nip_astra.tracking.run_directory import RunDirectory, new_run_id
from tests.kit.messages import says


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "one")


def test_a_new_run_has_its_folders(directory: RunDirectory, tmp_path: Path) -> None:
    assert directory.path == tmp_path / "runs" / "one"
    assert directory.run_id == "one"
    assert directory.checkpoints_dir.is_dir()
    assert directory.rollouts_dir.is_dir()


def test_an_existing_run_id_is_refused_with_both_ways_on(
    directory: RunDirectory, tmp_path: Path
) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.create(tmp_path / "runs", "one")
    assert "the run 'one' exists already" in str(caught.value)
    assert f"resume {directory.path}`, or choose another --run-id." in str(caught.value)


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "/a", ".hidden", "a b", "-x", "a\n"])
def test_a_run_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"cannot name a folder"):
        RunDirectory.create(tmp_path, run_id)
    assert list(tmp_path.iterdir()) == []


def test_a_runs_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"cannot be made: Not a directory"):
        RunDirectory.create(tmp_path / "file" / "runs", "one")
    with pytest.raises(RunDirectoryError, match=r"cannot be made: Not a directory"):
        RunDirectory.create(tmp_path / "file", "one")


def test_an_unwritable_runs_dir_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RunDirectoryError, match=r"Permission denied"):
        RunDirectory.create(tmp_path / "runs", "one")


def test_new_run_ids_are_folder_names_and_differ() -> None:
    ids = [new_run_id("ast_dpo", scenario) for scenario in ("pocket_chat", "../my own/chat!")]
    assert re.fullmatch(r"ast_dpo-pocket_chat-\d{8}-\d{6}-[0-9a-f]{4}", ids[0])
    assert re.fullmatch(r"ast_dpo-chat_-\d{8}-\d{6}-[0-9a-f]{4}", ids[1])
    assert len({new_run_id("a", "b")[-4:] for _ in range(20)}) > 1


def test_a_run_is_opened_again(directory: RunDirectory) -> None:
    directory.write_yaml("hyper_parameters.yaml", {"trainer": "ast_dpo"})
    assert RunDirectory.open(directory.path).run_id == "one"


def test_a_run_is_found_by_its_name_and_by_its_path(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_yaml("hyper_parameters.yaml", {"trainer": "ast_dpo"})
    runs = directory.path.parent
    # A folder of that name that is no run does not stand before it.
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    for run in ("one", directory.path, str(directory.path)):
        assert RunDirectory.find(run, runs).path == directory.path
    monkeypatch.chdir(runs)
    assert RunDirectory.find("one", tmp_path / "none").path == Path("one")


def test_a_name_that_no_run_has_is_told_with_the_nearest(directory: RunDirectory) -> None:
    directory.write_yaml("hyper_parameters.yaml", {"trainer": "ast_dpo"})
    runs = directory.path.parent
    with pytest.raises(RunDirectoryError) as caught:
        RunDirectory.find("onee", runs)
    assert says(caught.value, runs, "'onee'", "'one'?")
    with pytest.raises(RunDirectoryError, match=r"holds no hyper_parameters.yaml"):
        RunDirectory.find("elsewhere/one", runs)


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError) as caught:
            RunDirectory.open(path)
        assert "holds no hyper_parameters.yaml" in str(caught.value)


VALUES = {
    "number": 1e-5,
    "third": 1 / 3,
    "big": 1e22,
    "whole": 3,
    "none": None,
    "yes": True,
    "list": [1, [2.5, "a"], {}],
    "texts": ["1e-5", ".5", "yes", "null", "0x1f", "1_000", "- a", "# b", "", " x ", "2020-01-01"],
    "formulae": ["${training.lr}", "\\${x}", r"a\\${x}", r"^my \w+ \?$", "snow ☃", "a: b", "~"],
    "long": "word " * 60,
    "lines": "one\n  two\n",
    "1e5": {"nested": "+1"},
}


def test_yaml_is_read_back_unchanged_also_by_the_loader_of_parameter_files(
    directory: RunDirectory,
) -> None:
    directory.write_yaml("x.yaml", VALUES)
    assert directory.read_yaml("x.yaml") == VALUES
    loaded = OmegaConf.to_container(OmegaConf.load(directory.path / "x.yaml"), resolve=True)
    assert loaded == VALUES
    assert list(loaded) == list(VALUES)


def test_yaml_keeps_what_is_infinite(directory: RunDirectory) -> None:
    directory.write_yaml("x.yaml", {"up": math.inf, "down": -math.inf})
    assert directory.read_yaml("x.yaml") == {"up": math.inf, "down": -math.inf}


def test_json_holds_null_for_what_is_not_finite(directory: RunDirectory) -> None:
    directory.write_json("x.json", {"a": [math.nan, (1.5, math.inf)], "b": {"c": -math.inf}})
    assert directory.read_json("x.json") == {"a": [None, [1.5, None]], "b": {"c": None}}


def test_json_is_read_back_unchanged(directory: RunDirectory) -> None:
    values = {"before": {"failure_rate": 0.1}, "text": "snow ☃", "none": None}
    directory.write_json("results.json", values)
    assert directory.read_json("results.json") == values
    assert "☃" in (directory.path / "results.json").read_text(encoding="utf-8")


def test_a_full_disk_is_told_and_leaves_the_old_file_and_no_other(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_json("results.json", {"is": "old"})
    before = sorted(directory.path.iterdir())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunDirectoryError) as caught:
        directory.write_json("results.json", {"is": "new"})
    assert "results.json cannot be written: No space left on device" in str(caught.value)
    assert directory.read_json("results.json") == {"is": "old"}
    assert sorted(directory.path.iterdir()) == before


@pytest.mark.parametrize("content", [None, "{", "\x00: ["])
def test_a_missing_or_broken_file_is_named(directory: RunDirectory, content: str | None) -> None:
    for name, read in (("x.json", directory.read_json), ("x.yaml", directory.read_yaml)):
        if content is not None:
            (directory.path / name).write_text(content)
        with pytest.raises(RunDirectoryError, match=f"{name} is missing or"):
            read(name)
