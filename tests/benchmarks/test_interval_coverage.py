"""The coverage simulation draws from the stated distributions, and counts coverage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nip_astra.utils.intervals import rate_estimate


@pytest.mark.parametrize("kind", ["Beta", "two kinds"])
def test_outcomes_and_differences_have_the_distribution_of_the_grid(
    benchmark: ModuleType, kind: str
) -> None:
    rng = np.random.default_rng(0)
    for rate, correlation in ((0.1, 0.3), (0.5, 0.6), (0.02, 0.0)):
        drawn = benchmark.outcomes(rng, (1, 40_000, 2), rate, correlation, kind)[0]
        assert drawn.mean() == pytest.approx(rate, rel=0.06)
        assert np.corrcoef(drawn.T)[0, 1] == pytest.approx(correlation, abs=0.02)
    drawn = benchmark.differences(rng, (1, 40_000, 1), (0.1, 0.5), 0.6)[0]
    assert drawn.mean() == pytest.approx(0.4, abs=0.01)
    # Independent outcomes would differ with the variance 0.09 + 0.25.
    assert drawn.var() < 0.32
    scores = benchmark.differences(rng, (1, 40_000, 1), (0.1, 0.5), 0.6, 0.5)[0]
    assert scores.mean() == pytest.approx(0.4 * (1.0 - 1.0 / 21.0), abs=0.01)


def test_coverage_is_counted_from_the_intervals(benchmark: ModuleType) -> None:
    bounds = np.array([[0.0, 0.1], [0.2, 0.4], [0.3, 0.4], [0.1, 0.2]])
    assert benchmark.count(bounds, 0.2) == {
        "coverage": 0.5, "below": 0.25, "above": 0.25, "width": pytest.approx(0.125),
    }  # fmt: skip
    drawn = np.array([[[1.0, 1.0], [0.0, 0.0]]])
    result = rate_estimate([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])
    assert benchmark.own_bounds(drawn, rate_estimate).tolist() == [[result.low, result.high]]
    rng = np.random.default_rng(2)
    assert benchmark.bootstrap_bounds(drawn, rng, 1.0).tolist() == [[0.0, 1.0]]
    assert benchmark.bootstrap_bounds(0.0 * drawn, rng, 1.0).tolist() == [[0.0, 1.5]]


def test_missing_verdicts_have_the_rates_of_the_grid(benchmark: ModuleType) -> None:
    rng = np.random.default_rng(3)
    failed, is_missing = benchmark.conversations(rng, (20_000, 1), 0.183, 0.3, (0.4, 0.02))
    assert failed.any(axis=1).mean() == pytest.approx(0.183, abs=0.01)
    assert is_missing[failed].mean() == pytest.approx(0.4, abs=0.02)
    assert is_missing[~failed].mean() == pytest.approx(0.02, abs=0.002)
    result = benchmark.estimates(failed[:, :1], is_missing[:, :1], np.arange(20_000))
    # Single turns are never censored: both drop missing verdicts.
    assert result["survival"] == result["uncensored"]


def test_it_prints_a_line_for_each_design_and_keeps_every_point(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "coverage.json"
    monkeypatch.setattr(benchmark, "MISSING_DESIGNS", ((5, 1), (5, 2)))
    options = f"interval_coverage.py --repetitions 5 --largest 5 --out {out}"
    monkeypatch.setattr(sys, "argv", options.split())
    benchmark.main()
    printed = capsys.readouterr().out
    for what in ("rate", "difference of rates", "difference of scores"):
        for design in ("5 x 1", "5 x 8"):
            assert f"| {what} | {design} |" in printed
    for kind in benchmark.MISSING:
        assert f"| 5 x 2 | {kind} |" in printed
    points = json.loads(out.read_text())
    num_rates = len(benchmark.RATES) * (1 + 1 + 2 * 3)
    num_pairs = 2 * len(benchmark.PAIRS) * 2 * 4
    num_missing = 3 * len(benchmark.MISSING) * len(benchmark.MISSING_RATES) * (1 + 2)
    assert len(points) == 2 * (num_rates + num_pairs) + num_missing
    assert all(0.0 <= point["coverage"] <= 1.0 for point in points)
