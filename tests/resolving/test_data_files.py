"""A run notices data that changed before it is resumed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import ChangedDataError, StopRequested
from nip_astra.resolving import data_files
from nip_astra.resolving.data_files import DATA_FILES, digest_data
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import resume_experiment, run_experiment
from nip_astra.tracking.run_directory import RESULTS
from tests.kit.command_line import CommandLine, refused
from tests.kit.resuming import short_experiment
from tests.kit.tiny import write_scenario

SETTINGS: dict[str, Any] = {
    "progress": False,
    "wandb": "disabled",
    "run_id": "one",
    "num_threads": 1,
    "checkpoint_period": 1,
}


def stop_after_an_iteration(folder: Path) -> tuple[Path, Path]:
    """Stop a run after its first checkpoint; return its directory and a file of its prompts."""
    resolved = short_experiment("ast_dpo", folder / "scenario", num_iterations=2)
    run = folder / "runs" / "one"

    def flag() -> str | None:
        return "test" if (run / "checkpoints" / "latest").exists() else None

    with pytest.raises(StopRequested):
        run_experiment(resolved, runs_dir=str(run.parent), stop_flag=flag, **SETTINGS)
    return run, folder / "scenario" / "train.txt"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return stop_after_an_iteration(tmp_path_factory.mktemp("stopped"))


def test_changed_data_is_refused_by_name_or_accepted(
    stopped: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, cli: CommandLine
) -> None:
    run, prompts = stopped
    before = prompts.read_text()
    prompts.write_text(before.replace(before[0], before[0].upper() + "x", 1))
    assert str(prompts) in refused(cli("resume", str(run)))
    with pytest.raises(ChangedDataError, match="train"):
        resume_experiment(run)
    assert not (run / RESULTS).exists()
    digest = json.loads((run / DATA_FILES).read_text())["sha256"][str(prompts)]
    with caplog.at_level(logging.WARNING, "nip_astra"):
        assert cli("resume", str(run), "--allow-changed-data").code == 0
    assert json.loads((run / DATA_FILES).read_text())["sha256"][str(prompts)] != digest
    assert (run / RESULTS).exists()


def test_a_run_without_digests_resumes_with_a_warning_and_then_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, prompts = stop_after_an_iteration(tmp_path)
    (run / DATA_FILES).unlink()
    with caplog.at_level(logging.WARNING, "nip_astra"):
        resume_experiment(run)
    assert any("no digests" in record.getMessage() for record in caplog.records)
    assert str(prompts) in json.loads((run / DATA_FILES).read_text())["sha256"]


def digests_of(folder: Path, **changes: object) -> dict[str, str]:
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(folder))
    assert isinstance(resolved, ResolvedExperiment)
    return digest_data(resolved)


def test_files_and_folders_of_the_parameters_have_digests_and_others_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_scenario(tmp_path / "scenario")
    before = digests_of(folder)
    names = {Path(name).name for name in before}
    assert {"train.txt", "test.txt"} <= names
    models = [name for name in before if Path(name).is_dir()]
    assert models
    # A folder may share its name with a word among the parameters.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ast_dpo").mkdir()
    (tmp_path / "ast_dpo" / "notes.txt").write_text("notes")
    assert digests_of(folder) == before
    (weights,) = list(Path(models[0]).glob("*.safetensors"))[:1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    changed = digests_of(folder)
    assert {name for name in before if changed[name] != before[name]} == {models[0]}
    # Only parts of a large file are read, among them its first and last bytes.
    monkeypatch.setattr(data_files, "MAX_WHOLE_BYTES", 1000)
    monkeypatch.setattr(data_files, "_PART_BYTES", 10)
    sampled = digests_of(folder)[models[0]]
    content[-1] ^= 1
    weights.write_bytes(bytes(content))
    assert digests_of(folder)[models[0]] != sampled
