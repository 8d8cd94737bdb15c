"""Coverage of the confidence intervals of rates and of paired differences.

    python benchmarks/interval_coverage.py --out interval_coverage.json

Simulates evaluations over a grid of numbers of prompts, episodes per prompt, rates, and
correlations between a prompt's episodes. Each prompt has its own rate, drawn from a Beta
distribution or from two values of which one is 0 ("two kinds"), with the mean and correlation of
the grid. In a pair, the two rates of a prompt share half of their variation. The package's
intervals are compared with the percentile bootstrap over prompts, which uses the rule of three if
all prompts are equal. A table row has the minimum and maximum coverage over rates and correlations,
and the maximum frequency of truths below and above the interval. The JSON file has every point.

Then simulates conversations of 10 turns with missing verdicts, at random or depending on whether
the target failed (`--only missing` for this part alone). Methods: the survival estimate; bounds
over all possible values of the missing verdicts; and "uncensored", the share of failed
conversations where a failure counts even after a missing verdict, and conversations without a
failure are dropped if a verdict is missing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import build_parser, markdown_table, report_figures
from scipy.special import betaincinv, ndtr

from nip_astra.evaluation.outcomes import Outcome, failure_rate
from nip_astra.utils.intervals import Estimate, paired_difference, rate_estimate

Floats = npt.NDArray[np.float64]
Shape = tuple[int, int, int]
"""Evaluations, prompts, episodes per prompt."""
Place = tuple[tuple[float, ...], float, str]
"""Rates, correlation and distribution of the prompts' rates."""

DESIGNS = (
    (5, 1), (5, 8), (10, 1), (10, 4), (20, 1), (20, 8), (50, 1), (50, 16), (100, 1), (100, 4),
    (300, 1), (300, 4),
)  # fmt: skip
"""Prompts, episodes per prompt."""
RATES = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5)
PAIRS = (
    (0.005, 0.005), (0.02, 0.02), (0.005, 0.1), (0.02, 0.1), (0.1, 0.1), (0.1, 0.5), (0.5, 0.5),
    (0.1, 0.9), (0.02, 0.98), (0.005, 0.5),
)  # fmt: skip
CORRELATIONS = (0.0, 0.1, 0.3, 0.6)
"""Between the episodes of a prompt; irrelevant to a single rate with one episode per prompt."""
SHARED = 0.5
"""Correlation between the latent variables of a prompt's two rates."""
NUM_RESAMPLES = 400
RATE, RATES_APART, SCORES = "rate", "difference of rates", "difference of scores"
METHODS = ("ours", "bootstrap")

NUM_TURNS = 10
MISSING_DESIGNS = ((30, 1), (100, 1), (240, 1), (50, 4))
"""Prompts and conversations per prompt, for missing verdicts."""
MISSING_RATES = (0.02, 0.183, 0.5)
MISSING = {
    "4.9 % at random": (0.049, 0.049),
    "30 % at random": (0.3, 0.3),
    "40 % of failures, 2 % of passes": (0.4, 0.02),
    "no failure, 10 % of passes": (0.0, 0.1),
}
"""Probabilities that a verdict is missing, on turns with and without a failure."""
SURVIVAL, BOUNDS, UNCENSORED = "survival", "bounds", "uncensored"


@dataclass(frozen=True)
class Point:
    """One point of the grid and its figures.

    Attributes
    ----------
    coverage, below, above : float
        Frequencies of truths inside, below and above the interval.
    width : float
        Mean width of the interval.
    mean : float or None
        Mean of the estimates; only for missing verdicts.
    """

    what: str
    method: str
    num_prompts: int
    num_episodes: int
    rates: tuple[float, ...]
    correlation: float
    kind: str
    coverage: float
    below: float
    above: float
    width: float
    mean: float | None = None


