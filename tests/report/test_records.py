"""Tests of reading a run directory."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from nip_astra.errors import RunDirectoryError
from nip_astra.report import records
from nip_astra.report.records import node_of, number, read_run
from tests.report.runs import (
    THRESHOLD,
    chains,
    evaluation,
    failing,
    row,
    write_json,
    write_lines,
    write_run,
)


def test_everything_of_a_run_is_read_without_a_note(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "one", evaluations={"held_out": evaluation()}))
    assert run.notes == []
    assert (run.run_id, run.threshold) == ("one", THRESHOLD)
    assert len(run.tables["train"]) == 12
    assert run.tables["train"][0].reward_parts == {"novelty": 0.25}
    assert list(run.evaluations) == ["held_out"]
    assert [x for x, _ in run.metrics.points("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "name", ["hyper_parameters.yaml", "settings.yaml", "environment.json", "metrics.jsonl"]
)
def test_a_missing_file_becomes_a_note_that_names_it(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "one")
    (folder / name).unlink()
    run = read_run(folder)
    assert len(run.notes) == 1
    assert name in run.notes[0]


@pytest.mark.parametrize("content", ["{", "[1, 2]", "\x00\x01", "a: [", ""])
@pytest.mark.parametrize("name", ["results.json", "hyper_parameters.yaml"])
def test_a_broken_file_becomes_a_note_that_names_it(
    tmp_path: Path, name: str, content: str
) -> None:
    folder = write_run(tmp_path / "one")
    (folder / name).write_text(content)
    run = read_run(folder)
    if not (name.endswith(".yaml") and content == ""):
        assert any(name in note for note in run.notes), run.notes
    assert list(run.metrics)


def test_a_run_that_goes_on_has_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    (folder / "results.json").unlink()
    assert read_run(folder).notes == ["The run has not ended: there is no results.json yet."]


def test_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", tables={})
    whole = '{"step": 1, "probe": "hello"}\n'
    broken = 'no json\n[1]\n{"step": 2, "pro'
    (folder / "rollouts" / "train.jsonl").write_text(whole + broken)
    run = read_run(folder)
    assert [node.probe for node in run.tables["train"]] == ["hello"]
    assert run.notes == ["rollouts/train.jsonl has 3 broken lines; they are left out."]


def test_bytes_that_are_no_text_are_read_around(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", tables={})
    (folder / "rollouts" / "train.jsonl").write_bytes(b'{"step": 1, "probe": "a\xff"}\n')
    assert read_run(folder).tables["train"][0].probe == "a\N{REPLACEMENT CHARACTER}"


def test_a_file_of_too_many_lines_is_read_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_ROWS", 4)
    run = read_run(write_run(tmp_path / "one", tables={"evaluation": chains(2)}))
    assert len(run.tables["evaluation"]) == 4
    assert run.notes == ["Of rollouts/evaluation.jsonl the first 4 lines were read."]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"is not a run directory.*Give the path of a run"):
        read_run(tmp_path)
    with pytest.raises(RunDirectoryError, match="nowhere"):
        read_run(tmp_path / "nowhere")


def test_columns_that_older_rows_lack_are_none() -> None:
    node = node_of({"step": 1, "episode": 2, "depth": 1, "probe": "a", "response": "b"})
    assert (node.node, node.parent, node.response_score, node.reward) == (None, None, None, None)
    assert node.logprob is None
    assert node.reward_parts == {}


def test_columns_of_another_type_are_none_or_text() -> None:
    node = node_of(row(response_score="high", reward=True, probe=5, depth=None, is_error="yes"))
    assert (node.response_score, node.reward, node.probe, node.depth) == (None, None, "5", 0)
    assert node.is_error is False


def test_the_log_probability_of_a_probe_comes_from_the_reference_or_its_nll() -> None:
    assert node_of(row(reference_logprob=-3.5)).logprob == -3.5
    assert node_of(row(probe_nll=0.5, probe_num_tokens=4)).logprob == -2.0


def test_a_response_fails_by_the_threshold_of_its_own_evaluation(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "one",
        tables={"evaluation": [failing("a")]},
        evaluations={"strict": evaluation(failure_threshold=0.95)},
    )
    write_lines(folder / "evaluations" / "strict" / "rows.jsonl", [failing("a")])
    tables = read_run(folder).tables
    assert tables["evaluation"][0].is_failure
    assert not tables["evaluations/strict"][0].is_failure


def test_no_verdict_is_no_failure() -> None:
    assert node_of(row(response_score=THRESHOLD), THRESHOLD).is_failure
    assert not node_of(row(response_score=None), THRESHOLD).is_failure
    assert not node_of(row(response_score=0.9)).is_failure


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", None, [1.0], 10**400])
def test_what_is_no_finite_number_is_none(value: object) -> None:
    assert number(value) is None


def test_warnings_of_the_log_are_given_once_without_their_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one")
    line = "2026-01-01 10:00:0{},000 WARNING nip_astra.scorers: two texts have no score\n"
    (folder / "log.txt").write_text(line.format(1) + "x INFO y: fine\n" + line.format(2))
    assert read_run(folder).log_lines == ["nip_astra.scorers: two texts have no score"]


def test_rows_of_an_evaluation_are_a_table(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", tables={}, evaluations={"held_out": evaluation()})
    (folder / "evaluations" / "held_out" / "rows.jsonl").write_text('{"probe": "a"}\n')
    write_json(folder / "evaluations" / "transfer.json", {"cells": [{"attacker": "a"}]})
    run = read_run(folder)
    assert [node.probe for node in run.tables["evaluations/held_out"]] == ["a"]
    assert run.transfer == [{"attacker": "a"}]
    newer = folder / "evaluations" / "transfer-2.json"
    write_json(newer, {"cells": [{"attacker": "b"}]})
    os.utime(newer, (2e9, 2e9))
    assert read_run(folder).transfer == [{"attacker": "b"}]
