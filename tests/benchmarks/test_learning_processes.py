"""The benchmark of learning processes interleaves its three variants."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from nip_astra.utils.forked import can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux without a GPU")


@pytest.mark.slow  # a scenario of graphs, and nine updates
def test_one_process_losses_and_rows_are_interleaved(benchmark: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    benchmark.main(["--rounds", "2", "--frames", "96", "--minibatch", "48", "--out", str(out)])
    figures = json.loads(out.read_text())
    assert [set(row) for row in figures["rounds"]] == [{"one", "losses", "rows"}] * 2
    assert all(seconds > 0 for row in figures["rounds"] for seconds in row.values())
    first, second = (row["rows"] / row["one"] for row in figures["rounds"])
    assert min(first, second) <= figures["rows/one"] <= max(first, second)
