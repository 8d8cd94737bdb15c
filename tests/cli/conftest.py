"""Finished runs for tests of commands."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nip_astra import progress
from nip_astra.progress import ProgressBar
from nip_astra.resolving.resolution import resolve_experiment
from tests.cli.trained_run import SMALL, copy_evaluated, run_task, run_text
from tests.kit.command_line import CommandLine
from tests.kit.experiments import run_in


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_scenario: Path) -> Path:
    """The folder of a finished run."""
    resolved = resolve_experiment(trainer="ast_dpo", scenario=str(tiny_scenario), overrides=SMALL)
    return run_in(tmp_path_factory.mktemp("runs"), resolved, "one")


@pytest.fixture(scope="session")
def task_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs on the same task by two trainers."""
    folder = tmp_path_factory.mktemp("task_runs")
    first = run_task(folder, "grpo", "self_hosted_grpo")
    return first, run_task(folder, "imitating", "remote_api_cross_entropy", "training.lr=5e-4")


@pytest.fixture(scope="session")
def text_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run whose verifier accepts every claim, and a run whose verifier rejects every claim."""
    folder = tmp_path_factory.mktemp("text_runs")
    return run_text(folder, "kind", "accept"), run_text(folder, "stern", "reject")


@pytest.fixture
def run(cli: CommandLine, trained: Path) -> Path:
    """A copy of the run in the empty folder in which commands are run."""
    return Path(shutil.copytree(trained, cli.folder / "runs" / "one"))


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
