"""The sandbox and the interpreter agree on the correctness of solutions."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("pydantic_monty")


@pytest.mark.needs_sandbox
def test_the_interpreter_agrees_with_python(benchmark: ModuleType) -> None:
    figures = benchmark.measure(benchmark.read_tasks(12), 2)
    assert figures["num_agreed"] == 12
    assert figures["by_bubblewrap_a_minute"] > 0
