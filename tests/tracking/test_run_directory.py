"""The directory of a run and its files."""

from __future__ import annotations

import errno
import math
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from nip_astra.errors import RunDirectoryError
from nip_astra.tracking.run_directory import RunDirectory, new_run_id
from tests.kit.messages import says


def refusal(action: Any, *arguments: Any) -> str:
    with pytest.raises(RunDirectoryError) as caught:
        action(*arguments)
    return str(caught.value)


def test_a_new_run_has_folders_and_its_own_id(directory: RunDirectory, tmp_path: Path) -> None:
    assert (directory.path, directory.run_id) == (tmp_path / "runs" / "one", "one")
    assert directory.checkpoints_dir.is_dir()
    assert directory.rollouts_dir.is_dir()
    message = refusal(RunDirectory.create, tmp_path / "runs", "one")
    assert says(message, "'one'", f"resume {directory.path}`", "--run-id")


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "/a", ".hidden", "a b", "-x", "a\n"])
def test_a_run_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    assert repr(run_id) in refusal(RunDirectory.create, tmp_path, run_id)
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_runs_dir_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for runs_dir in (tmp_path / "file" / "runs", tmp_path / "file"):
        assert says(refusal(RunDirectory.create, runs_dir, "one"), "Not a directory", "--runs-dir")
    monkeypatch.setattr(os, "mkdir", Mock(side_effect=PermissionError(errno.EACCES, "not allowed")))
    assert "not allowed" in refusal(RunDirectory.create, tmp_path / "runs", "one")


def test_new_run_ids_are_folder_names_and_differ() -> None:
    ids = [new_run_id("ast_dpo", scenario) for scenario in ("pocket_chat", "../my own/chat!")]
    assert re.fullmatch(r"ast_dpo-pocket_chat-\d{8}-\d{6}-[0-9a-f]{4}", ids[0])
    assert re.fullmatch(r"ast_dpo-chat_-\d{8}-\d{6}-[0-9a-f]{4}", ids[1])
    assert len({new_run_id("a", "b")[-4:] for _ in range(20)}) > 1


def test_a_run_is_opened_by_its_name_or_path_and_another_folder_is_not(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.write_yaml("hyper_parameters.yaml", {"trainer": "ast_dpo"})
    runs = directory.path.parent
    # A folder of that name that is not a run does not take precedence.
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path)
    for run in ("one", directory.path, str(directory.path)):
        assert RunDirectory.find(run, runs).path == directory.path
    assert says(refusal(RunDirectory.find, "onee", runs), runs, "'onee'", "'one'?")
    for path in (tmp_path, tmp_path / "missing"):
        assert says(refusal(RunDirectory.open, path), path, "hyper_parameters.yaml")
    assert "hyper_parameters.yaml" in refusal(RunDirectory.find, "elsewhere/one", runs)
    monkeypatch.chdir(runs)
    assert RunDirectory.find("one", tmp_path / "none").path == Path("one")


VALUES = {
    "numbers": [1e-5, 1 / 3, 1e22, 3, None, True, math.inf, -math.inf],
    "list": [1, [2.5, "a"], {}],
    "texts": ["1e-5", ".5", "yes", "null", "0x1f", "1_000", "- a", "# b", "", " x ", "2020-01-01"],
    "formulae": ["${training.lr}", "\\${x}", r"a\\${x}", r"^my \w+ \?$", "snow ☃", "a: b", "~"],
    "long": "word " * 60,
    "lines": "one\n  two\n",
    "1e5": {"nested": "+1"},
}


def test_yaml_is_read_unchanged_by_both_loaders(directory: RunDirectory) -> None:
    directory.write_yaml("x.yaml", VALUES)
    assert directory.read_yaml("x.yaml") == VALUES
    loaded = OmegaConf.to_container(OmegaConf.load(directory.path / "x.yaml"), resolve=True)
    assert list(loaded.items()) == list(VALUES.items())


def test_json_is_read_unchanged_but_for_numbers_that_it_lacks(directory: RunDirectory) -> None:
    values = {"rate": 0.1, "text": "snow ☃", "none": None}
    infinite = {"a": [math.nan, (1.5, math.inf)], "b": {"c": -math.inf}}
    directory.write_json("x.json", values | infinite)
    assert directory.read_json("x.json") == values | {"a": [None, [1.5, None]], "b": {"c": None}}
    assert "☃" in (directory.path / "x.json").read_text(encoding="utf-8")


def test_a_full_disk_is_reported(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write_json("results.json", {"is": "old"})
    before = sorted(directory.path.iterdir())
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    message = refusal(directory.write_json, "results.json", {"is": "new"})
    assert says(message, "results.json", "No space left on device")
    assert directory.read_json("results.json") == {"is": "old"}
    assert sorted(directory.path.iterdir()) == before


@pytest.mark.parametrize("content", [None, "{", "\x00: [", "[]", "1", "[" * 10_000])
def test_a_missing_or_broken_file_is_named(directory: RunDirectory, content: str | None) -> None:
    for name, read in (("x.json", directory.read_json), ("x.yaml", directory.read_yaml)):
        if content is not None:
            (directory.path / name).write_text(content)
        message = refusal(read, name)
        assert name in message
        assert "\n" not in message
