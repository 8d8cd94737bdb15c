"""Results of a sweep: figures by arm with intervals over seeds, as rows, tables and a page.

Shape suffix: `S` seed.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from nip_astra.errors import ConfigurationError, MissingDependencyError, RunDirectoryError, counted
from nip_astra.evaluation.exports import write_parquet_file
from nip_astra.evaluation.run_results import frame_of, read_results
from nip_astra.report.charts import (
    Line,
    RunGroup,
    letter,
    line_chart,
    whisker,
)
from nip_astra.report.page import render_sections
from nip_astra.report.records import read_run
from nip_astra.report.sections import Context, Spec, curves, differences
from nip_astra.sweep.plan import (
    DEV,
    Arm,
    PlannedRun,
    RunStatus,
    SweepPlan,
    read_failures,
    read_stored_plan,
    status_of,
)
from nip_astra.sweep.search import TrialRecord, best_first, read_trials
from nip_astra.tracking.figure_names import current_figure_name
from nip_astra.tracking.run_directory import REPORT, RunDirectory, write_atomically
from nip_astra.utils.formatting import (
    NOTHING,
    decimal,
    format_value,
    interval,
    is_share,
    value_text,
)
from nip_astra.utils.intervals import PairedDifference, paired_difference
from nip_astra.utils.statistics import holm

if TYPE_CHECKING:
    import pandas as pd

TABLE, SUMMARY, PARQUET = "table.csv", "summary.csv", "table.parquet"
LEVEL = 0.95
HEADLINES = ("failure_rate", "mean_accuracy", "accuracy", "pass_at_1", "mean_reward")
"""Figures that tables show by default; the first that a sweep has is its headline."""
RARE_FAILURE = 0.1
"""Share of failing seeds that a sweep should show."""
ENOUGH_SEEDS = 29
"""Number of seeds among which a failure of one in ten is seen with a probability of 95 %."""
FEW_SEEDS = 5
"""Number of seeds below which a single value does not show whether it lies apart."""
APART = 6.0
"""Distance from the median, in standard deviations estimated by the median of all distances, from
which a value lies apart: of 5 normal values in 8 % of samples, of 10 in 2 %."""
MAX_DRAWN = 7
"""Maximum arms with curves; the style sheet has as many colours."""
MAX_COMPARED = 12
"""Maximum arms that are tested pairwise; of more, each is tested against the first."""
MAX_SHOWN = 4
"""Maximum figures with a table of arms on the page."""


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
        one seed, and if all seeds have the same value.
    counts : dict[int, str]
        Of a share, by seed: "3 of 10"; empty where they are not stored.
    """

    values: dict[int, float]
    mean: float
    low: float | None
    high: float | None
    counts: dict[int, str]

    @property
    def has_seed_apart(self) -> bool:
        """Whether a seed's value lies far from the others', as that of a failed run does."""
        values = [*self.values.values()]
        if len(values) < FEW_SEEDS:
            return False
        middle = median(values)
        distances = [abs(value - middle) for value in values]
        # The factor makes the median distance of normal values their standard deviation.
        return max(distances) > APART * 1.4826 * median(distances)

    def each(self, write: Callable[[float], str]) -> str:
        """Return the value of each seed, in order, with its counts."""
        cells = []
        for seed in sorted(self.values):
            counts = f" ({self.counts[seed]})" if self.counts[seed] else ""
            cells.append(f"{write(self.values[seed])}{counts}")
        return ", ".join(cells)


