"""What `nip-astra export` writes of runs in which nobody converses with a target: their figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.cli.task_runs import is_task_run
from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.exports.material import make_folder
from nip_astra.evaluation.exports.tables import csv_tables
from nip_astra.evaluation.exports.tensorboard import write_events
from nip_astra.evaluation.rows import Row, read_rows
from nip_astra.tracking.run_directory import HYPER_PARAMETERS, RESULTS, RunDirectory

METRICS = "metrics.jsonl"
ROLLOUTS = Path("rollouts") / "evaluation.jsonl"


def is_run_without_conversations(path: str | Path) -> bool:
    """Say whether a path is a run whose stored rollouts are no turns of an attacker."""
    run = Path(path)
    if not (run / HYPER_PARAMETERS).is_file():
        return False
    values = RunDirectory(run).read_yaml(HYPER_PARAMETERS)
    has_protocol = isinstance(values, Mapping) and values.get("interaction_protocol") is not None
    if has_protocol or is_task_run(run):
        return True
    if not (run / ROLLOUTS).is_file():
        return False
    return not all("probe" in row for row in read_rows(run / ROLLOUTS)[:1])


def export_curves(run: Path, form: str, folder: Path) -> list[Path]:
    """Write the learning curves and results of a run of networks, or of a task.

    Raises
    ------
    ConfigurationError
        When the format is one of conversations.
    """
    if form not in _FORMATS:
        raise ConfigurationError(
            f"an export of {run} as {form!r} was asked for, but that format is of conversations, "
            f"and nobody converses with a target in this run. Take one of {', '.join(_FORMATS)}; "
            f"its rollouts are JSON lines already, in {run / 'rollouts'}."
        )
    results = RunDirectory(run).read_json(RESULTS) if (run / RESULTS).is_file() else {}
    metrics = read_rows(run / METRICS) if (run / METRICS).is_file() else []
    make_folder(folder)
    return _FORMATS[form](run, results, metrics, folder)


def _write_csv(
    run: Path, results: Mapping[str, Any], metrics: Sequence[Row], folder: Path
) -> list[Path]:
    """`figures.csv` and `metrics.csv`."""
    return csv_tables(folder, {}, results, metrics=metrics)


def _write_tensorboard(
    run: Path, results: Mapping[str, Any], metrics: Sequence[Row], folder: Path
) -> list[Path]:
    """The learning curves, and the numbers that were measured after training."""
    after = results.get("after") or {}
    numbers = {
        f"after/{name}": float(value)
        for name, value in after.items()
        if isinstance(value, int | float)
    }
    return write_events(folder / "tensorboard" / run.resolve().name, metrics, numbers)


_FORMATS: dict[str, Callable[[Path, Mapping[str, Any], Sequence[Row], Path], list[Path]]] = {
    "csv": _write_csv,
    "tensorboard": _write_tensorboard,
}
