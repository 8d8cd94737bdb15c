"""Rows on disk, and the folder of an evaluation that is continued or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nip_astra.errors import ConfigurationError, DataError
from nip_astra.evaluation.families.base import Evaluation, newest_evaluation
from nip_astra.evaluation.families.conversations import Conversations
from nip_astra.evaluation.storage import (
    EvaluationFolder,
    RowFile,
    configuration_hash,
    differences,
    encode_rows,
    episodes_of,
    number,
    read_rows,
    text_hash,
    weights_hash,
)
from tests.evaluation.rows_by_hand import episode
from tests.kit.messages import says

CONFIGURATION = {"options": {"seed": 0, "num_episodes": 10}, "scorers": {"own": {"label": "rude"}}}


@pytest.fixture
def file(tmp_path: Path) -> RowFile:
    return RowFile(tmp_path / "rows.jsonl", episode_length=2)


def test_rows_are_read_as_written_with_null_for_no_number(file: RowFile) -> None:
    rows = episode(0, [0.5, float("nan")], response="line\nbreak \u2028 \u00e9")
    assert file.recover() == 0
    file.append(rows)
    assert file.read() == [rows[0], rows[1] | {"response_score": None}]
    before = file.path.read_bytes()
    assert before.count(b"\n") == 2
    assert file.recover() == 1
    assert file.path.read_bytes() == before
    odd = {"a": float("inf"), "b": [1.0, float("nan")]}
    assert json.loads(encode_rows([odd])) == {"a": None, "b": [1.0, None]}
    assert number({"a": 2}, "a") == 2.0
    assert all(math.isnan(number(row, "a")) for row in ({"a": None}, {}))


@pytest.mark.parametrize("num_bytes_lost", [1, 5, 40, 300, 700])
def test_an_episode_that_a_kill_cut_off_is_removed(file: RowFile, num_bytes_lost: int) -> None:
    for index in range(3):
        file.append(episode(index, [0.1, 0.2]))
    whole = file.path.read_bytes()
    file.path.write_bytes(whole[:-num_bytes_lost])
    done = file.recover()
    assert 0 < done < 3
    assert [row["episode"] for row in file.read()] == [i for i in range(done) for _ in "ab"]
    for index in range(done, 3):
        file.append(episode(index, [0.1, 0.2]))
    assert file.path.read_bytes() == whole


def test_a_broken_line_and_a_name_that_is_no_folder_are_refused(file: RowFile) -> None:
    for content, line in (('{"a": 1}\n{"a": \n{"a": 3}\n', 2), ("3\n", 1)):
        file.path.write_text(content)
        with pytest.raises(DataError, match=f"line {line} of "):
            read_rows(file.path)
    for name in ("", "../x", "a/b", ".hidden", "a b"):
        with pytest.raises(ConfigurationError, match=repr(name)):
            EvaluationFolder.of_run(file.path.parent, name)


def test_chains_are_separated_by_step_and_episode_and_by_the_leaves_of_a_tree() -> None:
    later = [row | {"step": 5} for row in episode(0, [0.3, 0.4])]
    result = episodes_of([*episode(0, [0.1, 0.2]), *later, *episode(1, [0.5, 0.6])])
    scores = [[row["response_score"] for row in chain] for chain in result]
    assert scores == [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]
    nodes = [(0, -1, 0), (1, -1, 0), (2, 0, 1), (3, 0, 1), (4, 1, 1)]
    names = ("node", "parent", "depth")
    tree = [{"step": 0, "episode": 0, **dict(zip(names, node, strict=True))} for node in nodes]
    assert [[row["node"] for row in item] for item in episodes_of(tree)] == [[0, 2], [0, 3], [1, 4]]


def test_a_folder_is_continued_with_the_same_configuration_alone(tmp_path: Path) -> None:
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.open(CONFIGURATION)
    folder.rows(1).append([{"a": 1}])
    folder.note_part({"seconds": 1})
    # A full disk cut it off.
    with (folder.path / "parts.jsonl").open("a") as parts:
        parts.write('{"seco')
    folder.open(CONFIGURATION)
    folder.note_part({"seconds": 2})
    assert folder.rows(1).read() == [{"a": 1}]
    assert folder.parts() == [{"seconds": 1}, {"seconds": 2}]
    assert folder.configuration()["options"] == CONFIGURATION["options"]

    def changed(**options: object) -> dict[str, object]:
        return CONFIGURATION | {"options": CONFIGURATION["options"] | options}

    with pytest.raises(ConfigurationError) as caught:
        folder.open(changed(seed=3, level=0.9))
    assert says(caught.value, "options.level", "0.9", "options.seed", "0 there, 3", "--name")
    assert "num_episodes" not in str(caught.value)
    folder.open(changed(seed=3), is_overwritten=True)
    assert folder.rows(1).read() == []
    assert folder.configuration()["options"]["seed"] == 3
    # Rows without a configuration are not continued.
    folder.rows(1).append([{"a": 1}])
    (folder.path / "configuration.json").unlink()
    folder.open(CONFIGURATION)
    assert folder.rows(1).read() == []


def test_the_newest_evaluation_of_a_run_is_read_with_its_own_threshold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nip-astra evaluate"):
        newest_evaluation(tmp_path)
    for name in ("one", "two"):
        folder = EvaluationFolder.of_run(tmp_path, name)
        folder.open(CONFIGURATION)
        folder.write({"name": name}, "table\n")
    assert newest_evaluation(tmp_path).path.name == "two"
    assert Evaluation.read(tmp_path / "evaluations" / "one").figures == {"name": "one"}
    assert (tmp_path / "evaluations" / "one" / "table.txt").read_text() == "table\n"
    (tmp_path / "rows.jsonl").write_bytes(encode_rows([*episode(0, [0.6]), *episode(1, [0.4])]))
    for threshold, expected in ((0.5, ["failure", "none"]), (0.7, ["none", "none"])):
        stored = Evaluation(tmp_path, Conversations(), {"failure_threshold": threshold})
        assert [row["outcome"] for row in stored.rows] == expected
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=str(tmp_path)):
        list(Evaluation(tmp_path, Conversations(), {}).rows)


def test_weights_prompts_and_configurations_have_a_digest_of_their_content(tmp_path: Path) -> None:
    digests = [weights_hash(tmp_path)]
    (tmp_path / "shards").mkdir()
    for name, content in (("model", b"one"), ("model", b"two"), ("shards/part_0", b"three")):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        digests.append(weights_hash(tmp_path))
    assert digests[0] is None
    assert len(set(digests)) == 4
    assert text_hash(["a", "b"]) != text_hash(["a b"])
    # The order of keys does not count.
    other = configuration_hash({"b": 2, "a": 1, "sha256": "x"})
    assert configuration_hash({"a": 1, "b": 2}) == other != configuration_hash({"a": 1})
    assert differences({"a": {"b": 1}}, {"a": {"b": 1}}) == []


def test_an_evaluation_of_an_earlier_version_continues_with_current_names(tmp_path: Path) -> None:
    before = {"policy": {"train_service": {"kind": "http", "patience_seconds": 60.0}}}
    now = {"policy": {"train_service": {"kind": "http", "retry_timeout_seconds": 60.0}}}
    folder = EvaluationFolder.of_run(tmp_path, "test")
    folder.open(before)
    (folder.path / "problems.jsonl").write_text('{"problem": 0, "is_right": true}\n')
    assert not folder.open(now)
    assert read_rows(folder.path / "problems.jsonl") == [{"problem": 0, "is_correct": True}]
    now["policy"]["train_service"]["retry_timeout_seconds"] = 30.0
    with pytest.raises(ConfigurationError) as caught:
        folder.open(now)
    assert says(caught.value, "policy.train_service.retry_timeout_seconds", "60.0 there, 30.0 now")
