"""Results print and plot themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nip_astra.errors import MissingDependencyError, UnknownNameError
from nip_astra.evaluation.api import Comparison
from nip_astra.evaluation.run_results import Estimate, estimates_of, plot_curves, read_results
from tests.report.runs import write_run


def test_a_run_prints_its_figures_in_a_notebook(tmp_path: Path) -> None:
    html = read_results(write_run(tmp_path / "one"))._repr_html_()
    assert html.startswith("<pre>")
    for fact in ("failure_rate", "before", "after"):
        assert fact in html


def test_figures_with_an_interval_are_estimates() -> None:
    values = {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6}, "num_right": 3}
    values |= {"prover": {"reward": {"value": 1.0, "low": None, "high": None}}, "none": {}}
    assert estimates_of(values) == [Estimate("accuracy", 0.5, 0.4, 0.6)]


def test_plots_name_the_package_that_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"nip_astra\[plot\]"):
        read_results(write_run(tmp_path / "one")).plot()
    with pytest.raises(MissingDependencyError):
        Comparison("a", {}, []).plot()


def test_curves_and_differences_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    rows = [
        {"step": step, "dev/accuracy": 0.5, "dev/accuracy_low": 0.4, "dev/accuracy_high": 0.6,
         "a/mean_episode_reward": 1.0, "b/mean_episode_reward": 2.0}
        for step in (1, 2)
    ]  # fmt: skip
    titles = [one.get_title() for one in plot_curves(rows).axes if one.get_visible()]
    assert titles == ["Right answers, held out", "Reward of an episode"]
    (axes,) = plot_curves(rows, ["{}/mean_episode_reward"]).axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    with pytest.raises(UnknownNameError, match="accurcy"):
        plot_curves(rows, ["dev/accurcy"])
    metric = {"difference": 0.1, "low": -0.1, "high": 0.3}
    (axes,) = Comparison("a", {"b": {"num_pairs": 3, "accuracy": metric}}, []).plot().axes
    assert [one.get_text() for one in axes.get_yticklabels()] == ["b: accuracy"]
    assert read_results(write_run(tmp_path / "one")).plot("loss").axes[0].lines
