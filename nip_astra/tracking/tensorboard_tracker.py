"""TensorBoard event files in the run directory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nip_astra.errors import MissingDependencyError
from nip_astra.safe_text import to_json
from nip_astra.tracking.run_directory import RunDirectory, to_yaml
from nip_astra.tracking.tracker import Tracker, grouped, register_tracker


@register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """Writes metrics, tables and parameters for TensorBoard into the run's folder `tensorboard`."""

    def __init__(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(run_directory)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                f"the tracker 'tensorboard' needs the package tensorboard: {error}. Install it "
                "with: pip install 'nip_astra[tensorboard]'"
            ) from error
        self._writer: Any = SummaryWriter(str(run_directory.path / "tensorboard"))
        self._writer.add_text("hyper_parameters", _code(to_yaml(config)))
        self._step = 0

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._step = step
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(grouped(name), value, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        lines = [to_json(dict(zip(columns, row, strict=True))) for row in rows]
        self._writer.add_text(f"rollouts/{name}", _code("\n".join(lines)), step)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self.log_metrics(values, step=self._step)

    def finish(self, *, success: bool) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """Return Markdown that shows a text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
