"""Results of a run as objects, frames and plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nip_astra import read_results
from nip_astra.errors import MissingDependencyError, RunDirectoryError, UnknownNameError
from nip_astra.evaluation.api import Comparison
from nip_astra.evaluation.run_results import Estimate, estimates_of, plot_curves
from tests.kit.messages import says
from tests.report.runs import write_lines

RESULTS = {
    "before": {"failure_rate": 0.1, "failure_rate_interval": [0.0, 0.3], "first_query": {"a": 1}},
    "after": {"failure_rate": 0.4, "verifier/mean_value": -1.5},
    "random_search": None,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "one"
    for name in ("rollouts", "evaluations/more"):
        (folder / name).mkdir(parents=True)
    (folder / "hyper_parameters.yaml").write_text("trainer: ast_dpo\n")
    (folder / "results.json").write_text(json.dumps(RESULTS))
    tables: dict[str, list[dict[str, Any]]] = {
        "metrics": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "dev/failure_rate": 0.5}],
        "timings": [{"step": 1, "time/seconds": 3.0}],
        "rollouts/train": [{"step": 1, "probe": "a", "parts": {"x": 1}}],
        "evaluations/more/rows": [{"probe": "b"}, {"probe": "c"}],
    }
    for name, rows in tables.items():
        write_lines(folder / f"{name}.jsonl", rows)
    return folder


def test_figures_are_objects_with_their_intervals(run: Path) -> None:
    result = read_results(run)
    assert [item[:5] for item in result.figures] == [
        ("before", "failure_rate", 0.1, 0.0, 0.3),
        ("after", "failure_rate", 0.4, None, None),
        ("after", "verifier/mean_value", -1.5, None, None),
    ]
    assert result.figure("failure_rate").value == 0.4
    assert result.figure("failure_rate", "before").high == 0.3
    assert says(result._repr_html_(), "<pre>", "failure_rate", "before", "after")
    values = {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}, "num_correct": 3}
    values |= {"prover": {"reward": {"value": 1.0, "low": None, "high": None}}, "none": {}}
    assert estimates_of(values) == [Estimate("accuracy", 0.5, 0.4, 0.6)]


def test_figures_tables_and_runs_that_do_not_exist_are_refused(run: Path) -> None:
    with pytest.raises(UnknownNameError, match="'failure_rate'"):
        read_results(run).figure("failure_rat")
    with pytest.raises(UnknownNameError, match="rollouts/train"):
        read_results(run).conversations("train")
    with pytest.raises(RunDirectoryError, match="nothing"):
        read_results(run / "nothing")


def test_frames_hold_the_content_of_the_files(run: Path) -> None:
    pytest.importorskip("pandas")
    result = read_results(run)
    figures = result.figures_frame()
    assert list(figures.columns) == ["when", "name", "value", "low", "high", "counts"]
    assert figures["value"].tolist() == [0.1, 0.4, -1.5]
    metrics = result.metrics_frame()
    assert metrics.index.tolist() == [1, 2]
    assert metrics["loss"].tolist() == [0.5, 0.25]
    assert metrics["time/seconds"].isna().tolist() == [False, True]
    assert result.tables == ["evaluations/more", "rollouts/train"]
    assert result.conversations_frame("rollouts/train")["parts.x"].tolist() == [1]
    assert result.conversations_frame("evaluations/more")["probe"].tolist() == ["b", "c"]
    # A run that has not ended has no figures.
    for name in ("results.json", "metrics.jsonl", "timings.jsonl"):
        (run / name).unlink()
    result = read_results("one", runs_dir=run.parent)
    assert (result.figures, result.metrics, len(result.metrics_frame())) == ([], [], 0)


def test_frames_and_plots_name_the_package_that_they_need(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pandas", "matplotlib"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[pandas\]"):
        read_results(run).figures_frame()
    for shown in (read_results(run), Comparison("a", {}, [])):
        with pytest.raises(MissingDependencyError, match=r"nip_astra\[plot\]"):
            shown.plot()


def test_curves_and_differences_are_drawn(run: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    rows = [
        {"step": step, "dev/accuracy": 0.5, "dev/accuracy_low": 0.4, "dev/accuracy_high": 0.6,
         "a/mean_episode_reward": 1.0, "b/mean_episode_reward": 2.0}
        for step in (1, 2)
    ]  # fmt: skip
    titles = [item.get_title() for item in plot_curves(rows).axes if item.get_visible()]
    assert titles == ["Right answers, held out", "Reward of an episode"]
    (axes,) = plot_curves(rows, ["{}/mean_episode_reward"]).axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    with pytest.raises(UnknownNameError, match="accurcy"):
        plot_curves(rows, ["dev/accurcy"])
    metric = {"difference": 0.1, "low": -0.1, "high": 0.3}
    (axes,) = Comparison("a", {"b": {"num_pairs": 3, "accuracy": metric}}, []).plot().axes
    assert [item.get_text() for item in axes.get_yticklabels()] == ["b: accuracy"]
    assert read_results(run).plot("loss").axes[0].lines
