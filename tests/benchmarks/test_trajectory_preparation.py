"""The preparation of trajectories agrees with a loop over tokens, and both are timed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_both_preparations_are_compared_and_written(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    sizes = ["--trajectories", "32", "--mean-length", "300", "--rounds", "2"]
    benchmark.main([*sizes, "--out", str(out)])
    figures = json.loads(out.read_text())
    assert "loop over ours" in capsys.readouterr().out
    assert figures["num_trajectories"] == 32
    assert figures["loop_over_ours"] > 0


def test_a_difference_between_both_is_detected(benchmark: ModuleType) -> None:
    rows = benchmark.make_rows(8, 300)
    by_loop = benchmark.prepare_by_loop(rows)
    by_loop["advantages"][0, -1] += 1
    with pytest.raises(AssertionError):
        benchmark.check(benchmark.prepare(rows), by_loop)
