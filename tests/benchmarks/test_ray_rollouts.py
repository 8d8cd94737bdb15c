"""Rollouts on actors, in forked workers and in one process are compared and timed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.slow
def test_all_variants_are_measured_and_written(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "figures.json"
    benchmark.main(["--episodes", "16", "--rounds", "1", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert set(figures["seconds"]) == {
        *("one process", "two forked workers", "two halves side by side"),
        *("one actor", "two actors"),
    }
    assert all(len(times) == 1 for times in figures["seconds"].values())
    assert figures["two_actors_over_one"] > 0
    assert 0 < figures["of_processor_seconds"]["two_actors_over_one"] < 1
