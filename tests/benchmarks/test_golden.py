"""The comparison of two checkouts detects each kind of difference."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("base", "tree", "path"),
    [
        ({"metrics": [{"loss": 0.5}]}, {"metrics": [{"loss": 0.5000001}]}, "/metrics[0]/loss"),
        ({"weights": {"a": "1"}}, {"weights": {}}, "/weights/a"),
        ({"texts": ["hello", "there"]}, {"texts": ["hello"]}, "/texts"),
    ],
)
def test_a_difference_is_named_by_its_path(
    benchmark: ModuleType, base: Any, tree: Any, path: str
) -> None:
    same = {"rate": float("nan")}
    (line,) = benchmark.differences(base | same, tree | same)
    assert line.startswith(f"{path}:")


def test_the_exit_code_distinguishes_equal_different_and_failed(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"error": "ValueError: no"}
    assert benchmark.compare({"a": {"x": 1}}, {"a": {"x": 1}}) == 0
    assert benchmark.compare({"a": {"x": 1}}, {"a": {"x": 2}}) == 1
    assert benchmark.compare({"a": failed}, {"a": failed}) == 2
    assert "ValueError: no" in capsys.readouterr().out
    stored = {"loss": 1.0, "seconds": 3.0, "peak_memory_gib": 2, "model": "/somewhere/model"}
    assert benchmark.drop_times([stored]) == [{"loss": 1.0}]


def test_an_objective_is_compared_with_its_gradients(benchmark: ModuleType) -> None:
    from nip_astra.rl_objectives.policy_losses import nll_loss

    first = benchmark.objective_value(nll_loss, {"optional": False, "reduction": "token"})
    again = benchmark.objective_value(nll_loss, {"optional": False, "reduction": "token"})
    other = benchmark.objective_value(nll_loss, {"optional": False, "reduction": "sequence"})
    assert first == again
    assert first != other
    assert len(first[-1]) == 6 * 7, "the last entry is the gradient of logprobs_BT"
