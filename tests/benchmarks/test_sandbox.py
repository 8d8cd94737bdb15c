"""Solutions get the same verdicts from both ways of running foreign code."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("pydantic_monty")


@pytest.mark.needs_sandbox
def test_the_interpreter_agrees_with_python(benchmark: ModuleType) -> None:
    found = benchmark.measure(benchmark.read_tasks(12), 2)
    assert found["num_agreed"] == 12
    assert found["by_bubblewrap_a_minute"] > 0
