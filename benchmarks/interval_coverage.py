"""How often do the intervals of rates and of paired differences hold the truth?

    python benchmarks/interval_coverage.py --out interval_coverage.json

Simulated evaluations, over a grid of opening prompts, episodes a prompt, rates and correlations of
a prompt's episodes. A prompt has a rate of its own, drawn from a Beta distribution or from two
values of which one is 0 ("two kinds"), with mean and correlation of the grid. The prompts of a pair
share half of what sets their rates apart. Intervals are those of the package; beside them stands
the percentile bootstrap over prompts, with the rule of three where all are alike. A line tells a
number of prompts and of episodes: the least and the largest coverage over all rates and
correlations, and how often at most the truth lay below and above. The JSON file holds every point.

Then conversations of 10 turns with missing verdicts, at random or depending on whether the target
failed (`--only missing`: these alone): the survival estimate, the bounds for whatever the missing
verdicts were, and, uncensored, the share of failed conversations if a failure counts even after a
missing verdict and a conversation without a failure is left out for one.
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
from measuring import markdown_table, options_of, tell
from scipy.special import betaincinv, ndtr

from nip_astra.evaluation.outcomes import Outcome, failure_rate
from nip_astra.utils.intervals import Estimate, paired_difference, rate_estimate

Floats = npt.NDArray[np.float64]
Shape = tuple[int, int, int]
"""Evaluations, prompts, episodes of each."""
Place = tuple[tuple[float, ...], float, str]
"""Rates, correlation and distribution of the prompts' rates."""

DESIGNS = (
    (5, 1), (5, 8), (10, 1), (10, 4), (20, 1), (20, 8), (50, 1), (50, 16), (100, 1), (100, 4),
    (300, 1), (300, 4),
)  # fmt: skip
"""Prompts, and episodes of each."""
RATES = (0.005, 0.02, 0.05, 0.1, 0.3, 0.5)
PAIRS = (
    (0.005, 0.005), (0.02, 0.02), (0.005, 0.1), (0.02, 0.1), (0.1, 0.1), (0.1, 0.5), (0.5, 0.5),
    (0.1, 0.9), (0.02, 0.98), (0.005, 0.5),
)  # fmt: skip
CORRELATIONS = (0.0, 0.1, 0.3, 0.6)
"""Of the episodes of a prompt; with one episode a prompt it means nothing for a single rate."""
SHARED = 0.5
"""Correlation of what sets the two rates of a prompt apart from other prompts'."""
NUM_RESAMPLES = 400
RATE, RATES_APART, SCORES = "rate", "difference of rates", "difference of scores"
METHODS = ("ours", "bootstrap")

NUM_TURNS = 10
MISSING_DESIGNS = ((30, 1), (100, 1), (240, 1), (50, 4))
"""Prompts, and conversations of each, in which verdicts are missing."""
MISSING_RATES = (0.02, 0.183, 0.5)
MISSING = {
    "4.9 % at random": (0.049, 0.049),
    "30 % at random": (0.3, 0.3),
    "40 % of failures, 2 % of passes": (0.4, 0.02),
    "no failure, 10 % of passes": (0.0, 0.1),
}
"""Chance that the verdict on a turn with a failure, and on one without, is missing."""
SURVIVAL, BOUNDS, UNCENSORED = "survival", "bounds", "uncensored"


