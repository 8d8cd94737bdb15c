"""Rows on disk: whole episodes, whatever a kill left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nip_astra.errors import DataError
from nip_astra.evaluation.storage import RowFile, encode_rows, episodes_of, number, read_rows
from tests.evaluation.rows_by_hand import episode


@pytest.fixture
def file(tmp_path: Path) -> RowFile:
    return RowFile(tmp_path / "rows.jsonl", episode_length=2)


def test_rows_come_back_as_they_were_and_what_is_no_number_is_null(file: RowFile) -> None:
    rows = episode(0, [0.5, float("nan")], response="line\nbreak \u2028 \u00e9")
    file.append(rows)
    assert file.read() == [rows[0], rows[1] | {"response_score": None}]
    assert file.path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("num_bytes_lost", [1, 5, 40, 300, 700])
def test_what_a_kill_left_of_an_episode_is_cut_off(file: RowFile, num_bytes_lost: int) -> None:
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


def test_a_file_that_is_whole_is_left_alone(file: RowFile) -> None:
    assert file.recover() == 0
    file.append(episode(0, [0.1, 0.2]))
    before = file.path.read_bytes()
    assert file.recover() == 1
    assert file.path.read_bytes() == before


def test_a_broken_line_in_the_middle_is_told(file: RowFile) -> None:
    file.path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(DataError, match=r"line 2 of .* is not JSON"):
        read_rows(file.path)
    file.path.write_text("3\n")
    with pytest.raises(DataError, match=r"line 1 of .* is not a JSON object"):
        read_rows(file.path)


def test_chains_are_told_apart_by_step_and_episode() -> None:
    later = [row | {"step": 5} for row in episode(0, [0.3, 0.4])]
    found = episodes_of([*episode(0, [0.1, 0.2]), *later, *episode(1, [0.5, 0.6])])
    assert [[row["response_score"] for row in chain] for chain in found] == [
        [0.1, 0.2], [0.3, 0.4], [0.5, 0.6],
    ]  # fmt: skip


def test_a_tree_gives_a_chain_for_each_leaf() -> None:
    def node(name: int, parent: int, depth: int) -> dict[str, object]:
        return {"step": 0, "episode": 0, "node": name, "parent": parent, "depth": depth}

    tree = [node(0, -1, 0), node(1, -1, 0), node(2, 0, 1), node(3, 0, 1), node(4, 1, 1)]
    assert [[row["node"] for row in chain] for chain in episodes_of(tree)] == [
        [0, 2], [0, 3], [1, 4],
    ]  # fmt: skip


def test_a_column_that_is_null_or_absent_is_no_number() -> None:
    assert number({"a": 2}, "a") == 2.0
    assert number({"a": None}, "a") != number({"a": None}, "a")
    assert number({}, "a") != number({}, "a")
    assert json.loads(encode_rows([{"a": float("inf"), "b": [1.0, float("nan")]}])) == {
        "a": None, "b": [1.0, None],
    }  # fmt: skip