def rates_of_prompts(uniform: Floats, rate: float, correlation: float, kind: str) -> Floats:
    """Transform uniform numbers to prompt rates with a given mean and episode correlation."""
    if correlation == 0.0:
        return np.full_like(uniform, rate)
    if kind == "two kinds":
        # Rate `high` for a share of prompts, 0 for the rest.
        high = rate + correlation * (1.0 - rate)
        return np.where(uniform > 1.0 - rate / high, high, 0.0)
    spread = (1.0 - correlation) / correlation
    grid = np.linspace(0.0, 1.0, 4001)
    rates: Floats = np.interp(uniform, grid, betaincinv(rate * spread, (1.0 - rate) * spread, grid))
    return rates


def outcomes(
    rng: np.random.Generator,
    shape: Shape,
    rate: float,
    correlation: float,
    kind: str,
) -> Floats:
    """Draw binary outcomes [evaluations, prompts, episodes]."""
    rates = rates_of_prompts(rng.random(shape[:2]), rate, correlation, kind)
    return (rng.random(shape) < rates[..., None]).astype(np.float64)


def differences(
    rng: np.random.Generator,
    shape: Shape,
    pair: tuple[float, ...],
    correlation: float,
    noise: float = 0.0,
) -> Floats:
    """Draw paired differences of outcomes: second minus first of the same prompts.

    With noise they are differences of scores, within `noise` of 0 or 1 and mostly near.
    """
    shared, *own = rng.standard_normal((3, *shape[:2]))
    drawn = []
    for rate, latent in zip(pair, own, strict=True):
        uniform = ndtr(SHARED**0.5 * shared + (1.0 - SHARED) ** 0.5 * latent)
        rates = rates_of_prompts(uniform, rate, correlation, "Beta")
        is_failure = rng.random(shape) < rates[..., None]
        drawn.append(np.abs(is_failure - noise * rng.beta(1.0, 20.0, shape)))
    return np.asarray(drawn[1] - drawn[0])


def bootstrap_bounds(evaluations: Floats, rng: np.random.Generator, largest: float) -> Floats:
    """Percentile bootstrap over prompts; rule of three if all means are 0 or all are `largest`."""
    means = evaluations.mean(axis=2)
    num_prompts = means.shape[1]
    weights = rng.multinomial(num_prompts, [1.0 / num_prompts] * num_prompts, NUM_RESAMPLES)
    bounds = np.quantile(means @ weights.T / num_prompts, [0.025, 0.975], axis=1).T
    three = 3.0 / num_prompts
    bounds[(means == 0.0).all(axis=1)] = [-three if largest > 1.0 else 0.0, three]
    bounds[(means == largest).all(axis=1)] = [1.0 - three, 1.0]
    return np.asarray(bounds)


def own_bounds(evaluations: Floats, interval: Callable[[Floats, Any], Estimate]) -> Floats:
    """Bounds of the package's interval for each evaluation."""
    _, num_prompts, num_episodes = evaluations.shape
    prompts = np.repeat(np.arange(num_prompts), num_episodes)
    intervals = [interval(values.ravel(), prompts) for values in evaluations]
    return np.array([(estimate.low, estimate.high) for estimate in intervals])


def count(bounds: Floats, truth: float) -> dict[str, Any]:
    """Frequencies of truths inside, below and above the intervals, and their mean width."""
    # Interval ends are included, up to rounding.
    below, above = truth < bounds[:, 0] - 1e-9, truth > bounds[:, 1] + 1e-9
    return {
        "coverage": float(1.0 - below.mean() - above.mean()),
        "below": float(below.mean()),
        "above": float(above.mean()),
        "width": float((bounds[:, 1] - bounds[:, 0]).mean()),
    }


