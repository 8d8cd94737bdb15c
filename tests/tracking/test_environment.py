"""Tests of the description of a run's environment."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from nip_astra.plugins import load_plugin
from nip_astra.tracking import environment
from nip_astra.tracking.environment import changes_of_rounding, describe_environment
from tests.kit.messages import says


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_versions_and_no_secrets_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "harmless_plugin.py"
    file.write_text("x = 1\n")
    loaded = load_plugin(file)
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")
    monkeypatch.setattr(sys, "argv", ["run.py", "--token=very-secret"])
    described = describe_environment()
    assert described["python"] == platform.python_version()
    assert described["packages"]["torch"]
    assert described["processor"]
    assert described["num_threads"] == sys.modules["torch"].get_num_threads()
    plugin = {"spec": str(file), "module": loaded.module_name, "sha256": loaded.sha256}
    assert plugin in described["plugins"]
    assert "very-secret" not in json.dumps(described)
    monkeypatch.delitem(sys.modules, "torch")
    assert describe_environment()["num_threads"] is None
    assert "torch" not in sys.modules


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of the code; the working directory is in another repository."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    for name in ("code", "elsewhere"):
        (tmp_path / name).mkdir()
        git(tmp_path / name, "init", "-q")
        git(tmp_path / name, "commit", "-q", "--allow-empty", "-m", name)
    folder = tmp_path / "code" / "nip_astra"
    folder.mkdir()
    (folder / "environment.py").write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(environment, "_CODE_DIR", folder)
    return folder


def test_git_state_is_that_of_the_code_and_not_of_the_working_directory(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert describe_environment()["git"] is None, "git does not track the package there"
    git(code, "add", ".")
    git(code, "commit", "-q", "-m", "the code")
    commit = git(code, "rev-parse", "HEAD")
    assert describe_environment()["git"] == {"commit": commit, "is_dirty": False}
    (code / "new").write_text("")
    assert describe_environment()["git"] == {"commit": commit, "is_dirty": True}
    monkeypatch.setenv("PATH", "")
    assert describe_environment()["git"] is None, "there is no git"
    monkeypatch.undo()
    monkeypatch.setattr(environment, "_CODE_DIR", tmp_path)
    assert describe_environment()["git"] is None, "no repository"


def test_changes_that_affect_last_digits_are_reported_and_no_others() -> None:
    before = {"device": "cpu", "layers": "compiled: network.c 1", "python": "3.11.1"}
    before |= {"packages": {"torch": "2.5", "wandb": "1"}}
    assert changes_of_rounding(before, before | {"python": "3.12"}) == []
    assert changes_of_rounding({"device": "cpu"}, before) == [], "an older version wrote less"
    now = before | {"layers": "torch", "packages": {"torch": "2.6"}}
    layers, torch = changes_of_rounding(before, now)
    assert says(layers, "layers", "'compiled: network.c 1'", "'torch'")
    assert says(torch, "torch", "'2.5'", "'2.6'")
