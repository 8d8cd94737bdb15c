"""Trackers that write files into the run directory."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nip_astra.errors import TrackingError
from nip_astra.lazy import import_extra
from nip_astra.safe_text import to_json
from nip_astra.tracking.run_directory import RunDirectory, finite, to_yaml
from nip_astra.tracking.tracker import (
    METRICS_FILE,
    TIMINGS_FILE,
    Tracker,
    grouped_figures,
    plain_numbers,
    register_tracker,
)

logger = logging.getLogger(__name__)

TIMING_PREFIXES = ("time/", "memory/", "services/")
"""Prefixes of metrics that differ between equal runs; they go to a separate file."""
_TABLE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@register_tracker("file")
class LocalTracker(Tracker):
    """Appends to `metrics.jsonl`, `timings.jsonl` and `rollouts/<table>.jsonl`.

    A line is one JSON object and is flushed when written; NaN and infinities are null. Artifacts
    and the summary are already in the run directory, as files and as `results.json`.
    """

    def __init__(
        self,
        run_directory: RunDirectory,
        settings: Mapping[str, Any] = {},
        config: Mapping[str, Any] = {},
    ) -> None:
        super().__init__(run_directory)
        self._root = run_directory.path
        self._files: dict[str, BinaryIO] = {}
        self._metrics_digest = hashlib.sha256()
        """Of all bytes of the metrics, so that a changed file is not continued."""
        self._step = -1

    def log_metrics(self, values: Mapping[str, float | int], *, step: int) -> None:
        if "step" in values:
            raise TrackingError(
                "the metric named 'step' has the name of the column of steps. Give the metric "
                "another name."
            )
        self._step, values = step, plain_numbers(values)
        timings = {
            name: value for name, value in values.items() if name.startswith(TIMING_PREFIXES)
        }
        metrics = {name: value for name, value in values.items() if name not in timings}
        for file, part in ((METRICS_FILE, metrics), (TIMINGS_FILE, timings)):
            if part:
                self._append(file, [{"step": step} | {name: part[name] for name in sorted(part)}])

    def log_table(
        self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, step: int
    ) -> None:
        if not _TABLE_NAME.fullmatch(name):
            raise TrackingError(
                f"the table named {name!r} becomes a file, and may hold only letters, digits, '.', "
                "'_' and '-'. Rename the table."
            )
        self._append(
            f"rollouts/{name}.jsonl",
            [{"step": step} | dict(zip(columns, row, strict=True)) for row in rows],
        )

    def position(self) -> dict[str, Any]:
        """Sync all files; return their lengths in bytes and the last step."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return {
            "files": {
                path.relative_to(self._root).as_posix(): path.stat().st_size
                for path in self._written()
            },
            "metrics_sha256": self._metrics_digest.hexdigest(),
            "step": self._step,
        }

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Truncate each file to its recorded length; remove files without one.

        An empty position removes all, for a run that starts over. Lost timings and conversations
        cause a warning, since nothing is computed from them.
        """
        self._close()
        self._step = position.get("step", -1)
        lengths: dict[str, int] = position.get("files", {})
        for name, length in lengths.items():
            path = self._root / name
            size = path.stat().st_size if path.is_file() else 0
            if size >= length:
                continue
            if name == METRICS_FILE:
                raise TrackingError(
                    f"the checkpoint is at byte {length} of {path}, but the file has {size} bytes. "
                    "Restore the file, or start a new run."
                )
            logger.warning(
                "%s had %d bytes when the checkpoint was saved and has %d now; the run continues "
                "without the lost rows",
                path,
                length,
                size,
            )
        for path in self._written():
            name = path.relative_to(self._root).as_posix()
            try:
                if name in lengths:
                    _cut(path, lengths[name])
                else:
                    path.unlink()
            except OSError as error:
                raise TrackingError(
                    f"{path} cannot be cut back to the checkpoint: {error.strerror or error}. "
                    "Correct the file's permissions."
                ) from error
        self._metrics_digest = self._check_metrics(position.get("metrics_sha256"))

    def _check_metrics(self, expected: str | None) -> hashlib._Hash:
        """Return the digest of the metrics so far, which must be the expected one if it is known.

        Checkpoints of older versions have none.
        """
        path = self._root / METRICS_FILE
        digest = hashlib.sha256(path.read_bytes() if path.is_file() else b"")
        if expected is not None and digest.hexdigest() != expected:
            raise TrackingError(
                f"{path} has changed since the checkpoint was saved. Restore the file, or start a "
                "new run."
            )
        return digest

    def finish(self, *, success: bool) -> None:
        self._close()

    def _written(self) -> list[Path]:
        """Return the files that exist, of this process or an earlier one."""
        files = [self._root / METRICS_FILE, self._root / TIMINGS_FILE]
        files += sorted((self._root / "rollouts").glob("*.jsonl"))
        return [path for path in files if path.is_file()]

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        path = self._root / name
        try:
            if name not in self._files:
                path.parent.mkdir(exist_ok=True)
                self._files[name] = path.open("ab")
            file = self._files[name]
            for record in records:
                line = f"{to_json(finite(record), allow_nan=False)}\n"
                content = line.encode(errors="backslashreplace")
                file.write(content)
                if name == METRICS_FILE:
                    self._metrics_digest.update(content)
            file.flush()
        except OSError as error:
            raise TrackingError(
                f"{path} cannot be written: {error.strerror or error}. Free some space or correct "
                "the directory's permissions, then resume the run."
            ) from error

    def _close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


def _cut(path: Path, length: int) -> None:
    """Truncate a file to a length, or to its last whole line if it is shorter."""
    if path.stat().st_size < length:
        length = path.read_bytes().rfind(b"\n") + 1
    os.truncate(path, length)


@register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """Writes metrics, tables and parameters for TensorBoard into the run's folder `tensorboard`."""

    def __init__(
        self, run_directory: RunDirectory, settings: Mapping[str, Any], config: Mapping[str, Any]
    ) -> None:
        super().__init__(run_directory)
        self._module = import_extra("torch.utils.tensorboard", "the tracker", "tensorboard")
        self._folder, self._config = run_directory.path / "tensorboard", _code(to_yaml(config))
        self._step = -1
        self._open()

    def _open(self, **options: Any) -> None:
        self._writer: Any = self._module.SummaryWriter(str(self._folder), **options)
        self._writer.add_text("hyper_parameters", self._config)

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._step = step
        for name, value in grouped_figures(values).items():
            self._writer.add_scalar(name, value, step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        lines = [to_json(dict(zip(columns, row, strict=True))) for row in rows]
        self._writer.add_text(f"rollouts/{name}", _code("\n".join(lines)), step)

    def log_summary(self, values: Mapping[str, float]) -> None:
        self.log_metrics(values, step=max(self._step, 0))

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Remove the events of earlier processes, which may lack those of their last seconds."""
        self._writer.close()
        self._step = position.get("step", -1)
        for file in self._folder.glob("events.out.tfevents.*"):
            file.unlink()
        self._open()

    def stored_entries(self) -> set[tuple[int, str]]:
        return set()

    def finish(self, *, success: bool) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """Return Markdown that shows a text verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())
