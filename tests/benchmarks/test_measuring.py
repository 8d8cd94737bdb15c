"""The shared tools of the benchmarks."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_ratios_are_of_the_same_round(benchmark: ModuleType) -> None:
    assert benchmark.ratio([1.0, 20.0, 3.0], [2.0, 10.0, 6.0]) == 0.5


def test_variants_are_interleaved_in_alternating_order(benchmark: ModuleType) -> None:
    calls: list[str] = []
    variants = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert benchmark.interleaved(variants, 2) == {"a": [1, 4], "b": [2, 3]}
    assert calls == ["a", "b", "b", "a"]


def test_options_are_of_the_type_of_their_defaults(benchmark: ModuleType) -> None:
    parser = benchmark.build_parser("What it measures.", rounds=3, seeds=[0], quick=False)
    parsed = parser.parse_args(["--seeds", "4", "5", "--quick", "--out", "a.json"])
    assert vars(parsed) == {"rounds": 3, "seeds": [4, 5], "quick": True, "out": Path("a.json")}


def test_figures_are_printed_and_written(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark.report_figures({"num_rows": 1200, "a_ratio": 0.12345}, tmp_path / "a.json")
    assert capsys.readouterr().out.split() == ["num", "rows", "1,200", "a", "ratio", "0.123"]
    assert json.loads((tmp_path / "a.json").read_text()) == {"num_rows": 1200, "a_ratio": 0.12345}
