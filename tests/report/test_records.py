"""Reading of a run directory for its report."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from nip_astra.errors import RunDirectoryError
from nip_astra.report import records
from nip_astra.report.page import render_report
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

LINE = "2026-01-01 10:00:0{},000 WARNING nip_astra.scorers: two texts have no score\n"


def test_everything_of_a_run_is_read_without_a_note(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunDirectoryError, match=path.name):
            read_run(path)
    folder = write_run(tmp_path / "one", evaluations={"strict": evaluation(failure_threshold=0.95)})
    write_lines(folder / "evaluations" / "strict" / "rows.jsonl", [failing("b")])
    (folder / "log.txt").write_text(LINE.format(1) + "x INFO y: fine\n" + LINE.format(2))
    run = read_run(folder)
    assert run.notes == []
    assert (run.run_id, run.threshold, len(run.tables["train"])) == ("one", THRESHOLD, 12)
    assert run.tables["train"][0].reward_parts == {"novelty": 0.25}
    assert run.metrics.points("loss") == [(step, 0.7 - step / 100) for step in range(1, 5)]
    assert run.log_lines == ["nip_astra.scorers: two texts have no score"]
    # A response fails from the threshold of its own evaluation.
    assert run.tables["evaluation"][-1].is_failure
    (node,) = run.tables["evaluations/strict"]
    assert (node.probe, node.is_failure) == ("b", False)
    # The newest transfer matrix is read.
    for place, name in enumerate(("transfer.json", "transfer-2.json")):
        path = folder / "evaluations" / name
        write_json(path, {"cells": [{"attacker": name}]})
        os.utime(path, (2e9 + place, 2e9 + place))
        assert read_run(folder).transfer == [{"attacker": name}]


@pytest.mark.parametrize("content", [None, "{", "[1, 2]", "\x00\x01", "a: ["])
@pytest.mark.parametrize(
    "name",
    ["results.json", "hyper_parameters.yaml", "settings.yaml", "environment.json", "metrics.jsonl"],
)
def test_a_missing_or_broken_file_becomes_a_note(
    tmp_path: Path, name: str, content: str | None
) -> None:
    folder = write_run(tmp_path / "one")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    run = read_run(folder)
    (note,) = run.notes
    assert name in note
    page = render_report([run])
    assert '<section id="summary">' in page
    assert "could not be drawn" not in page


def test_broken_lines_and_bytes_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "one", tables={"evaluation": chains(2)})
    whole = b'{"step": 1, "probe": "a\xff"}\n'
    (folder / "rollouts" / "train.jsonl").write_bytes(whole + b'no json\n[1]\n{"step": 2, "pro')
    run = read_run(folder)
    assert [node.probe for node in run.tables["train"]] == ["a\N{REPLACEMENT CHARACTER}"]
    assert run.notes == ["rollouts/train.jsonl has 3 broken lines; they are left out."]
    monkeypatch.setattr(records, "MAX_ROWS", 4)
    run = read_run(folder)
    assert len(run.tables["evaluation"]) == 4
    assert "Of rollouts/evaluation.jsonl the first 4 lines were read." in run.notes


def test_columns_that_are_missing_or_of_another_type_are_none_or_text() -> None:
    node = node_of({"step": 1, "episode": 2, "depth": 1, "probe": "a", "response": "b"})
    assert (node.node, node.parent, node.response_score, node.reward) == (None, None, None, None)
    assert (node.logprob, node.reward_parts) == (None, {})
    node = node_of(row(response_score="high", reward=True, probe=5, depth=None, is_error="yes"))
    assert (node.response_score, node.reward, node.probe, node.depth) == (None, None, "5", 0)
    assert node.is_error is False
    assert node_of(row(reference_logprob=-3.5)).logprob == -3.5
    assert node_of(row(probe_nll=0.5, probe_num_tokens=4)).logprob == -2.0
    for value in (math.nan, math.inf, True, "1", None, [1.0], 10**400):
        assert number(value) is None
    for score, threshold, is_failure in ((0.5, 0.5, True), (None, 0.5, False), (0.9, None, False)):
        assert node_of(row(response_score=score), threshold).is_failure is is_failure