@dataclass(frozen=True)
class Point:
    """One point of the grid, and what was found there.

    Attributes
    ----------
    coverage, below, above : float
        How often the interval held the truth, and how often the truth lay below or above it.
    width : float
        Mean width of the interval.
    mean : float or None
        Mean of the estimates, where verdicts are missing.
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
    """Turn uniform numbers into rates of prompts with that mean and correlation of episodes."""
    if correlation == 0.0:
        return np.full_like(uniform, rate)
    if kind == "two kinds":
        # Of rate `high` in a share of prompts, never in the others.
        high = rate + correlation * (1.0 - rate)
        return np.where(uniform > 1.0 - rate / high, high, 0.0)
    spread = (1.0 - correlation) / correlation
    grid = np.linspace(0.0, 1.0, 4001)
    return np.interp(uniform, grid, betaincinv(rate * spread, (1.0 - rate) * spread, grid))


def outcomes(
    rng: np.random.Generator,
    shape: Shape,
    rate: float,
    correlation: float,
    kind: str,
) -> Floats:
    """Draw outcomes, 0 or 1, of evaluations x prompts x episodes."""
    rates = rates_of_prompts(rng.random(shape[:2]), rate, correlation, kind)
    return (rng.random(shape) < rates[..., None]).astype(np.float64)


def differences(
    rng: np.random.Generator,
    shape: Shape,
    pair: tuple[float, ...],
    correlation: float,
    noise: float = 0.0,
) -> Floats:
    """Draw second outcomes less first ones of the same prompts.

    With noise they are scores: up to so far from 0 and from 1, most of them near.
    """
    shared, *own = rng.standard_normal((3, *shape[:2]))
    drawn = []
    for rate, mine in zip(pair, own, strict=True):
        uniform = ndtr(SHARED**0.5 * shared + (1.0 - SHARED) ** 0.5 * mine)
        rates = rates_of_prompts(uniform, rate, correlation, "Beta")
        is_failure = rng.random(shape) < rates[..., None]
        drawn.append(np.abs(is_failure - noise * rng.beta(1.0, 20.0, shape)))
    return np.asarray(drawn[1] - drawn[0])


def bootstrap_bounds(evaluations: Floats, rng: np.random.Generator, largest: float) -> Floats:
    """Percentile bootstrap over prompts; `3 / prompts` where all are 0 or all are `largest`."""
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
    found = [interval(values.ravel(), prompts) for values in evaluations]
    return np.array([(estimate.low, estimate.high) for estimate in found])


def count(bounds: Floats, truth: float) -> dict[str, float]:
    """Count how often intervals hold the truth."""
    # What an interval ends at is in it, whatever the last digit.
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
    """Measure the intervals of a rate, or of paired differences of outcomes or scores."""
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
            points.append(Point(what, name, *design, *place, **count(bounds, truth)))
    return points


def missing_points(
    designs: Sequence[tuple[int, int]], repetitions: int, seed: int
) -> Iterator[Point]:
    """Measure the failure rate of conversations in which verdicts are missing."""
    for design, rate, correlation, kind in product(designs, MISSING_RATES, (0.0, 0.3), MISSING):
        if correlation and design[1] == 1:
            continue
        key = [seed, *design, round(1000 * rate), round(10 * correlation), len(kind)]
        rng = np.random.default_rng(key)
        prompts = np.repeat(np.arange(design[0]), design[1])
        found: dict[str, list[tuple[float, float, float]]] = {}
        for _ in range(repetitions):
            failed, is_missing = conversations(rng, design, rate, correlation, MISSING[kind])
            for name, estimate in estimates(failed, is_missing, prompts).items():
                found.setdefault(name, []).append(estimate)
        for name, rows in found.items():
            values = np.asarray(rows)
            held = count(values[:, 1:], rate)
            # Where nobody was left to observe there is no estimate, but an interval.
            known = values[~np.isnan(values[:, 0]), 0]
            mean = float(known.mean()) if len(known) else None
            place = ((rate,), correlation, kind)
            yield Point("missing verdicts", name, *design, *place, **held, mean=mean)


def conversations(
    rng: np.random.Generator,
    design: tuple[int, int],
    rate: float,
    correlation: float,
    missing: tuple[float, float],
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Draw which turns failed, and which verdicts are missing: conversations x turns, both."""
    rates = rates_of_prompts(rng.random(design[0]), rate, correlation, "Beta")
    hazards = 1.0 - (1.0 - np.repeat(rates, design[1])) ** (1.0 / NUM_TURNS)
    failed = rng.random((len(hazards), NUM_TURNS)) < hazards[:, None]
    return failed, rng.random(failed.shape) < np.where(failed, *missing)


