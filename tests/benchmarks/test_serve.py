"""The load test of the text service runs, and its counts are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.documents import ROOT


def measured(folder: Path, options: str) -> tuple[Any, str]:
    """The JSON and the output of a load test of few short answers."""
    words = f"{options} --repeats 1 --max-tokens 6 --out {folder / 'figures.json'}".split()
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads((folder / "figures.json").read_text()), done.stdout


@pytest.mark.slow  # two services, each of which imports torch
def test_the_load_test_compares_clients_and_answers(tmp_path: Path) -> None:
    figures, printed = measured(tmp_path, "--clients 4 --requests 8")
    assert figures["num_same"] == figures["num_compared"] == 2 * 8
    assert figures["many_clients"]["answers_per_second"] > 0
    assert figures["many_clients"]["cpu_ms_per_answer"] >= 0
    assert set(figures["ratios"]) >= {"to_one_client", "to_one_after_the_other"}
    assert figures["peak_mib"] > 0
    assert "| 4 clients |" in printed


@pytest.mark.slow  # as above
@pytest.mark.parametrize(
    ("option", "figures"),
    [
        ("--against-generate", {"service_ms", "empty_route_ms", "generate_ms"}),
        ("--with-tools", {"without_tools_us", "with_tools_us", "ratio"}),
    ],
)
def test_cpu_of_the_service_is_compared(tmp_path: Path, option: str, figures: set[str]) -> None:
    rows, _ = measured(tmp_path, f"{option} 1 2 --requests 4 --temperature 0")
    assert [row["clients"] for row in rows] == [1, 2]
    assert all(row[name] > 0 for row in rows for name in figures)
    assert all(row.get("num_same", 4) == 4 for row in rows)
