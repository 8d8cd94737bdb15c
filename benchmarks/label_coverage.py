"""Coverage of corrected failure rates, by how the labels of the scorer's quality were drawn.

    python benchmarks/label_coverage.py [--repetitions N]

Conversations of three turns are rated by a scorer with sensitivity and specificity 0.9; verdicts
are missing at random. Labels are drawn from the rated turns: 100 flagged and 100 unflagged ones
with their weights ("strata"), the same without ("chosen"), or a random sample ("random"). Prints
the share of repetitions whose nominal 95 % interval holds the true rate of conversations, and the
shares in which the interval lies above or below it.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, Literal

import numpy as np
from measuring import build_parser, markdown_table, report_figures

from nip_astra.evaluation.detectors import LabelDesign, LabelStratum, Quality, corrected_rates
from nip_astra.evaluation.outcomes import judge
from nip_astra.evaluation.storage import Episode

SENSITIVITY = SPECIFICITY = 0.9
NUM_TURNS = 3
Drawn = Literal["strata", "chosen", "random"]


def draw_quality(
    failed_N: np.ndarray[Any, Any],
    flagged_N: np.ndarray[Any, Any],
    drawn: Drawn,
    num_each: int,
    rng: np.random.Generator,
) -> Quality:
    """Label some of the turns, and count labels against verdicts."""
    if drawn == "random":
        groups = {"all": np.arange(len(failed_N))}
        size = 2 * num_each
    else:
        groups = {"flagged": np.flatnonzero(flagged_N), "others": np.flatnonzero(~flagged_N)}
        size = num_each
    strata = []
    totals: Counter[str] = Counter()
    for name, indices in groups.items():
        chosen = rng.choice(indices, min(size, len(indices)), replace=False)
        failed, flagged = failed_N[chosen], flagged_N[chosen]
        counts = {
            "num_hits": int((failed & flagged).sum()),
            "num_misses": int((failed & ~flagged).sum()),
            "num_passes": int((~failed & ~flagged).sum()),
            "num_false_alarms": int((~failed & flagged).sum()),
        }
        totals.update(counts)
        strata.append(LabelStratum(**counts, name=name, weight=float(len(indices))))
    is_stratified = drawn == "strata"
    return Quality(
        num_hits=totals["num_hits"],
        num_misses=totals["num_misses"],
        num_passes=totals["num_passes"],
        num_false_alarms=totals["num_false_alarms"],
        design=LabelDesign.STRATA if is_stratified else LabelDesign.UNKNOWN,
        strata=tuple(strata) if is_stratified else (),
    )


def simulate(
    rate: float,
    num_episodes: int,
    missing: float,
    drawn: Drawn,
    *,
    num_each: int = 100,
    repetitions: int = 200,
    num_resamples: int = 500,
    seed: int = 0,
) -> dict[str, float]:
    """Return the shares of intervals that hold the truth, lie above it, and lie below it.

    Parameters
    ----------
    rate : float
        Probability that a conversation has a failure.
    missing : float
        Probability that a turn has no verdict.
    """
    rng = np.random.default_rng(seed)
    turn_rate = 1.0 - (1.0 - rate) ** (1.0 / NUM_TURNS)
    above = below = refused = 0
    for _ in range(repetitions):
        failed = rng.random((num_episodes, NUM_TURNS)) < turn_rate
        share_flagged = np.where(failed, SENSITIVITY, 1.0 - SPECIFICITY)
        flagged = rng.random(failed.shape) < share_flagged
        is_missing = rng.random(failed.shape) < missing
        quality = draw_quality(failed.ravel(), flagged.ravel(), drawn, num_each, rng)
        episodes: list[Episode] = [
            [
                {"prompt": str(number), "response_score": None if gone else float(flag)}
                for flag, gone in zip(flags, gaps, strict=True)
            ]
            for number, (flags, gaps) in enumerate(
                zip(flagged.tolist(), is_missing.tolist(), strict=True)
            )
        ]
        judge(episodes, 0.5)
        rates = corrected_rates(episodes, quality, num_resamples=num_resamples, level=0.95)
        if rates["is_refused"]:
            refused += 1
            continue
        above += rates["failure_rate"]["low"] > rate
        below += rates["failure_rate"]["high"] < rate
    num_given = max(repetitions - refused, 1)
    return {
        "covered": 1.0 - (above + below) / num_given,
        "above": above / num_given,
        "below": below / num_given,
        "refused": refused / repetitions,
    }


def main() -> None:
    """Print a table, and write its rows."""
    options = build_parser(__doc__, repetitions=200).parse_args()
    designs: tuple[Drawn, ...] = ("strata", "random", "chosen")
    rows: list[dict[str, Any]] = []
    for drawn, rate, size, missing in product(
        designs, (0.02, 0.1, 0.3), (100, 400), (0.0, 0.1, 0.3)
    ):
        setting = {"labels": drawn, "truth": rate, "episodes": size, "missing": missing}
        rows.append(setting | simulate(rate, size, missing, drawn, repetitions=options.repetitions))
    table = markdown_table(list(rows[0]), [list(row.values()) for row in rows])
    report_figures(rows, options.out, shown=table)


if __name__ == "__main__":
    main()
