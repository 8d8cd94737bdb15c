"""Learning curves for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from nip_astra.evaluation.exports.material import Material, missing


def write_tensorboard(material: Material, folder: Path) -> list[Path]:
    """Write the metrics of training, and rates of the evaluation, as an event file.

    Raises
    ------
    MissingDependencyError
        When tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise missing("TensorBoard events", "tensorboard", "tensorboard") from error
    logs = folder / "tensorboard" / material.run_id
    for old in logs.glob("events.out.tfevents.*"):
        # TensorBoard would draw both, one over the other.
        old.unlink()
    last = 0
    with SummaryWriter(str(logs)) as writer:
        for row in material.metrics:
            last = int(row["step"])
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    writer.add_scalar(name, value, last)
        for name in ("failure_rate", "turn_failure_rate"):
            value = (material.figures.get(name) or {}).get("value")
            if value is not None:
                writer.add_scalar(f"evaluation/{material.name}/{name}", value, last)
    return sorted(logs.glob("events.out.tfevents.*"))