def measure(
    what: str, designs: Sequence[tuple[int, int]], repetitions: int, seed: int
) -> list[Point]:
    """Measure intervals of a rate, or of paired differences of outcomes or scores."""
    is_pair, noise = what != RATE, 0.5 if what == SCORES else 0.0
    points = []
    for design, place, rng in _grid(designs, PAIRS if is_pair else [(r,) for r in RATES], seed):
        rates, correlation, kind = place
        shape = (repetitions, *design)
        if is_pair:
            drawn = differences(rng, shape, rates, correlation, noise)
            # The mean of the Beta distribution of the noise is 1 / 21.
            truth, largest = (rates[1] - rates[0]) * (1.0 - 2.0 * noise / 21.0), math.inf
            own = own_bounds(drawn, lambda d, prompts: paired_difference(d, prompts).estimate)
        else:
            drawn = outcomes(rng, shape, rates[0], correlation, kind)
            truth, largest, own = rates[0], 1.0, own_bounds(drawn, rate_estimate)
        methods = {"ours": own, "bootstrap": bootstrap_bounds(drawn, rng, largest)}
        for name, bounds in methods.items():
            figures = count(bounds, truth)
            points.append(Point(what, name, *design, rates, correlation, kind, **figures))
    return points


def missing_points(
    designs: Sequence[tuple[int, int]], repetitions: int, seed: int
) -> Iterator[Point]:
    """Measure failure rates of conversations with missing verdicts."""
    for design, rate, correlation, kind in product(designs, MISSING_RATES, (0.0, 0.3), MISSING):
        if correlation and design[1] == 1:
            continue
        key = [seed, *design, round(1000 * rate), round(10 * correlation), len(kind)]
        rng = np.random.default_rng(key)
        prompts = np.repeat(np.arange(design[0]), design[1])
        by_method: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(repetitions):
            failed, is_missing = conversations(rng, design, rate, correlation, MISSING[kind])
            for name, estimate in estimates(failed, is_missing, prompts).items():
                by_method.setdefault(name, []).append(estimate)
        for name, rows in by_method.items():
            values = np.asarray(rows)
            frequencies = count(values[:, 1:], rate)
            # If every conversation is censored, there is an interval but no estimate.
            known = values[~np.isnan(values[:, 0]), 0]
            mean = float(known.mean()) if len(known) else None
            what = "missing verdicts"
            yield Point(what, name, *design, (rate,), correlation, kind, **frequencies, mean=mean)


