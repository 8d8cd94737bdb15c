"""How often do the intervals of rates and of paired differences hold the truth?

    python benchmarks/interval_coverage.py --out interval_coverage.json

Simulated evaluations, over a grid of opening prompts, episodes a prompt, rates and correlations of
a prompt's episodes. A prompt has a rate of its own, drawn from a Beta distribution or from two
values of which one is 0 ("two kinds"), with mean and correlation of the grid. The prompts of a pair
share half of what sets their rates apart. Intervals are those of the package; beside them stands
the percentile bootstrap over prompts, with the rule of three where all are alike. A line tells a
number of prompts and of episodes: the least and the largest coverage over all rates and
correlations, and how often at most the truth lay below and above. The JSON file holds every point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import markdown_table, options_of, tell
from scipy.special import betaincinv, ndtr

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


@dataclass(frozen=True)
class Point:
    """One point of the grid, and what was found there.

    Attributes
    ----------
    coverage, below, above : float
        How often the interval held the truth, and how often the truth lay below or above it.
    width : float
        Mean width of the interval.
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
        seed=0,
    ).parse_args()
    started = time.perf_counter()
    designs = [design for design in DESIGNS if design[0] <= options.largest]
    points: list[Point] = []
    for what in (RATE, RATES_APART, SCORES):
        found = measure(what, designs, options.repetitions, options.seed)
        print(table(found), flush=True)
        points += found
    shown = (
        f"95 % intervals, {options.repetitions} evaluations a point, {len(points) // 2} points; "
        f"{time.perf_counter() - started:.0f} s"
    )
    tell([asdict(point) for point in points], options.out, shown=shown)


if __name__ == "__main__":
    main()