def estimates(
    failed: npt.NDArray[np.bool_], is_missing: npt.NDArray[np.bool_], prompts: Any
) -> dict[str, tuple[float, float, float]]:
    """Value, lower and upper end of each estimate of the share of failed conversations."""
    names = (Outcome.NONE, Outcome.FAILURE, Outcome.UNDETERMINED)
    codes = np.where(is_missing, 2, failed).tolist()
    found = failure_rate([[names[code] for code in turns] for turns in codes], prompts)
    has_failed = (failed & ~is_missing).any(axis=1)
    is_unknown = is_missing.any(axis=1) & ~has_failed
    old = rate_estimate(np.where(is_unknown, np.nan, has_failed), prompts)
    survival = found.estimate
    return {
        SURVIVAL: (survival.value, *_ends(survival.low, survival.high)),
        BOUNDS: (math.nan, found.lowest, found.highest),
        UNCENSORED: (old.value, *_ends(old.low, old.high)),
    }


def _ends(low: float, high: float) -> tuple[float, float]:
    """The ends of an interval; without any verdict the rate may be anything."""
    return (0.0, 1.0) if math.isnan(low) else (low, high)


def missing_table(points: Sequence[Point]) -> str:
    """Lay out a line for each design and way of missing, as Markdown."""
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
    """Numbers of prompts and episodes, a place among rates, and its random numbers."""
    for design in designs:
        for pair in rates:
            is_pair = len(pair) > 1
            for correlation in CORRELATIONS if is_pair or design[1] > 1 else (0.0,):
                for kind in ("Beta",) if is_pair or not correlation else ("Beta", "two kinds"):
                    digits = [round(1000 * rate) for rate in pair]
                    key = [seed, *design, *digits, round(10 * correlation), len(kind)]
                    yield design, (pair, correlation, kind), np.random.default_rng(key)


def table(points: Sequence[Point]) -> str:
    """Lay out a line for each number of prompts and episodes, as Markdown."""
    header = ["", "prompts x episodes"]
    for method in METHODS:
        header += [f"{method}: coverage", "truth below", "truth above"]
    rows = []
    for what, *design in dict.fromkeys((p.what, p.num_prompts, p.num_episodes) for p in points):
        row = [what, f"{design[0]} x {design[1]}"]
        for method in METHODS:
            place = [what, *design, method]
            own = [p for p in points if [p.what, p.num_prompts, p.num_episodes, p.method] == place]
            held = [p.coverage for p in own]
            row.append(f"{min(held):.1%} to {max(held):.1%}")
            row += [f"{max(p.below for p in own):.1%}", f"{max(p.above for p in own):.1%}"]
        rows.append(row)
    return markdown_table(header, rows)


def main() -> None:
    """Measure, and print the tables."""
    options = options_of(
        __doc__,
        repetitions={"type": int, "default": 2000, "help": "evaluations a point"},
        largest={"type": int, "default": 300, "help": "most prompts of the grid"},
        only={"choices": ("complete", "missing"), "default": None, "help": "measure one part"},
        seed=0,
    ).parse_args()
    started = time.perf_counter()
    designs = [design for design in DESIGNS if design[0] <= options.largest]
    points: list[Point] = []
    for what in (RATE, RATES_APART, SCORES) if options.only != "missing" else ():
        found = measure(what, designs, options.repetitions, options.seed)
        print(table(found), flush=True)
        points += found
    if options.only != "complete":
        own = [design for design in MISSING_DESIGNS if design[0] <= options.largest]
        found = list(missing_points(own, options.repetitions, options.seed))
        if found:
            print(missing_table(found), flush=True)
        points += found
    shown = (
        f"95 % intervals, {options.repetitions} evaluations a point, {len(points)} intervals; "
        f"{time.perf_counter() - started:.0f} s"
    )
    tell([asdict(point) for point in points], options.out, shown=shown)


if __name__ == "__main__":
    main()
