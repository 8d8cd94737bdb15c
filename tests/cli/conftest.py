"""A finished run that commands are tried on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.cli.trained_run import SMALL
from tests.command_line import CommandLine


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_scenario: Path) -> Path:
    """The folder of a finished run."""
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), overrides=SMALL)
    runs = tmp_path_factory.mktemp("runs")
    run_experiment(resolved, runs_dir=str(runs), run_id="one", progress=False)
    return runs / "one"


@pytest.fixture
def run(cli: CommandLine, trained: Path) -> Iterator[Path]:
    """A copy of the run in the empty folder that commands are typed in."""
    shutil.copytree(trained, cli.folder / "runs" / "one")
    return cli.folder / "runs" / "one"