class Difference(NamedTuple):
    """The difference of two arms, paired by seed.

    Attributes
    ----------
    mean : float
        This arm's figure minus the other's, over the seeds that both have.
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


class ComparedArm(NamedTuple):
    """A figure of an arm, and its difference from the first arm."""

    arm: Arm
    before: SeedMean | None
    after: SeedMean | None
    less_first: Difference | None


@dataclass(frozen=True)
class SweepResults:
    """Figures of all ended runs.

    Attributes
    ----------
    rows : list of dict
        One per run and figure: `arm`, `trainer`, `scenario`, the varied parameters, `seed`,
        `run_id`, `when`, `name`, `value`, `low`, `high`, `counts`.
    trials : list[TrialRecord]
        Of a search, in the order of their proposal.
    """

    plan: SweepPlan
    directory: Path
    rows: list[dict[str, Any]]
    trials: list[TrialRecord] = field(default_factory=list)

    @property
    def arms(self) -> list[Arm]:
        """The arms compared; for a search, its trials without repeated values, best first."""
        if self.plan.search is None:
            return self.plan.arms
        ranked = best_first(self.trials, self.plan.search.direction)
        return list({one.arm.run_id(0): one.arm for one in ranked}.values())

    @property
    def selected_by(self) -> str | None:
        """The test figure by which a search selected, which is therefore optimistic."""
        objective = self.plan.search.objective if self.plan.search else None
        return None if objective is None or objective.startswith(DEV) else objective

    def cautions(self, names: Sequence[str]) -> list[str]:
        """Return warnings about these figures, one or two sentences each."""
        cautions = []
        if self.selected_by is not None:
            cautions.append(
                f"The search selected by {self.selected_by} on the test data, so the figures of "
                "the best trials are too good. Search by a dev figure, or measure the selected one "
                "on other data."
            )
        means = [self.over_seeds(arm, name) for name in names for arm in self.arms]
        # Student's interval covers a mean where failing seeds show. Where all are alike it is too
        # short if others fail: of 5 seeds it covers 42 % if one in ten fails, of 10 65 %.
        alike = [
            len(mean.values)
            for mean in means
            if mean is not None and len(mean.values) < ENOUGH_SEEDS and not mean.has_seed_apart
        ]
        if alike:
            num_seeds = min(alike)
            chance = (1 - RARE_FAILURE) ** num_seeds
            cautions.append(
                f"Intervals over {counted(num_seeds, 'seed')} with similar values hold for such "
                f"seeds. If one in ten fails, that stays unseen with a probability of "
                f"{chance:.0%}: run {ENOUGH_SEEDS} seeds."
            )
        return cautions

    @property
    def num_ended(self) -> int:
        """Number of ended runs."""
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
        """Return the figure that a table shows by default."""
        if not self.figure_names:
            raise ConfigurationError(
                f"no run of the sweep {self.directory} has ended. Let it run, or read its logs."
            )
        return self.headlines()[0]

    def headlines(self) -> list[str]:
        """Return the figures with a table on the page: up to four of `HEADLINES`, or the first."""
        names = self.figure_names
        return [name for name in HEADLINES if name in names][:MAX_SHOWN] or names[:1]

    def over_seeds(self, arm: Arm, name: str, when: str = "after") -> SeedMean | None:
        """Return a figure of an arm; None if no ended run has it."""
        name = current_figure_name(name)
        seeds = {arm.folder_in(self.directory, seed).name: seed for seed in self.plan.seeds}
        rows = self._rows_of.get((name, when), ())
        known = {seeds[row["run_id"]]: row for row in rows if row["run_id"] in seeds}
        if not known:
            return None
        values = {seed: row["value"] for seed, row in known.items()}
        counts = {seed: row["counts"] for seed, row in known.items()}
        mean = _student(list(values.values()))
        low, high = (0.0, 1.0) if is_share(name) else (-math.inf, math.inf)
        ends = _ends(mean, low, high)
        return SeedMean(values, mean.estimate.value, ends[0], ends[1], counts)

    def difference(self, arm: Arm, other: Arm, name: str) -> Difference | None:
        """Return a figure of an arm minus that of another; None without a common seed."""
        one, two = self.over_seeds(arm, name), self.over_seeds(other, name)
        seeds = sorted(one.values.keys() & two.values.keys()) if one and two else []
        if one is None or two is None or not seeds:
            return None
        pairs_S = [(one.values[seed], two.values[seed]) for seed in seeds]
        paired = _student([a - b for a, b in pairs_S], scale=max(map(abs, chain(*pairs_S))))
        mean, bound = paired.estimate.value, 1.0 if is_share(name) else math.inf
        low, high = _ends(paired, -bound, bound)
        p = None
        if low is not None:
            from scipy import stats

            p = float(2 * stats.t.sf(abs(mean) / paired.standard_error, len(seeds) - 1))
        return Difference(mean, low, high, p, len(seeds))

    def compared(self, name: str) -> Iterator[ComparedArm]:
        """Yield each arm's figure before and after training, and its difference to the first."""
        arms = self.arms
        for arm in arms:
            yield ComparedArm(
                arm,
                self.over_seeds(arm, name, "before"),
                self.over_seeds(arm, name),
                self.difference(arm, arms[0], name) if arm != arms[0] else None,
            )

    def summary(self, names: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Return figures after training, one row per arm and figure, with intervals over seeds.

        Each arm is compared with the first, seed by seed. P-values of a figure are adjusted by
        Holm's method over the arms (`p_holm`).

        Parameters
        ----------
        names : Sequence[str]
            Figures; none for all.
        """
        figures = [current_figure_name(name) for name in names] or self.figure_names
        return [row for name in figures for row in self._summary_of(name)]

    def _summary_of(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for arm, before, mean, beside in self.compared(name):
            if mean is None:
                continue
            rows.append(
                {
                    **_about(arm),
                    "name": name,
                    "num_seeds": len(mean.values),
                    "before": before.mean if before else None,
                    "mean": mean.mean,
                    "low": mean.low,
                    "high": mean.high,
                    "values": " ".join(f"{value:.6g}" for value in mean.values.values()),
                    "less_first": beside.mean if beside else None,
                    "less_first_low": beside.low if beside else None,
                    "less_first_high": beside.high if beside else None,
                    "p": beside.p if beside else None,
                    "p_holm": None,
                    **_selection(self.selected_by),
                }
            )
        tested = [row for row in rows if row["p"] is not None]
        for row, adjusted in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["p_holm"] = adjusted
        return rows

    def to_csv(self) -> str:
        """Return the rows as comma-separated values."""
        return as_csv(self.rows)

    def frame(self) -> pd.DataFrame:
        """Return the rows as a pandas frame."""
        return frame_of(self.rows)

    def summary_frame(self, names: Sequence[str] = ()) -> pd.DataFrame:
        """Return `summary` as a pandas frame."""
        return frame_of(self.summary(names))

    def write_parquet(self, path: str | Path) -> None:
        """Write the rows as a Parquet file."""
        write_parquet_file(self.rows, Path(path))

    def write(self) -> None:
        """Write the tables and the page into the sweep's folder."""
        if self.rows:
            write_atomically(self.directory / TABLE, self.to_csv())
            write_atomically(self.directory / SUMMARY, as_csv(self.summary()))
            # The Parquet library is optional.
            with suppress(MissingDependencyError):
                self.write_parquet(self.directory / PARQUET)
        write_atomically(self.directory / REPORT, _page(self))


def read_sweep(directory: str | Path) -> SweepResults:
    """Read the results of a sweep's runs so far.

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
        folder = run.folder_in(directory)
        if not RunDirectory(folder).has_ended:
            continue
        about = {**_about(run.arm), "seed": run.seed, "run_id": folder.name}
        rows += [{**about, **figure._asdict()} for figure in read_results(folder).figures]
    results = SweepResults(plan, directory, rows, trials)
    for row in rows:
        row |= _selection(results.selected_by)
    return results


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as comma-separated values; missing columns are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _selection(selected_by: str | None) -> dict[str, str]:
    """Return a column with the test figure by which a search selected."""
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
    return paired_difference(
        values_S, range(len(values_S)), is_bounded=False, scale=scale, level=LEVEL
    )


def _ends(
    paired: PairedDifference, lowest: float, highest: float
) -> tuple[float, float] | tuple[None, None]:
    """Return both bounds, within the possible values; None if no spread is known."""
    low, high = paired.estimate.low, paired.estimate.high
    if math.isnan(low) or math.isnan(high):
        return None, None
    return max(low, lowest), min(high, highest)


def _page(results: SweepResults) -> str:
    groups = _groups(results)
    specs = [
        Spec("arms", "Arms", lambda: _arms(results)),
        Spec("pairs", "Paired tests", lambda: _pairs(results)),
        Spec("trials", "Trials", lambda: _trials(results)),
        Spec(
            "curves", "Learning curves", lambda: curves(groups, means_only=True) if groups else None
        ),
        Spec(
            "differences", "What differs", lambda: differences(groups) if len(groups) > 1 else None
        ),
        Spec("runs", "Runs", lambda: _runs(results)),
    ]
    facts = [
        ("runs ended", str(results.num_ended)),
        ("arms", str(len(results.arms))),
        ("seeds", ", ".join(map(str, results.plan.seeds))),
    ]
    if results.selected_by is not None:
        facts.append(("selected by", f"{results.selected_by} on the test data"))
    return render_sections(f"Sweep {results.directory.absolute().name}", facts, specs)


def _arms(results: SweepResults) -> Context | None:
    if not results.rows:
        return None
    names = results.headlines()
    tables = [_table_of(results, name) for name in names]
    return {"tables": tables, "cautions": results.cautions(names)}


def _table_of(results: SweepResults, name: str) -> Context:
    rows = []
    compared = list(results.compared(name))
    means = [one.after for one in compared if one.after]
    values = [value for mean in means for value in mean.values.values()]
    # A line from 0 has no place for negative values.
    limit = max([*values, *(mean.high or mean.mean for mean in means)], default=1.0)
    limit = 0.0 if any(value < 0 for value in values) else limit
    for place, (arm, before, mean, _) in enumerate(compared):
        if mean is None:
            continue
        low = None if mean.low is None else max(mean.low, 0.0)
        rows.append(
            {
                "arm": arm.name,
                "letter": letter(place),
                "color": _color(place),
                "num_seeds": len(mean.values),
                "before": format_value(name, before.mean) if before else NOTHING,
                "after": format_value(name, mean.mean),
                "interval": interval(mean.low, mean.high, name),
                "whisker": whisker(mean.mean, low, mean.high, limit=limit, color=_color(place)),
                "seeds": mean.each(partial(format_value, name)),
            }
        )
    return {"name": name, "rows": rows}


def _pairs(results: SweepResults) -> Context | None:
    placed = list(enumerate(results.arms))
    pairs = list(combinations(placed, 2))
    if len(placed) > MAX_COMPARED:
        pairs = pairs[: len(placed) - 1]
    tables: list[Context] = [
        {"name": name, "rows": _tested(results, name, pairs)} for name in results.headlines()
    ]
    tables = [table for table in tables if table["rows"]]
    return {"tables": tables} if tables else None


def _tested(
    results: SweepResults, name: str, pairs: Sequence[tuple[tuple[int, Arm], tuple[int, Arm]]]
) -> list[dict[str, str]]:
    """Return a row per pair of arms with at least two common seeds."""
    known: list[tuple[str, Difference]] = []
    for (place, arm), (other_place, other) in pairs:
        beside = results.difference(other, arm, name)
        if beside is not None and beside.num_seeds > 1:
            known.append((f"{letter(other_place)} less {letter(place)}", beside))
    adjusted = iter(holm([beside.p for _, beside in known if beside.p is not None]))
    return [
        {
            "arms": arms,
            "difference": _signed(beside.mean),
            "interval": NOTHING
            if beside.low is None or beside.high is None
            else f"[{_signed(beside.low)}, {_signed(beside.high)}]",
            "p": NOTHING if beside.p is None else f"{beside.p:.2g}",
            "p_holm": NOTHING if beside.p is None else f"{next(adjusted):.2g}",
            "num_seeds": str(beside.num_seeds),
        }
        for arms, beside in known
    ]


def _trials(results: SweepResults) -> Context | None:
    if not results.trials or results.plan.search is None:
        return None
    is_more = results.plan.search.direction == "maximize"
    paths = list(dict.fromkeys(path for one in results.trials for path in one.arm.values))
    places = {arm.run_id(0): place for place, arm in enumerate(results.arms)}
    rows = [
        {
            "number": one.number,
            "state": one.state,
            "value": decimal(one.value),
            "trainer": one.arm.trainer,
            "values": [value_text(one.arm.values.get(path, "")) for path in paths],
        }
        for one in sorted(results.trials, key=lambda one: (places[one.arm.run_id(0)], one.number))
    ]
    values = [(float(one.number), one.value) for one in results.trials if one.state == "complete"]
    best, points = None, []
    for number, value in values:
        if value is not None:
            best = value if best is None else (max if is_more else min)(best, value)
            points.append((number, best))
    lines = [
        Line("trial", values, 2, is_thin=True),
        Line("best so far", points, 1, has_steps=True),
    ]
    chart = line_chart("Objective", lines, note="thick: best so far", x_label="trial")
    return {"paths": paths, "rows": rows, "charts": [chart] if chart else []}


def _groups(results: SweepResults) -> list[RunGroup]:
    """Return the runs of the first started arms."""
    groups: list[RunGroup] = []
    for place, arm in enumerate(results.arms[:MAX_DRAWN]):
        runs = []
        for seed in results.plan.seeds:
            # A run that has started may have written nothing yet.
            with suppress(RunDirectoryError):
                runs.append(read_run(arm.folder_in(results.directory, seed)))
        if runs:
            groups.append(RunGroup(letter(place), arm.name, _color(place), runs))
    return groups


def _runs(results: SweepResults) -> Context:
    failures = read_failures(results.directory)
    rows = []
    for arm in results.arms:
        for seed in results.plan.seeds:
            run_id = arm.run_id(seed)
            folder = arm.folder_in(results.directory, seed)
            status = status_of(folder)
            is_failed = run_id in failures and status is not RunStatus.ENDED
            rows.append(
                {
                    "run_id": folder.name,
                    "arm": arm.name,
                    "seed": seed,
                    "status": RunStatus.FAILED.value if is_failed else status.value,
                    "link": f"{folder.name}/{REPORT}" if status is RunStatus.ENDED else "",
                    "message": failures.get(run_id, "") if is_failed else "",
                }
            )
    return {"rows": rows, "num_failed": sum(row["status"] == RunStatus.FAILED for row in rows)}


def _color(place: int) -> int:
    return 1 + place % MAX_DRAWN


def _signed(value: float) -> str:
    written = decimal(value)
    return written if value < 0 else f"+{written}"
