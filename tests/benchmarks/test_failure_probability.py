"""The benchmark of the probability of failure runs, and its figures are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment


def test_it_measures_a_run_beside_brute_force(
    benchmark: ModuleType,
    tiny_scenario: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ("training.num_iterations=1", "ast_chat.evaluation.use_random_search=false")
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), overrides=small)
    run_experiment(resolved, runs_dir=str(tmp_path), run_id="one", progress=False)
    out = tmp_path / "out.json"
    arguments = [str(tmp_path / "one"), "--out", str(out)]
    sizes = ["--episodes", "30", "--repetitions", "2", "--brute-force", "60"]
    monkeypatch.setattr(sys, "argv", ["failure_probability.py", *arguments, *sizes])
    benchmark.main()
    printed, results = capsys.readouterr().out, json.loads(out.read_text())
    assert f"{round(60 * results['truth'])} of 60 episodes fail" in printed
    for name in ("Monte Carlo", "importance sampling, one turn", "importance sampling, all turns"):
        assert name in printed
        assert len(results["estimates"][name]) == 2
    # The plain estimates are of parts of the brute force.
    means = [estimate["value"] for estimate in results["estimates"]["Monte Carlo"]]
    assert np.mean(means) == pytest.approx(results["truth"])


def test_error_width_and_coverage_are_those_worked_out_by_hand(benchmark: ModuleType) -> None:
    estimates = [
        {"value": 0.1, "low": 0.0, "high": 0.15, "standard_error": 0.03},
        {"value": 0.3, "low": 0.25, "high": 0.4, "standard_error": 0.04},
        {"value": None, "low": None, "high": None},
    ]
    results = benchmark.figures(estimates, 0.2)
    assert results["mean"] == pytest.approx(0.2)
    assert results["rmse"] == pytest.approx(0.1)
    assert results["relative_rmse"] == pytest.approx(0.5)
    assert (results["coverage"], results["refused"]) == (0.0, 1)
    assert results["mean_width"] == pytest.approx(0.15)
    assert results["standard_error"] == pytest.approx((0.0025 / 2) ** 0.5)
