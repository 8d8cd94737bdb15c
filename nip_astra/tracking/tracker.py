"""The tracker interface and registry, and names and values of metrics.

`metrics.jsonl` keeps the names that trainers give; the other trackers show them `grouped`.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextvars import copy_context
from functools import partial, partialmethod
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nip_astra.deadlines import DaemonThread, waiting_on
from nip_astra.errors import NipAstraError, TrackingError, reason_of
from nip_astra.registry import Registry
from nip_astra.tracking.figure_names import with_current_names
from nip_astra.tracking.run_directory import RunDirectory

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
MAX_SECONDS_TO_STOP = 60.0
"""Time for the waiting records of a run that is stopped or has failed."""
MAX_WAITING = 10_000
"""Records that may wait for a tracker."""
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

    def stored_entries(self) -> set[tuple[int, str]] | None:
        """Return what is recorded already, as steps with the `grouped` names of their metrics.

        A table has the name `rollouts/<name>`. What a resumed run records again is then left out,
        and what a killed process did not send is sent. None, the default, does neither.
        """
        return None

    def finish(self, *, success: bool) -> None:
        """Close the records."""


class MirrorTracker(Tracker):
    """Passes the records of a run to a tracker in a thread, so that it never holds the run.

    Each step is recorded once, also after a kill: see `Tracker.stored_entries`. Records beyond
    `MAX_WAITING` are left out, with a warning at the end.

    Parameters
    ----------
    tracker : Tracker
        Only its constructor runs in another thread.
    seconds_to_finish : float
        Time for the records that wait at the end.
    """

    def __init__(
        self, tracker: Tracker, run_directory: RunDirectory, *, name: str, seconds_to_finish: float
    ) -> None:
        super().__init__(run_directory)
        self.tracker, self.name, self.seconds_to_finish = tracker, name, seconds_to_finish
        self._thread = DaemonThread(f"tracker {name}")
        # Some trackers keep their current run in the context of the thread that began it.
        self._context = copy_context()
        self._num_waiting = self._num_left_out = 0
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._stored: set[tuple[int, str]] = set()
        self._step = 0

    def _send(self, call: Callable[[], object]) -> None:
        """Append a call; raise the error of an earlier one."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._num_waiting >= MAX_WAITING:
                self._num_left_out += 1
                return
            self._num_waiting += 1
        self._thread.submit(partial(self._work, call))

    def _work(self, call: Callable[[], object]) -> None:
        try:
            with waiting_on(f"the tracker {self.name}"):
                self._context.run(call)
        except Exception as error:
            self._error = self._error or error
        finally:
            with self._lock:
                self._num_waiting -= 1

    def log_metrics(self, values: Mapping[str, float], *, step: int) -> None:
        self._step = step
        self._send(partial(self._log_metrics, dict(values), step))

    def _log_metrics(self, values: Mapping[str, float], step: int) -> None:
        new = {name: v for name, v in values.items() if (step, grouped(name)) not in self._stored}
        if new:
            self.tracker.log_metrics(new, step=step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int
    ) -> None:
        self._send(partial(self._log_table, name, list(columns), list(rows), step))

    def _log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        if (step, f"rollouts/{name}") not in self._stored:
            self.tracker.log_table(name, columns, rows, step=step)

    def log_artifact(
        self,
        path: Path,
        *,
        name: str,
        type: str,  # noqa: A002 - the word of W&B
        aliases: Sequence[str] = (),
    ) -> None:
        self._send(
            partial(self.tracker.log_artifact, path, name=name, type=type, aliases=list(aliases))
        )

    def log_summary(self, values: Mapping[str, float]) -> None:
        self._send(partial(self._log_summary, dict(values), self._step))

    def _log_summary(self, values: Mapping[str, float], step: int) -> None:
        new = {name: v for name, v in values.items() if (step, grouped(name)) not in self._stored}
        self.tracker.log_summary(new)

    def log_report(self, path: Path) -> None:
        self._send(partial(self.tracker.log_report, path))

    def rewind(self, position: Mapping[str, Any]) -> None:
        """Continue after the records in the run's files, which were cut back to `position`."""
        assert self.run_directory is not None
        self._step = position.get("step", 0)
        # Read at once: the run appends to the files while the thread works.
        records = list(read_records(self.run_directory))
        self._send(partial(self._catch_up, position, records))

    def _catch_up(self, position: Mapping[str, Any], records: Sequence[Record]) -> None:
        self.tracker.rewind(position)
        stored = self.tracker.stored_entries()
        if stored is None:
            return
        self._stored = stored
        for record in records:
            if record.table is None:
                self._log_metrics(record.values, record.step)
            else:
                self._log_table(record.table, record.columns, record.rows, record.step)

    def finish(self, *, success: bool) -> None:
        """Wait for the records that are not sent yet, but not for a tracker that takes too long."""
        finish = partial(self.tracker.finish, success=success)
        finished = self._thread.submit(partial(self._context.run, finish))
        limit = self.seconds_to_finish
        if not success:
            limit = min(limit, MAX_SECONDS_TO_STOP)
        done, _ = wait([finished], timeout=limit)
        if not done or self._num_left_out:
            logger.warning(
                "the tracker %s lacks at least %d records of this run, because it took too long; "
                "the run directory has all",
                self.name,
                self._num_waiting + self._num_left_out,
                extra={"is_repeated_at_end": True},
            )
        if self._error is not None:
            raise self._error
        if done:
            finished.result()


