"""Learning curves: event files of TensorBoard, and all that a run without conversations exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.errors import ConfigurationError
from nip_astra.evaluation.exports.material import Material, make_folder, missing
from nip_astra.evaluation.exports.tables import csv_tables
from nip_astra.evaluation.rows import Row, read_rows
from nip_astra.tracking.run_directory import RESULTS, RunDirectory

METRICS = "metrics.jsonl"


def write_tensorboard(material: Material, folder: Path) -> list[Path]:
    """Write the metrics of training, and rates of the evaluation, as an event file."""
    rates = {
        f"evaluation/{material.name}/{name}": (material.figures.get(name) or {}).get("value")
        for name in ("failure_rate", "turn_failure_rate")
    }
    known = {name: value for name, value in rates.items() if value is not None}
    return write_events(folder / "tensorboard" / material.run_id, material.metrics, known)


def write_events(
    logs: Path, metrics: Sequence[Mapping[str, Any]], last: Mapping[str, float]
) -> list[Path]:
    """Write learning curves, and figures of the last step, as an event file.

    Raises
    ------
    MissingDependencyError
        When tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("TensorBoard events", "tensorboard", "tensorboard") from error
    for old in logs.glob("events.out.tfevents.*"):
        # TensorBoard would draw both, one over the other.
        old.unlink()
    step = 0
    with SummaryWriter(str(logs)) as writer:
        for row in metrics:
            step = int(row["step"])
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    writer.add_scalar(name, value, step)
        for name, value in last.items():
            writer.add_scalar(name, value, step)
    return sorted(logs.glob("events.out.tfevents.*"))


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
