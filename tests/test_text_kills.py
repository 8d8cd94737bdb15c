"""Runs of chat models behind a service are killed, and go on without asking anything twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
REPOSITORY = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked"),
]


def killed(folder: Path, trainer: str, *points: str) -> list[dict[str, Any]]:
    """What became of runs that were killed with SIGKILL at operations of these names."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.text_killing", str(folder), trainer, *points],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | quiet,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    *found, summary = [json.loads(line) for line in done.stdout.splitlines()]
    assert summary == {"kills": len(found), "faults": 0}
    return found


def test_a_run_is_killed_before_and_after_each_stage(tmp_path: Path) -> None:
    found = killed(tmp_path, "pure_text_ei", "before stage=10", "after stage=10")
    assert len(found) == 20


def test_a_run_is_killed_between_requests(tmp_path: Path) -> None:
    requests = ("before answer=2", "after answer=4", "after keeping=2")
    jobs = ("after upload=1", "after submission=1", "after look=1")
    found = killed(tmp_path, "pure_text_malt", *requests, *jobs)
    assert len(found) == 11
