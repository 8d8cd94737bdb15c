"""The folder of an evaluation, and when it may be gone on with."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.families.base import Evaluation, newest_evaluation
from nip_astra.evaluation.storage import (
    EvaluationFolder,
    configuration_hash,
    differences,
    text_hash,
    weights_hash,
)

CONFIGURATION = {"options": {"seed": 0, "num_episodes": 10}, "scorers": {"own": {"label": "rude"}}}


def changed(**options: object) -> dict[str, object]:
    return CONFIGURATION | {"options": CONFIGURATION["options"] | options}


def test_the_same_configuration_goes_on(tmp_path: Path) -> None:
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.open(CONFIGURATION)
    folder.rows(1).append([{"a": 1}])
    folder.open(CONFIGURATION)
    assert folder.rows(1).read() == [{"a": 1}]
    assert folder.configuration()["options"] == {"seed": 0, "num_episodes": 10}


def test_another_configuration_is_refused_with_what_differs(tmp_path: Path) -> None:
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.open(CONFIGURATION)
    with pytest.raises(ConfigurationError) as caught:
        folder.open(changed(seed=3, level=0.9))
    message = str(caught.value)
    assert "  options.level: nothing there, 0.9 now\n  options.seed: 0 there, 3 now\n" in message
    assert "num_episodes" not in message
    assert "another --name" in message


def test_overwrite_starts_over(tmp_path: Path) -> None:
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.open(CONFIGURATION)
    folder.rows(1).append([{"a": 1}])
    folder.open(changed(seed=3), is_overwritten=True)
    assert folder.rows(1).read() == []
    assert folder.configuration()["options"]["seed"] == 3


def test_rows_of_nobody_knows_what_are_not_gone_on_with(tmp_path: Path) -> None:
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.path.mkdir(parents=True)
    folder.rows(1).append([{"a": 1}])
    folder.open(CONFIGURATION)
    assert folder.rows(1).read() == []


def test_the_order_of_keys_changes_no_hash() -> None:
    assert configuration_hash({"a": 1, "b": 2}) == configuration_hash(
        {"b": 2, "a": 1, "sha256": "x"}
    )
    assert configuration_hash({"a": 1}) != configuration_hash({"a": 2})
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a folder name"):
        EvaluationFolder.of_run(tmp_path, name)


def test_the_newest_evaluation_of_a_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nip-astra evaluate"):
        newest_evaluation(tmp_path)
    for name in ("one", "two"):
        folder = EvaluationFolder.of_run(tmp_path, name)
        folder.open(CONFIGURATION)
        folder.write({"name": name}, "table\n")
    assert newest_evaluation(tmp_path).path.name == "two"
    assert Evaluation.read(tmp_path / "evaluations" / "one").figures == {"name": "one"}
    assert (tmp_path / "evaluations" / "one" / "table.txt").read_text() == "table\n"


def test_weights_and_prompts_have_a_digest_of_their_content(tmp_path: Path) -> None:
    assert weights_hash(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(b"one")
    first = weights_hash(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert first is not None
    assert (second := weights_hash(tmp_path)) != first
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "part_0.safetensors").write_bytes(b"three")
    assert weights_hash(tmp_path) != second
    assert text_hash(["a", "b"]) != text_hash(["a b"])
