"""Runs are timed by layer in their own process."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.kit.documents import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "layers"),
    [
        ("ast_dpo", {"evaluation", "rollouts of training", "updates", "random search"}),
        ("pure_text_ei", {"rollouts", "files of rollouts", "fine-tuning"}),
    ],
)
def test_each_layer_of_a_run_has_its_share(
    benchmark: ModuleType, trainer: str, layers: set[str]
) -> None:
    run = benchmark.measure_run(ROOT, ["--trainer", trainer, "--test-run"])
    spent = run["spent"]
    assert set(spent) == layers | {"start", "rest", "report", "whole"}
    assert all(seconds > 0 for seconds in spent.values())
    assert sum(spent.values()) == pytest.approx(2 * spent["whole"])
    assert run["metrics"]
