"""Rollouts on actors, forked workers and in one process are compared, and measured in turn."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from tests.documents import ROOT

BENCHMARK = ROOT / "benchmarks" / "ray_rollouts.py"


@pytest.mark.slow
def test_all_ways_are_measured_and_written(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    threads = torch.get_num_threads()
    out = tmp_path / "figures.json"
    try:
        given = ["--episodes", "16", "--rounds", "1", "--out", str(out)]
        runpy.run_path(str(BENCHMARK))["main"](given)
    finally:
        torch.set_num_threads(threads)
    figures = json.loads(out.read_text())
    assert set(figures["seconds"]) == {
        *("one process", "two forked workers", "two halves side by side"),
        *("one actor", "two actors"),
    }
    assert all(len(times) == 1 for times in figures["seconds"].values())
    assert figures["two_actors_over_one"] > 0
    assert 0 < figures["of_processor_seconds"]["two_actors_over_one"] < 1


def test_ratios_are_of_the_same_round() -> None:
    ratio = runpy.run_path(str(BENCHMARK))["ratio"]
    seconds = {"a": [1.0, 20.0, 3.0], "b": [2.0, 10.0, 6.0]}
    assert ratio(seconds, "a", "b") == 0.5
