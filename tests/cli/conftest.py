"""A finished run for tests of commands."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nip_astra import progress
from nip_astra.progress import ProgressBar
from nip_astra.resolving.resolution import resolve_experiment
from nip_astra.run import run_experiment
from tests.cli.trained_run import SMALL, copy_evaluated
from tests.kit.command_line import CommandLine


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_scenario: Path) -> Path:
    """The folder of a finished run."""
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), overrides=SMALL)
    runs = tmp_path_factory.mktemp("runs")
    run_experiment(resolved, runs_dir=str(runs), run_id="one", progress=False)
    return runs / "one"


@pytest.fixture
def run(cli: CommandLine, trained: Path) -> Iterator[Path]:
    """A copy of the run in the empty folder in which commands are run."""
    shutil.copytree(trained, cli.folder / "runs" / "one")
    return cli.folder / "runs" / "one"


@pytest.fixture(scope="session")
def evaluated_once(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_evaluated(trained, tmp_path_factory.mktemp("evaluated"))


@pytest.fixture
def evaluated(cli: CommandLine, evaluated_once: Path) -> Path:
    """A copy of the run with one evaluation, in the folder in which commands are run."""
    return Path(shutil.copytree(evaluated_once, cli.folder / "runs" / "one"))


@pytest.fixture
def closed_bars(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """Completed and total units of each closed progress bar, by its description."""
    closed: dict[str, tuple[int, int]] = {}
    close = ProgressBar.close

    def remember(bar: ProgressBar) -> None:
        if bar in progress._BARS and (bar.total or not closed.get(bar._description)):
            closed[bar._description] = bar.num_done, bar.total
        close(bar)

    monkeypatch.setattr(ProgressBar, "close", remember)
    return closed
