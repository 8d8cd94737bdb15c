"""What the runs of a sweep say together: figures by arm, with intervals over seeds.

Shape suffix: `S` seed.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nip_astra.errors import ConfigurationError, MissingDependencyError, RunDirectoryError
from nip_astra.evaluation.run_results import import_pandas, read_results
from nip_astra.sweep.plan import DEV, Arm, PlannedRun, SweepPlan
from nip_astra.sweep.runner import PLAN_FILE
from nip_astra.sweep.search import TrialRecord, best_first, read_trials
from nip_astra.tracking.run_directory import RunDirectory
from nip_astra.utils.formatting import is_share
from nip_astra.utils.intervals import PairedDifference, paired_difference
from nip_astra.utils.statistics import holm

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
HEADLINES = ("failure_rate", "mean_accuracy", "accuracy", "pass_at_1", "mean_reward")
"""Figures that a table shows unless it is told which; the first of them that there is."""


FEW_SEEDS = 5
"""With fewer, the interval of a mean covers it far less often than it says where some seeds do not
learn."""


class SeedMean(NamedTuple):
    """A figure of an arm over its seeds.

    Attributes
    ----------
    values : dict[int, float]
        By seed.
    mean : float
        Over the seeds that have ended.
    low, high : float or None
        Ends of Student's interval of the mean, within the values that the figure can have; None for
        one seed, and where all seeds gave the same, of which no spread can be told.
    """

    values: dict[int, float]
    mean: float
    low: float | None
    high: float | None


class Difference(NamedTuple):
    """An arm beside another, seed by seed.

    Attributes
    ----------
    mean : float
        This arm's figure less the other's, over the seeds that both have.
    low, high : float or None
        As in `SeedMean`.
    p : float or None
        Of the paired t-test that there is no difference.
    num_seeds : int
        Seeds that both have.
    """

    mean: float
    low: float | None
    high: float | None
    p: float | None
    num_seeds: int


@dataclass(frozen=True)
class SweepResults:
    """Figures of all runs that have ended.

    Attributes
    ----------
    rows : list of dict
        One a run and figure: `arm`, `trainer`, `scenario`, the varied parameters, `seed`, `run_id`,
        `when`, `name`, `value`, `low`, `high`.
    trials : list[TrialRecord]
        Of a search, in the order in which they were proposed.
    """

    plan: SweepPlan
    directory: Path
    rows: list[dict[str, Any]]
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def arms(self) -> list[Arm]:
        """What is compared; of a search, its trials without those of equal values, best first."""
        if self.plan.search is None:
            return self.plan.arms
        ranked = best_first(self.trials, self.plan.search.direction)
        return list({one.arm.run_id(0): one.arm for one in ranked}.values())

    @property
    def selected_by(self) -> str | None:
        """The figure after training by which a search chose; None where it chose by none.

        What is best by it was chosen on the data that it is measured on, so that its figure is too
        good.
        """
        objective = self.plan.search.objective if self.plan.search else None
        return None if objective is None or objective.startswith(DEV) else objective

    def cautions(self, names: Sequence[str]) -> list[str]:
        """What a reader of these figures must know, one sentence each."""
        found = []
        if self.selected_by is not None:
            found.append(
                f"The search selected by {self.selected_by} on the test data, so the figures of "
                "the best trials are too good. Search by a dev figure, or measure the selected one "
                "on other data."
            )
        means = [self.over_seeds(arm, name) for name in names for arm in self.arms]
        num_seeds = min((len(one.values) for one in means if one is not None), default=FEW_SEEDS)
        if num_seeds < FEW_SEEDS:
            found.append(
                f"Intervals over {num_seeds} {'seeds' if num_seeds > 1 else 'seed'} are unreliable "
                f"where some seeds do not learn. Compare the seeds' values, or run at least "
                f"{FEW_SEEDS} seeds."
            )
        return found

    @property
    def num_ended(self) -> int:
        """Runs that have ended."""
        return len({row["run_id"] for row in self.rows})

    @cached_property
    def _rows_of(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
        """Rows by figure and time, since there may be thousands."""
        grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self.rows:
            grouped.setdefault((row["name"], row["when"]), []).append(row)
        return grouped

    @property
    def figure_names(self) -> list[str]:
        """Names of figures after training."""
        return sorted({row["name"] for row in self.rows if row["when"] == "after"})

    def headline(self) -> str:
        """The figure that a table shows unless it is told which.

        Raises
        ------
        ConfigurationError
            When no run has ended.
        """
        names = self.figure_names
        if not names:
            raise ConfigurationError(
                f"the figures of the sweep {self.directory} were asked for, but none of its runs "
                "has ended. Let it run, or look into its logs."
            )
        return next((name for name in HEADLINES if name in names), names[0])

    def over_seeds(self, arm: Arm, name: str, when: str = "after") -> SeedMean | None:
        """A figure of an arm; None where no run of it has ended that has the figure."""
        seeds = {arm.run_id(seed): seed for seed in self.plan.seeds}
        values = {
            seeds[row["run_id"]]: row["value"]
            for row in self._rows_of.get((name, when), ())
            if row["run_id"] in seeds
        }
        if not values:
            return None
        found = _student(list(values.values()))
        low, high = (0.0, 1.0) if is_share(name) else (-math.inf, math.inf)
        return SeedMean(values, found.estimate.value, *_ends(found, low, high))

    def difference(self, arm: Arm, other: Arm, name: str) -> Difference | None:
        """How much more an arm has of a figure than another; None without a common seed."""
        one, two = self.over_seeds(arm, name), self.over_seeds(other, name)
        seeds = sorted(one.values.keys() & two.values.keys()) if one and two else []
        if one is None or two is None or not seeds:
            return None
        pairs_S = [(one.values[seed], two.values[seed]) for seed in seeds]
        found = _student([a - b for a, b in pairs_S], scale=max(map(abs, chain(*pairs_S))))
        mean, bound = found.estimate.value, 1.0 if is_share(name) else math.inf
        low, high = _ends(found, -bound, bound)
        p = None
        if low is not None:
            from scipy import stats

            p = float(2 * stats.t.sf(abs(mean) / found.standard_error, len(seeds) - 1))
        return Difference(mean, low, high, p, len(seeds))

    def summary(self, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Figures after training, one row an arm and figure, with intervals over seeds.

        Each arm stands beside the first, seed by seed. P-values of a figure are adjusted by Holm's
        method over the arms (`p_holm`).

        Parameters
        ----------
        names : Sequence[str]
            Figures; none for all.
        """
        rows: list[dict[str, Any]] = []
        for name in names or self.figure_names:
            rows += self._summary_of(name)
        return rows

    def _summary_of(self, name: str) -> list[dict[str, Any]]:
        arms = self.arms
        rows: list[dict[str, Any]] = []
        for arm in arms:
            mean = self.over_seeds(arm, name)
            if mean is None:
                continue
            before = self.over_seeds(arm, name, "before")
            beside = self.difference(arm, arms[0], name) if arm != arms[0] else None
            rows.append(
                {**_about(arm), "name": name, "num_seeds": len(mean.values)}
                | {"before": before.mean if before else None}
                | {"mean": mean.mean, "low": mean.low, "high": mean.high}
                | {"values": " ".join(f"{one:.6g}" for one in mean.values.values())}
                | {"less_first": beside.mean if beside else None}
                | {"less_first_low": beside.low if beside else None}
                | {"less_first_high": beside.high if beside else None}
                | {"p": beside.p if beside else None, "p_holm": None}
                | _selection(self.selected_by)
            )
        tested = [row for row in rows if row["p"] is not None]
        for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p_holm"] = adjusted
        return rows

    def to_csv(self) -> str:
        """The rows as comma-separated values."""
        return as_csv(self.rows)

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas frame.

        Raises
        ------
        MissingDependencyError
            When pandas is not installed.
        """
        frame: pd.DataFrame = import_pandas().DataFrame(self.rows)
        return frame

    def summary_frame(self, names: Sequence[str] = ()) -> pd.DataFrame:
        """`summary` as a pandas frame.

        Raises
        ------
        MissingDependencyError
            When pandas is not installed.
        """
        frame: pd.DataFrame = import_pandas().DataFrame(self.summary(names))
        return frame

    def write_parquet(self, path: str | Path) -> None:
        """Write the rows as a Parquet file.

        Raises
        ------
        MissingDependencyError
            When PyArrow is not installed.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingDependencyError(
                f"a Parquet file was asked for, but the package pyarrow cannot be imported: "
                f"{error}. Install it with: pip install 'nip_astra[sweep]'"
            ) from error
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        columns = {name: [row.get(name) for row in self.rows] for name in names}
        parquet.write_table(pyarrow.table(columns), Path(path))


