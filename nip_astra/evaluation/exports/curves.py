"""Learning curves for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nip_astra.evaluation.exports.material import Material, missing


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
