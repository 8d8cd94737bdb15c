"""The tracker interface and registry, and names and values of metrics.

`metrics.jsonl` keeps the names that trainers give; the other trackers show them `grouped`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any, TypeVar

from nip_astra.errors import NipAstraError, TrackingError, reason_of
from nip_astra.registry import Registry
from nip_astra.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

KEPT = ("time", "memory", "tokens")
"""Prefixes of metric names that are already groups."""
EVALUATIONS = ("dev", "before", "after", "random_search")
"""Prefixes of metrics on held-out prompts or data."""
_TEST = "test_"
_ROLLOUT_GROUPS = ("reward", "rewards", "message_regression")
_ROLLOUT_FIGURES = (
    *("mean_", "std_", "worst_", "share_", "residual_", "num_episodes", "num_undetermined"),
    *("num_scorer_errors", "probe_", "failure_", "episode_", "distinct_", "plants_", "target_"),
)
INTERVAL = "_interval"
"""Suffix of an interval's name, after the name of its figure."""


class Tracker:
    """Receives metrics, tables and artifacts of a run; this base class ignores them.

    A subclass registered by `register_tracker` is chosen with the setting `trackers` and overrides
    the methods that it needs.

    Parameters
    ----------
    run_directory : RunDirectory, optional
        Where the run's files go.
    settings : Mapping
        `ExperimentSettings` as a dict.
    config : Mapping
        The run's parameters.
    """

    def __init__(
        self,
        run_directory: RunDirectory | None = None,
        settings: Mapping[str, Any] = {},
        config: Mapping[str, Any] = {},
    ) -> None:
        self.run_directory = run_directory

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        """Record numbers at a step. `time/` and `memory/` differ between equal runs."""

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        """Record rows of a table at a step."""

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        """Record a folder of files."""

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Record the run's final figures."""

    def log_report(self, path: Path) -> None:
        """Record the run's report, a web page."""

    def position(self) -> dict[str, Any]:
        """Return the current position of the records, for a checkpoint."""
        return {}

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Discard records after `position`, as the run's own files did; its last step is `step`."""

    def finish(self, *, success: bool) -> None:
        """Close the records."""


class CompositeTracker(Tracker):
    """Passes everything to several trackers; the position is that of the first.

    An error of a tracker, for instance of a lost server, becomes a `TrackingError`.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        super().__init__()
        self.trackers = list(trackers)

    def _each(self, method: str, *arguments: Any, **named: Any) -> None:
        for tracker in self.trackers:
            try:
                getattr(tracker, method)(*arguments, **named)
            except NipAstraError:
                raise
            except Exception as error:
                raise TrackingError(
                    f"the {type(tracker).__name__} failed: {reason_of(error)}. Correct that, or "
                    "resume the run with --track file, which leaves out other trackers."
                ) from error

    log_metrics = partialmethod(_each, "log_metrics")
    log_table = partialmethod(_each, "log_table")
    log_artifact = partialmethod(_each, "log_artifact")
    log_summary = partialmethod(_each, "log_summary")
    log_report = partialmethod(_each, "log_report")
    rewind = partialmethod(_each, "rewind")

    def position(self) -> dict[str, Any]:
        return self.trackers[0].position()

    def finish(self, *, success: bool) -> None:
        """Close the records of each; a failure is logged, and hides no error that ends the run."""
        for tracker in self.trackers:
            try:
                tracker.finish(success=success)
            except Exception as error:
                logger.warning("the %s did not close: %s", type(tracker).__name__, error)


TRACKERS: Registry[type[Tracker]] = Registry(
    "tracker",
    package="nip_astra.tracking",
    members=("file", "mlflow", "tensorboard", "trackio", "wandb"),
    modules={
        "file": "local",
        "mlflow": "mlflow_tracker",
        "tensorboard": "local",
        "trackio": "trackio_tracker",
        "wandb": "wandb_runs",
    },
)
AnyTracker = TypeVar("AnyTracker", bound=type[Tracker])


def register_tracker(name: str) -> Callable[[AnyTracker], AnyTracker]:
    """Register a `Tracker` subclass under the name used in the setting `trackers`; a decorator."""
    return TRACKERS.register(name)  # type: ignore[return-value]  # it returns its argument


def open_tracker(
    settings: Mapping[str, Any],
    run_directory: RunDirectory,
    config: Mapping[str, Any],
    *,
    writes_files: bool = True,
) -> CompositeTracker:
    """Return the trackers named by the settings, after the one that writes the run's files.

    `config` has the run's parameters, shown beside its metrics.
    """
    names = ["file"] if writes_files else []
    names += [name for name in settings["trackers"] if name != "file"]
    names += ["wandb"] if settings["wandb"] != "disabled" else []
    classes = [TRACKERS.get(name) for name in dict.fromkeys(names)]
    opened = CompositeTracker([])
    try:
        for cls in classes:
            opened.trackers.append(cls(run_directory, settings, config))
    except BaseException:
        opened.finish(success=False)
        raise
    return opened


_RENAMED = {
    "clip_share": "clip_fraction",
    "outside_share": "ratio_outside_clip",
    "outside_fraction": "ratio_outside_clip",
    "groups/zero_variance": "grpo/zero_variance_share",
    "groups/used_share": "grpo/used_share",
}
"""Old names of metrics, in runs of earlier versions, and current ones."""


def present_name(name: str) -> str:
    """Return the current name of a metric, also of a single agent's."""
    for old, new in _RENAMED.items():
        if name == old or name.endswith(f"/{old}"):
            return name.removesuffix(old) + new
    return name


def grouped(name: str) -> str:
    """Return a metric's name with its group: `eval/`, `rollout/`, or `train/` for all others."""
    first, figure = name.partition("/")[0], name.rpartition("/")[2]
    if first in KEPT and first != name:
        return name
    if first in EVALUATIONS or figure.startswith(_TEST):
        return f"eval/{name}"
    is_rollout = first in _ROLLOUT_GROUPS or figure.startswith(_ROLLOUT_FIGURES)
    return f"{'rollout' if is_rollout else 'train'}/{name}"


def grouped_figures(values: Mapping[str, float]) -> dict[str, float]:
    """Return the finite values by their grouped names."""
    return {
        grouped(name): value
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }


def flat_figures(report: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a report, and intervals as `<name>_low` and `<name>_high`."""
    figures: dict[str, float] = {}
    for name, value in report.items():
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if name.endswith(INTERVAL) and is_pair and all(map(_is_number, value)):
            stem = f"{prefix}{name.removesuffix(INTERVAL)}"
            figures |= {f"{stem}_low": value[0], f"{stem}_high": value[1]}
        elif _is_number(value):
            figures[f"{prefix}{name}"] = value
    return figures


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain_numbers(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures as Python numbers, also those of NumPy and torch."""
    if not isinstance(figures, Mapping):
        raise TrackingError(
            f"figures must be a dict of numbers by name, got {type(figures).__name__}."
        )
    return {name: _plain(name, value) for name, value in figures.items()}


def _plain(name: str, value: Any) -> Any:
    if not isinstance(name, str):
        raise TrackingError(
            f"the name of a figure must be a text, got {name!r}, a {type(name).__name__}."
        )
    # By its own class: a float64 of NumPy is a float, too.
    if value is None or type(value) in (bool, int, float):
        return value
    try:
        number = value.item()
    except (AttributeError, RuntimeError, ValueError):
        number = None
    if not isinstance(number, bool | int | float):
        raise TrackingError(
            f"the figure {name!r} is a {type(value).__name__}. Give one number, for instance "
            "float(value.mean())."
        )
    return number
