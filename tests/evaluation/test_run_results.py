"""What a run found, as objects and frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nip_astra import read_results
from nip_astra.errors import MissingDependencyError, RunDirectoryError, UnknownNameError

RESULTS = {
    "before": {"failure_rate": 0.1, "failure_rate_interval": [0.0, 0.3], "first_query": {"a": 1}},
    "after": {"failure_rate": 0.4, "verifier/mean_value": -1.5},
    "random_search": None,
}
METRICS = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "dev/failure_rate": 0.5}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "evaluations" / "more").mkdir(parents=True)
    (folder / "hyper_parameters.yaml").write_text("trainer: ast_dpo\n")
    (folder / "results.json").write_text(json.dumps(RESULTS))
    write(folder / "metrics.jsonl", METRICS)
    write(folder / "timings.jsonl", [{"step": 1, "time/seconds": 3.0}])
    write(folder / "rollouts" / "train.jsonl", [{"step": 1, "probe": "a", "parts": {"x": 1}}])
    write(folder / "evaluations" / "more" / "rows.jsonl", [{"probe": "b"}, {"probe": "c"}])
    return folder


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_are_objects_with_their_intervals(run: Path) -> None:
    found = read_results(run)
    assert [one[:5] for one in found.figures] == [
        ("before", "failure_rate", 0.1, 0.0, 0.3),
        ("after", "failure_rate", 0.4, None, None),
        ("after", "verifier/mean_value", -1.5, None, None),
    ]
    assert found.figure("failure_rate").value == 0.4
    assert found.figure("failure_rate", "before").high == 0.3


def test_a_figure_or_table_that_is_not_there_is_told_with_those_that_are(run: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'failure_rate'"):
        read_results(run).figure("failure_rat")
    with pytest.raises(UnknownNameError, match="rollouts/train"):
        read_results(run).conversations("train")


def test_frames_hold_what_the_files_hold(run: Path) -> None:
    pytest.importorskip("pandas")
    found = read_results(run)
    figures = found.figures_frame()
    assert list(figures.columns) == ["when", "name", "value", "low", "high", "counts"]
    assert figures["value"].tolist() == [0.1, 0.4, -1.5]
    metrics = found.metrics_frame()
    assert metrics.index.tolist() == [1, 2]
    assert metrics["loss"].tolist() == [0.5, 0.25]
    assert metrics["time/seconds"].isna().tolist() == [False, True]
    assert found.tables == ["evaluations/more", "rollouts/train"]
    assert found.conversations_frame("rollouts/train")["parts.x"].tolist() == [1]
    assert found.conversations_frame("evaluations/more")["probe"].tolist() == ["b", "c"]


def test_a_run_that_has_not_ended_has_metrics_and_no_figures(run: Path) -> None:
    (run / "results.json").unlink()
    (run / "metrics.jsonl").unlink()
    (run / "timings.jsonl").unlink()
    found = read_results("one", runs_dir=run.parent)
    assert (found.figures, found.metrics) == ([], [])
    pytest.importorskip("pandas")
    assert len(found.metrics_frame()) == 0


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="nothing"):
        read_results(tmp_path / "nothing")


def test_without_pandas_a_frame_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[pandas\]"):
        read_results(run).figures_frame()
