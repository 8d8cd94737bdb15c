"""What there is to export of a run, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nip_astra.errors import MissingDependencyError, RunDirectoryError
from nip_astra.evaluation.rows import Episode


@dataclass(frozen=True)
class Material:
    """An evaluation with the run that it is of.

    Attributes
    ----------
    name : str
        The evaluation's name.
    created : str
        When its figures were written, ISO 8601 with time zone.
    episodes : Sequence[Episode]
        Judged: each row has its outcome.
    figures : Mapping
        Content of `evaluation.json`; empty where the run was never evaluated.
    metrics : Sequence[Mapping]
        Rows of `metrics.jsonl`.
    """

    run_id: str
    name: str
    created: str
    threshold: float
    episodes: Sequence[Episode]
    figures: Mapping[str, Any]
    configuration: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    hyper_params: Mapping[str, Any]
    environment: Mapping[str, Any]

    @property
    def scorer(self) -> str:
        """Name of the scorer that decides."""
        return str(self.figures.get("scorer", "scorer"))

    @property
    def target(self) -> str:
        """Name of the target."""
        return str(self.figures.get("target", "target"))


def scores_of(row: Mapping[str, Any], material: Material) -> dict[str, float | None]:
    """The response's score by each scorer."""
    others = {name: one.get("score") for name, one in (row.get("scores") or {}).items()}
    return {material.scorer: row.get("response_score"), **others}


def make_folder(folder: Path) -> None:
    """Make the folder that an export writes to.

    Raises
    ------
    RunDirectoryError
        When it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirectoryError(
            f"the folder {folder} was to be made, but {error.strerror or error}. Give a folder "
            "that you may write to as --output."
        ) from error


def write_text(path: Path, text: str) -> Path:
    """Write a file and give its path.

    Raises
    ------
    RunDirectoryError
        When it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8", errors="replace", newline="")
    except OSError as error:
        raise RunDirectoryError(
            f"{path} was to be written, but {error.strerror or error}. Give a folder that you may "
            "write to as --output."
        ) from error
    return path


def missing(what: str, package: str, extra: str) -> MissingDependencyError:
    """The error of an export whose package is not installed."""
    return MissingDependencyError(
        f"an export as {what} was asked for, and it needs the package {package}. Install it with: "
        f"pip install 'nip_astra[{extra}]'"
    )
