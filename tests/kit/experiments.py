"""Experiments of tests: trainers, and runs in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from nip_astra.errors import StopRequested
from nip_astra.evaluation.storage import read_rows
from nip_astra.resolving.resolution import ResolvedExperiment, resolve_experiment
from nip_astra.run import prepare_experiment, run_experiment
from nip_astra.tracking.tracker import Tracker

FAST = ("ast_chat.evaluation.use_random_search=false", "ast_chat.evaluation.num_episodes=2")
"""What keeps runs of AST trainers short."""
SHORT = (*FAST, "training.num_iterations=3")
TASK = (
    "training.num_episodes_per_experience=8",
    "training.minibatch_size=64",
    "training.num_iterations=2",
    "task.evaluation.num_problems=4",
)


class RecordingTracker(Tracker):
    """Keeps its input: rows of metrics, tables by name and step, artifacts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.tables: dict[str, Sequence[Any]] = {}
        self.artifacts: list[tuple[str, str, tuple[str, ...]]] = []

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self.rows.append(dict(values))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        self.tables[f"{name}/{step}"] = rows

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002
        aliases: Sequence[str] = (),
    ) -> None:
        assert path.is_dir()
        self.artifacts.append((name, type, tuple(aliases)))


def trainer_of(name: str, *overrides: str, scenario: Path | str | None = None) -> Any:
    """A trainer on a scenario, by default its preset's."""
    place = None if scenario is None else str(scenario)
    resolved = resolve_experiment(trainer=name, scenario=place, overrides=overrides)
    return prepare_experiment(resolved, progress=False).trainer


def ast_trainer(name: str, scenario: Path | str, *overrides: str) -> Any:
    """A trainer of an attacker, by default of three short iterations."""
    # Models of random weights score low.
    kept = ("ast_sft.min_score=0.0",) if name == "ast_sft" else ()
    return trainer_of(name, *SHORT, *kept, *overrides, scenario=scenario)


def task_trainer(name: str, *overrides: str, scenario: str | None = None) -> Any:
    """A trainer on a task, by default of two iterations of eight problems."""
    return trainer_of(name, *TASK, *overrides, scenario=scenario)


def iterations_of(trainer: Any, count: int) -> list[dict[str, float]]:
    """Collect and learn, and return the metrics of each iteration."""
    found = []
    for iteration in range(count):
        trainer._collect(iteration)
        trainer._update(iteration)
        found.append(trainer.state.end())
    return found


def run_in(folder: Path, resolved: ResolvedExperiment, name: str = "run", **settings: Any) -> Path:
    """Run an experiment, and return its run directory."""
    options = {"runs_dir": str(folder), "run_id": name, "progress": False} | settings
    return run_experiment(resolved, **options).run_directory.path


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return the logged metrics of a run, by iteration."""
    return read_rows(run / "metrics.jsonl")


@contextmanager
def stopped_after(count: int) -> Iterator[None]:
    """Have a signal stop the run of the block, after `count` checks for a signal."""
    looks = iter(range(count))

    def flag() -> str | None:
        return "SIGTERM" if next(looks, None) is None else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nip_astra.run.stop_on_signals", lambda: nullcontext(flag))
        with pytest.raises(StopRequested, match="nip-astra resume"):
            yield
