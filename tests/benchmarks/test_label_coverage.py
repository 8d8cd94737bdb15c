"""A fast version of benchmarks/label_coverage.py."""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("drawn", "rate", "missing"), [("strata", 0.1, 0.0), ("strata", 0.1, 0.3), ("random", 0.3, 0.3)]
)
def test_corrected_intervals_cover_the_truth(
    benchmark: ModuleType, drawn: str, rate: float, missing: float
) -> None:
    shares = benchmark.simulate(rate, 100, missing, drawn, repetitions=60, num_resamples=200)
    assert shares["refused"] == 0.0
    assert max(shares["above"], shares["below"]) <= 4 / 60