class Record(NamedTuple):
    """Metrics of a step, or rows of a table, as the run's own files keep them."""

    step: int
    values: Mapping[str, float]
    table: str | None = None
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()


def read_records(directory: RunDirectory) -> Iterator[Record]:
    """Yield the records in a run's own files, in the order of their steps."""
    by_step: dict[int, dict[str, float]] = {}
    for name in (METRICS_FILE, TIMINGS_FILE):
        for line in _lines(directory.path / name):
            step = line.pop("step")
            # NaN and infinities are null.
            values = {key: value for key, value in line.items() if value is not None}
            by_step.setdefault(step, {}).update(values)
    for step in sorted(by_step):
        yield Record(step, by_step[step])
    for path in sorted((directory.path / "rollouts").glob("*.jsonl")):
        for step, lines in groupby(_lines(path), key=lambda line: line.get("step", 0)):
            rows = [{key: line[key] for key in line if key != "step"} for line in lines]
            columns = list(rows[0])
            cells = [[row.get(column) for column in columns] for row in rows]
            yield Record(step, {}, path.stem, columns, cells)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                yield with_current_names(json.loads(text))


class CompositeTracker(Tracker):
    """Passes everything to several trackers; the position is that of the first.

    An error of a tracker, for instance of a lost server, becomes a `TrackingError`.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        super().__init__()
        self.trackers = list(trackers)

    def _each(self, method: str, *arguments: Any, **keywords: Any) -> None:
        for tracker in self.trackers:
            try:
                getattr(tracker, method)(*arguments, **keywords)
            except NipAstraError:
                raise
            except Exception as error:
                name = type(getattr(tracker, "tracker", tracker)).__name__
                raise TrackingError(
                    f"the {name} failed: {reason_of(error)}. Correct that, or "
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
                name = type(getattr(tracker, "tracker", tracker)).__name__
                logger.warning("the %s did not close: %s", name, error)


TRACKERS: Registry[type[Tracker]] = Registry("tracker")
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
    classes = {name: TRACKERS.get(name) for name in names}
    opened = CompositeTracker([])
    try:
        for name, cls in classes.items():
            tracker = cls(run_directory, settings, config)
            if name != "file":
                tracker = MirrorTracker(
                    tracker,
                    run_directory,
                    name=name,
                    seconds_to_finish=settings["call_deadline"],
                )
            opened.trackers.append(tracker)
    except BaseException:
        opened.finish(success=False)
        raise
    return opened


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
