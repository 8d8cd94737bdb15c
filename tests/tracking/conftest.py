"""A run directory that trackers write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from nip_astra.tracking.run_directory import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "one")
