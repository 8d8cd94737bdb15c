"""What the runs of a sweep say together: figures by arm, with intervals over seeds.

Shape suffix: `S` seed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy import stats

from nip_astra.errors import ConfigurationError, RunDirectoryError
from nip_astra.evaluation.run_results import import_pandas, read_results
from nip_astra.sweep.plan import Arm, SweepPlan
from nip_astra.sweep.runner import PLAN_FILE
from nip_astra.tracking.run_directory import RESULTS

if TYPE_CHECKING:
    import pandas as pd

LEVEL = 0.95
HEADLINES = ("failure_rate", "mean_accuracy", "accuracy", "pass@1", "mean_reward")
"""Figures that a table shows unless it is told which; the first of them that there is."""


class SeedMean(NamedTuple):
    """A figure of an arm over its seeds.

    Attributes
    ----------
    values : dict[int, float]
        By seed.
    mean : float
        Over the seeds that have ended.
    low, high : float or None
        Ends of Student's interval of the mean; None for one seed, and where all seeds gave the
        same, of which no spread can be told.
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
    """

    plan: SweepPlan
    directory: Path
    rows: list[dict[str, Any]]

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
        values = {
            row["seed"]: row["value"]
            for row in self.rows
            if row["arm"] == arm.name and row["name"] == name and row["when"] == when
        }
        if not values:
            return None
        return SeedMean(values, *_mean_with_interval(np.array(list(values.values()))))

    def difference(self, arm: Arm, other: Arm, name: str) -> Difference | None:
        """How much more an arm has of a figure than another; None without a common seed."""
        one, two = self.over_seeds(arm, name), self.over_seeds(other, name)
        seeds = sorted(one.values.keys() & two.values.keys()) if one and two else []
        if one is None or two is None or not seeds:
            return None
        differences_S = np.array([one.values[seed] - two.values[seed] for seed in seeds])
        mean, low, high = _mean_with_interval(differences_S)
        p = None if low is None else float(stats.ttest_1samp(differences_S, 0.0).pvalue)
        return Difference(mean, low, high, p, len(seeds))

    def to_csv(self) -> str:
        """The rows as comma-separated values."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, names)
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()

    def frame(self) -> pd.DataFrame:
        """The rows as a pandas frame.

        Raises
        ------
        MissingDependencyError
            When pandas is not installed.
        """
        frame: pd.DataFrame = import_pandas().DataFrame(self.rows)
        return frame


def read_sweep(directory: str | Path) -> SweepResults:
    """What the runs of a sweep have found so far.

    Raises
    ------
    RunDirectoryError
        When the folder holds no sweep.
    """
    directory = Path(directory)
    plan = read_stored_plan(directory)
    rows = []
    for run in plan.runs:
        folder = directory / run.run_id
        if not (folder / RESULTS).is_file():
            continue
        about: Mapping[str, Any] = {
            "arm": run.arm.name,
            "trainer": run.arm.trainer,
            "scenario": run.arm.scenario,
            **run.arm.values,
            "seed": run.seed,
            "run_id": run.run_id,
        }
        rows += [{**about, **figure._asdict()} for figure in read_results(folder).figures]
    return SweepResults(plan, directory, rows)


def read_stored_plan(directory: Path) -> SweepPlan:
    """The plan of a sweep's folder.

    Raises
    ------
    RunDirectoryError
        When the folder holds none.
    """
    try:
        return SweepPlan.from_dict(json.loads((directory / PLAN_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"the sweep {directory} was to be read, but its {PLAN_FILE} is missing or broken: "
            f"{error}. Give the folder of a sweep."
        ) from error


def _mean_with_interval(
    values_S: Sequence[float] | Any,
) -> tuple[float, float | None, float | None]:
    mean, count = float(np.mean(values_S)), len(values_S)
    error = float(stats.sem(values_S)) if count > 1 else 0.0
    if error == 0.0:
        return mean, None, None
    low, high = stats.t.interval(LEVEL, count - 1, loc=mean, scale=error)
    return mean, float(low), float(high)