def read_sweep(directory: str | Path) -> SweepResults:
    """What the runs of a sweep have found so far.

    Raises
    ------
    RunDirectoryError
        When the folder holds no sweep.
    """
    directory = Path(directory)
    plan = read_stored_plan(directory)
    trials = read_trials(directory, plan) if plan.search else []
    arms = {one.arm.run_id(0): one.arm for one in trials}.values()
    runs = [PlannedRun(arm, seed) for arm in arms for seed in plan.seeds] if trials else plan.runs
    rows = []
    for run in runs:
        folder = directory / run.run_id
        if not RunDirectory(folder).has_ended:
            continue
        about = {**_about(run.arm), "seed": run.seed, "run_id": run.run_id}
        rows += [{**about, **figure._asdict()} for figure in read_results(folder).figures]
    found = SweepResults(plan, directory, rows, trials)
    for row in rows:
        row |= _selection(found.selected_by)
    return found


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as comma-separated values; what a row has not is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_stored_plan(directory: Path) -> SweepPlan:
    """The plan of a sweep's folder.

    Raises
    ------
    RunDirectoryError
        When the folder holds none.
    """
    try:
        stored = json.loads((directory / PLAN_FILE).read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError(f"it holds {type(stored).__name__} and no object")
        return SweepPlan.from_dict(stored)
    except (OSError, ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"the sweep {directory} was to be read, but its {PLAN_FILE} is missing or broken: "
            f"{error}. Give the folder of a sweep."
        ) from error


def _selection(selected_by: str | None) -> dict[str, str]:
    """The column that says by which test figure a search selected."""
    return {} if selected_by is None else {"selected_by": selected_by}


def _about(arm: Arm) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "trainer": arm.trainer,
        "scenario": arm.scenario,
        **arm.fixed,
        **arm.values,
    }


def _student(values_S: Sequence[float], *, scale: float = 0.0) -> PairedDifference:
    """Student's interval of a mean over seeds."""
    return paired_difference(
        values_S, range(len(values_S)), is_bounded=False, scale=scale, level=LEVEL
    )


def _ends(
    found: PairedDifference, lowest: float, highest: float
) -> tuple[float, float] | tuple[None, None]:
    """Both ends within the values that are possible; None where no spread is known."""
    low, high = found.estimate.low, found.estimate.high
    if math.isnan(low) or math.isnan(high):
        return None, None
    return max(low, lowest), min(high, highest)