def conversations(
    rng: np.random.Generator,
    design: tuple[int, int],
    rate: float,
    correlation: float,
    missing: tuple[float, float],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Draw failed turns and missing verdicts, both [conversations, turns]."""
    rates = rates_of_prompts(rng.random(design[0]), rate, correlation, "Beta")
    hazards = 1.0 - (1.0 - np.repeat(rates, design[1])) ** (1.0 / NUM_TURNS)
    failed = rng.random((len(hazards), NUM_TURNS)) < hazards[:, None]
    return failed, rng.random(failed.shape) < np.where(failed, *missing)


def estimates(
    failed: npt.NDArray[np.bool_], is_missing: npt.NDArray[np.bool_], prompts: Any
) -> dict[str, tuple[float, float, float]]:
    """Value, lower and upper bound of each estimate of the share of failed conversations."""
    names = (Outcome.NONE, Outcome.FAILURE, Outcome.UNDETERMINED)
    codes = np.where(is_missing, 2, failed).tolist()
    rate = failure_rate([[names[code] for code in turns] for turns in codes], prompts)
    has_failed = (failed & ~is_missing).any(axis=1)
    is_unknown = is_missing.any(axis=1) & ~has_failed
    uncensored = rate_estimate(np.where(is_unknown, np.nan, has_failed), prompts)
    survival = rate.estimate
    return {
        SURVIVAL: (survival.value, *_ends(survival.low, survival.high)),
        BOUNDS: (math.nan, rate.lowest, rate.highest),
        UNCENSORED: (uncensored.value, *_ends(uncensored.low, uncensored.high)),
    }


def _ends(low: float, high: float) -> tuple[float, float]:
    """Bounds of an interval; [0, 1] if there is no verdict at all."""
    return (0.0, 1.0) if math.isnan(low) else (low, high)


def missing_table(points: Sequence[Point]) -> str:
    """A Markdown row for each design and kind of missing verdicts."""
    header = ["prompts x episodes", "missing verdicts"]
    for method in (SURVIVAL, BOUNDS, UNCENSORED):
        header += [f"{method}: coverage", "width"]
        header += [] if method == BOUNDS else ["bias, points"]
    rows = []
    for *design, kind in dict.fromkeys((p.num_prompts, p.num_episodes, p.kind) for p in points):
        row = [f"{design[0]} x {design[1]}", kind]
        for method in (SURVIVAL, BOUNDS, UNCENSORED):
            own = [
                p for p in points
                if [p.num_prompts, p.num_episodes, p.kind, p.method] == [*design, kind, method]
            ]  # fmt: skip
            row.append(_range([100 * p.coverage for p in own], "%"))
            row.append(_range([p.width for p in own], ""))
            biases = [100 * (p.mean - p.rates[0]) for p in own if p.mean is not None]
            row += [] if method == BOUNDS else [_range(biases or [math.nan], "")]
        rows.append(row)
    return markdown_table(header, rows)


def _range(values: Sequence[float], unit: str) -> str:
    digits = 1 if max(map(abs, values)) >= 1.0 else 2
    return f"{min(values):.{digits}f}{unit} to {max(values):.{digits}f}{unit}"


def _grid(
    designs: Sequence[tuple[int, int]], rates: Sequence[tuple[float, ...]], seed: int
) -> Iterator[tuple[tuple[int, int], Place, np.random.Generator]]:
    """Each design and grid place, with its random generator."""
    for design in designs:
        for pair in rates:
            is_pair = len(pair) > 1
            for correlation in CORRELATIONS if is_pair or design[1] > 1 else (0.0,):
                for kind in ("Beta",) if is_pair or not correlation else ("Beta", "two kinds"):
                    digits = [round(1000 * rate) for rate in pair]
                    key = [seed, *design, *digits, round(10 * correlation), len(kind)]
                    yield design, (pair, correlation, kind), np.random.default_rng(key)


def table(points: Sequence[Point]) -> str:
    """A Markdown row for each number of prompts and episodes."""
    header = ["", "prompts x episodes"]
    for method in METHODS:
        header += [f"{method}: coverage", "truth below", "truth above"]
    rows = []
    for what, *design in dict.fromkeys((p.what, p.num_prompts, p.num_episodes) for p in points):
        row = [what, f"{design[0]} x {design[1]}"]
        for method in METHODS:
            place = [what, *design, method]
            own = [p for p in points if [p.what, p.num_prompts, p.num_episodes, p.method] == place]
            coverage = [p.coverage for p in own]
            row.append(f"{min(coverage):.1%} to {max(coverage):.1%}")
            row += [f"{max(p.below for p in own):.1%}", f"{max(p.above for p in own):.1%}"]
        rows.append(row)
    return markdown_table(header, rows)


def main() -> None:
    """Measure, print the tables and write all points."""
    options = build_parser(
        __doc__,
        repetitions={"type": int, "default": 2000, "help": "evaluations per point"},
        largest={"type": int, "default": 300, "help": "maximum number of prompts"},
        only={"choices": ("complete", "missing"), "default": None, "help": "measure one part"},
        seed=0,
    ).parse_args()
    started = time.perf_counter()
    designs = [design for design in DESIGNS if design[0] <= options.largest]
    points: list[Point] = []
    for what in (RATE, RATES_APART, SCORES) if options.only != "missing" else ():
        measured = measure(what, designs, options.repetitions, options.seed)
        print(table(measured), flush=True)
        points += measured
    if options.only != "complete":
        own = [design for design in MISSING_DESIGNS if design[0] <= options.largest]
        measured = list(missing_points(own, options.repetitions, options.seed))
        if measured:
            print(missing_table(measured), flush=True)
        points += measured
    shown = (
        f"95 % intervals, {options.repetitions} evaluations per point, {len(points)} points; "
        f"{time.perf_counter() - started:.0f} s"
    )
    report_figures([asdict(point) for point in points], options.out, shown=shown)


if __name__ == "__main__":
    main()
