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
        values = list(self.values.values())
        if len(values) < FEW_SEEDS:
            return False
        center = median(values)
        distances = [abs(value - center) for value in values]
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
        ranked_trials = best_first(self.trials, self.plan.search.direction)
        arm_by_id = {trial.arm.run_id(0): trial.arm for trial in ranked_trials}
        return list(arm_by_id.values())

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
        nums_of_similar_seeds = [
            len(mean.values)
            for mean in means
            if mean is not None and len(mean.values) < ENOUGH_SEEDS and not mean.has_seed_apart
        ]
        if nums_of_similar_seeds:
            num_seeds = min(nums_of_similar_seeds)
            unseen_probability = (1 - RARE_FAILURE) ** num_seeds
            cautions.append(
                f"Intervals over {counted(num_seeds, 'seed')} with similar values hold for such "
                f"seeds. If one in ten fails, that stays unseen with a probability of "
                f"{unseen_probability:.0%}: run {ENOUGH_SEEDS} seeds."
            )
        return cautions

    @property
    def num_ended(self) -> int:
        """Number of ended runs."""
        return len({row["run_id"] for row in self.rows})

    @cached_property
    def _rows_by_figure(self) -> dict[tuple[str, str], list[dict[str, Any]]]:
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
        seed_by_run = {arm.folder_in(self.directory, seed).name: seed for seed in self.plan.seeds}
        rows = self._rows_by_figure.get((name, when), ())
        row_by_seed = {
            seed_by_run[row["run_id"]]: row for row in rows if row["run_id"] in seed_by_run
        }
        if not row_by_seed:
            return None
        values = {seed: row["value"] for seed, row in row_by_seed.items()}
        counts = {seed: row["counts"] for seed, row in row_by_seed.items()}
        student = _student(list(values.values()))
        lowest, highest = (0.0, 1.0) if is_share(name) else (-math.inf, math.inf)
        low, high = _ends(student, lowest, highest)
        return SeedMean(values, student.estimate.value, low, high, counts)

    def difference(self, arm: Arm, other: Arm, name: str) -> Difference | None:
        """Return a figure of an arm minus that of another; None without a common seed."""
        figure, other_figure = self.over_seeds(arm, name), self.over_seeds(other, name)
        if figure is None or other_figure is None:
            return None
        seeds = sorted(figure.values.keys() & other_figure.values.keys())
        if not seeds:
            return None
        pairs_S = [(figure.values[seed], other_figure.values[seed]) for seed in seeds]
        differences_S = [value - other_value for value, other_value in pairs_S]
        # Differences below the rounding of the largest value are none.
        scale = max(abs(value) for value in chain(*pairs_S))
        paired = _student(differences_S, scale=scale)
        mean = paired.estimate.value
        bound = 1.0 if is_share(name) else math.inf
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
        return [row for name in figures for row in self._summarize(name)]

    def _summarize(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for arm, before, mean, beside in self.compared(name):
            if mean is None:
                continue
            rows.append(
                {
                    **_describe_arm(arm),
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
                    **_selection_column(self.selected_by),
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
    runs = plan.runs
    if trials:
        arm_by_id = {trial.arm.run_id(0): trial.arm for trial in trials}
        runs = [PlannedRun(arm, seed) for arm in arm_by_id.values() for seed in plan.seeds]
    rows = []
    for run in runs:
        folder = run.folder_in(directory)
        if not RunDirectory(folder).has_ended:
            continue
        run_columns = {**_describe_arm(run.arm), "seed": run.seed, "run_id": folder.name}
        rows += [{**run_columns, **figure._asdict()} for figure in read_results(folder).figures]
    results = SweepResults(plan, directory, rows, trials)
    for row in rows:
        row |= _selection_column(results.selected_by)
    return results


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as comma-separated values; missing columns are empty."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _selection_column(selected_by: str | None) -> dict[str, str]:
    """Return a column with the test figure by which a search selected."""
    return {} if selected_by is None else {"selected_by": selected_by}


def _describe_arm(arm: Arm) -> dict[str, Any]:
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
    groups = _read_groups(results)
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
    tables = [_build_table(results, name) for name in names]
    return {"tables": tables, "cautions": results.cautions(names)}


def _build_table(results: SweepResults, name: str) -> Context:
    rows = []
    compared_arms = list(results.compared(name))
    means = [compared.after for compared in compared_arms if compared.after]
    values = [value for mean in means for value in mean.values.values()]
    upper_ends = [mean.high or mean.mean for mean in means]
    # A line from 0 has no room for negative values.
    has_negative = any(value < 0 for value in values)
    limit = 0.0 if has_negative else max([*values, *upper_ends], default=1.0)
    for index, (arm, before, mean, _) in enumerate(compared_arms):
        if mean is None:
            continue
        low = None if mean.low is None else max(mean.low, 0.0)
        color = _color(index)
        rows.append(
            {
                "arm": arm.name,
                "letter": letter(index),
                "color": color,
                "num_seeds": len(mean.values),
                "before": format_value(name, before.mean) if before else NOTHING,
                "after": format_value(name, mean.mean),
                "interval": interval(mean.low, mean.high, name),
                "whisker": whisker(mean.mean, low, mean.high, limit=limit, color=color),
                "seeds": mean.each(partial(format_value, name)),
            }
        )
    return {"name": name, "rows": rows}


def _pairs(results: SweepResults) -> Context | None:
    numbered_arms = list(enumerate(results.arms))
    # The first arm's pairs come first.
    pairs = list(combinations(numbered_arms, 2))
    if len(numbered_arms) > MAX_COMPARED:
        pairs = pairs[: len(numbered_arms) - 1]
    tables: list[Context] = []
    for name in results.headlines():
        rows = _test_pairs(results, name, pairs)
        if rows:
            tables.append({"name": name, "rows": rows})
    return {"tables": tables} if tables else None


def _test_pairs(
    results: SweepResults, name: str, pairs: Sequence[tuple[tuple[int, Arm], tuple[int, Arm]]]
) -> list[dict[str, str]]:
    """Return a row per pair of arms with at least two common seeds."""
    differences_by_pair: list[tuple[str, Difference]] = []
    for (index, arm), (other_index, other) in pairs:
        difference = results.difference(other, arm, name)
        if difference is not None and difference.num_seeds > 1:
            label = f"{letter(other_index)} less {letter(index)}"
            differences_by_pair.append((label, difference))
    p_values = [difference.p for _, difference in differences_by_pair if difference.p is not None]
    adjusted_p_values = iter(holm(p_values))
    rows = []
    for label, difference in differences_by_pair:
        ends = p = p_holm = NOTHING
        if difference.low is not None and difference.high is not None:
            ends = f"[{_signed(difference.low)}, {_signed(difference.high)}]"
        if difference.p is not None:
            p = f"{difference.p:.2g}"
            p_holm = f"{next(adjusted_p_values):.2g}"
        rows.append(
            {
                "arms": label,
                "difference": _signed(difference.mean),
                "interval": ends,
                "p": p,
                "p_holm": p_holm,
                "num_seeds": str(difference.num_seeds),
            }
        )
    return rows


def _trials(results: SweepResults) -> Context | None:
    if not results.trials or results.plan.search is None:
        return None
    paths = list(dict.fromkeys(path for trial in results.trials for path in trial.arm.values))
    rank_by_arm = {arm.run_id(0): rank for rank, arm in enumerate(results.arms)}
    ranked_trials = sorted(
        results.trials, key=lambda trial: (rank_by_arm[trial.arm.run_id(0)], trial.number)
    )
    rows = [
        {
            "number": trial.number,
            "state": trial.state,
            "value": decimal(trial.value),
            "trainer": trial.arm.trainer,
            "values": [value_text(trial.arm.values.get(path, "")) for path in paths],
        }
        for trial in ranked_trials
    ]
    objectives = [
        (float(trial.number), trial.value) for trial in results.trials if trial.state == "complete"
    ]
    choose_best = max if results.plan.search.direction == "maximize" else min
    best_so_far: list[tuple[float, float]] = []
    for number, value in objectives:
        if value is not None:
            best = choose_best(value, best_so_far[-1][1]) if best_so_far else value
            best_so_far.append((number, best))
    lines = [
        Line("trial", objectives, 2, is_thin=True),
        Line("best so far", best_so_far, 1, has_steps=True),
    ]
    chart = line_chart("Objective", lines, note="thick: best so far", x_label="trial")
    return {"paths": paths, "rows": rows, "charts": [chart] if chart else []}


def _read_groups(results: SweepResults) -> list[RunGroup]:
    """Return the runs of the first started arms."""
    groups: list[RunGroup] = []
    for index, arm in enumerate(results.arms[:MAX_DRAWN]):
        runs = []
        for seed in results.plan.seeds:
            # A run that has started may have written nothing yet.
            with suppress(RunDirectoryError):
                runs.append(read_run(arm.folder_in(results.directory, seed)))
        if runs:
            groups.append(RunGroup(letter(index), arm.name, _color(index), runs))
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


def _color(index: int) -> int:
    """Return the number of an arm's colour in the style sheet."""
    return 1 + index % MAX_DRAWN


def _signed(value: float) -> str:
    written = decimal(value)
    return written if value < 0 else f"+{written}"
