"""Accuracy of a scorer on labelled responses, and failure rates corrected for its errors.

With sensitivity Se and specificity Sp the share of turns that a scorer flags is

    E[x] = (1 - Sp) + (Se + Sp - 1) * p,    so    p = (x + Sp - 1) / (Se + Sp - 1)

(Rogan and Gladen 1978). An episode fails if one of its turns does: with independent errors on
different turns, the product over turns of (Se - x_t) / (Se + Sp - 1) is an unbiased estimate of
"no turn fails". With one turn that is the formula above.

Shape suffixes: `R` resample, `P` opening prompt, `C` combination of turns and flags.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nip_astra.errors import DataError
from nip_astra.evaluation.outcomes import (
    Outcome,
    has_failed,
    outcomes_of,
    prompt_numbers,
    reaches,
)
from nip_astra.evaluation.storage import Episode
from nip_astra.rollouts.messages import Turn
from nip_astra.rollouts.prompts import RECORD_KEY, columns_of_record
from nip_astra.scorers.base import Exchange, Scorer
from nip_astra.utils.intervals import design_effect, exact_rate_interval
from nip_astra.utils.seeding import derive_seed

_ADVICE = (
    'Give a JSON object a line with "response", "is_failure" (true or false), and "prompt" and '
    '"probe" for scorers that read conversations, such as a row of rows.jsonl with "is_failure".'
)
_CHANCE = "the labelled responses do not show that the scorer detects failures better than chance"

_NONE_LEFT = "no episode without a failure has verdicts through its last turn"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LabelledResponse:
    """A response, and whether it is a failure."""

    exchange: Exchange
    is_failure: bool


@dataclass(frozen=True)
class Quality:
    """Agreement of a scorer's verdicts with labels.

    Attributes
    ----------
    num_hits, num_misses : int
        Failures that were flagged, and that were not.
    num_passes, num_false_alarms : int
        Others that were not flagged, and that were.
    num_unknown : int
        Labelled responses without a verdict; in neither rate.
    """

    num_hits: int
    num_misses: int
    num_passes: int
    num_false_alarms: int
    num_unknown: int = 0

    @property
    def sensitivity(self) -> float:
        """Return the share of failures that are flagged; NaN without any."""
        return _share(self.num_hits, self.num_misses)

    @property
    def specificity(self) -> float:
        """Return the share of other responses that are not flagged; NaN without any."""
        return _share(self.num_passes, self.num_false_alarms)

    def to_dict(self, level: float) -> dict[str, Any]:
        """Return plain values, each rate with its exact interval."""
        return {
            "sensitivity": _with_interval(self.num_hits, self.num_misses, level),
            "specificity": _with_interval(self.num_passes, self.num_false_alarms, level),
            "num_failures": self.num_hits + self.num_misses,
            "num_others": self.num_passes + self.num_false_alarms,
            "num_unknown": self.num_unknown,
        }

    def draw(self, rng: np.random.Generator, num_resamples: int) -> tuple[Floats, Floats]:
        """Draw sensitivities and specificities from Beta posteriors (Jeffreys), `[R]` each."""
        return (
            rng.beta(self.num_hits + 0.5, self.num_misses + 0.5, num_resamples),
            rng.beta(self.num_passes + 0.5, self.num_false_alarms + 0.5, num_resamples),
        )


def read_labelled(path: Path) -> list[LabelledResponse]:
    """Read labelled responses, one JSON object per line.

    Raises
    ------
    DataError
        When the file cannot be read, or a line is not a labelled response.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labelled responses in {path} cannot be read: {error}. {_ADVICE}"
        ) from error
    labelled = [_labelled(path, place, line) for place, line in enumerate(lines, 1) if line.strip()]
    if not labelled:
        raise DataError(f"{path} holds no labelled responses. {_ADVICE}")
    return labelled


def measure_quality(
    labelled: Sequence[LabelledResponse], scorer: Scorer, *, threshold: float
) -> Quality:
    """Rate labelled responses and count agreements of verdict and label."""
    scores = scorer.rate([one.exchange for one in labelled]).scores_N.tolist()
    counts = Counter(
        (one.is_failure, None if score != score else reaches(score, threshold))
        for one, score in zip(labelled, scores, strict=True)
    )
    return Quality(
        num_hits=counts[True, True],
        num_misses=counts[True, False],
        num_passes=counts[False, False],
        num_false_alarms=counts[False, True],
        num_unknown=counts[True, None] + counts[False, None],
    )


def corrected_rates(
    episodes: Sequence[Episode], quality: Quality, *, num_resamples: int, level: float
) -> dict[str, Any]:
    """Return failure rates of turns and of judged episodes, corrected for the scorer's errors.

    Intervals weigh opening prompts at random (the Bayesian bootstrap) and draw sensitivity and
    specificity again each time. For the lower bound an episode without a flag is added, for the
    upper one with nothing but flags, each counted by the design effect: for single turns and a
    scorer without errors, that is the interval of Clopper and Pearson, whereas resampling alone
    would have no width if nothing was flagged. An episode counts up to its first turn without a
    verdict. Refused if none is known through its last turn, and if the labels do not show that the
    scorer is better than chance (Se + Sp <= 1).
    """
    share, specificity = quality.sensitivity, quality.specificity
    rng = np.random.default_rng(derive_seed(0, "detector correction"))
    # With a class that has no label this is NaN, and not above 1.
    if not share + specificity > 1.0:
        return _refused(f"{_CHANCE}: sensitivity {share:.2f}, specificity {specificity:.2f}")
    se_R, sp_R = quality.draw(rng, num_resamples)
    is_possible_R = se_R + sp_R > 1.0
    if is_possible_R.mean() < 0.5 + level / 2.0:
        return _refused(f"{_CHANCE}: there are too few of them")
    prompts = prompt_numbers(episodes)
    outcomes = [outcomes_of(episode) for episode in episodes]
    if not any(all(outcome.is_known for outcome in turns) for turns in outcomes):
        return _refused(_NONE_LEFT)
    tables = _tables(outcomes, prompts)
    weights_PR = rng.standard_exponential((tables[0].counts_CP.shape[1], num_resamples))
    known = [(f, p) for f, p in zip(has_failed(episodes), prompts, strict=True) if f == f]
    effect = design_effect([failed for failed, _ in known], [prompt for _, prompt in known])
    added_R = effect * rng.standard_exponential(num_resamples)
    lower, upper = (
        _rates(
            [table.weighed(weights_PR, added_R, flags) for table in tables],
            *(tables, se_R, sp_R),
            if_unknown=if_unknown,
        )
        for flags, if_unknown in (("none", 1.0), ("all", 0.0))
    )
    whole = [table.counts_CP.sum(axis=1, keepdims=True) for table in tables]
    values = _rates(whole, tables, np.array([share]), np.array([specificity]))
    if np.isnan(values[1]).any():
        return _refused(_NONE_LEFT)
    tails = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
    found: dict[str, Any] = {"is_refused": False}
    names = ("turn_failure_rate", "failure_rate")
    for name, value, lower_R, upper_R in zip(names, values, lower, upper, strict=True):
        low = np.quantile(lower_R[is_possible_R], tails[0])
        high = np.quantile(upper_R[is_possible_R], tails[1])
        bounds = np.clip([float(value[0]), low, high], 0.0, 1.0).tolist()
        found[name] = dict(zip(("value", "low", "high"), bounds, strict=True)) | {"level": level}
    return found


class _Table(NamedTuple):
    """Each prompt's episodes, counted by number of turns and of flagged turns.

    Turns and flags are counted through the table's last turn, and through the one before its first.
    The longest episode without a flag and the longest with flags alone have a row each.
    """

    counts_CP: Floats
    turns_C: Floats
    flags_C: Floats
    turns_before_C: Floats
    flags_before_C: Floats

    def weighed(self, weights_PR: Floats, added_R: Floats, flags: str) -> Floats:
        """Return counts with weighted prompts and an added episode, flagged never or always."""
        is_longest_C = self.turns_C == self.turns_C.max(initial=0.0)
        added_C = is_longest_C * (self.flags_C == (0.0 if flags == "none" else self.turns_C))
        return np.asarray(self.counts_CP @ weights_PR + np.outer(added_C, added_R))


def _tables(outcomes: Sequence[Sequence[Outcome]], prompts: Sequence[int]) -> list[_Table]:
    """Return a table of all turns with a verdict, then one per stretch between censoring turns."""
    horizon = max(len(turns) for turns in outcomes)
    known_to = [
        next((turn for turn, one in enumerate(turns) if not one.is_known), horizon)
        for turns in outcomes
    ]
    columns = sorted(set(prompts))
    every = [
        (sum(one.is_known for one in turns), turns.count(Outcome.FAILURE), 0, 0)
        for turns in outcomes
    ]
    tables = [_table(every, prompts, columns)]
    start = 0
    for end in sorted({turn for turn in known_to if turn > 0}):
        kept = [place for place, turn in enumerate(known_to) if turn >= end]
        kinds = [
            _flagged(outcomes[place], end) + _flagged(outcomes[place], start) for place in kept
        ]
        tables.append(_table(kinds, [prompts[place] for place in kept], columns))
        start = end
    return tables


def _flagged(turns: Sequence[Outcome], end: int) -> tuple[int, ...]:
    return len(turns[:end]), list(turns[:end]).count(Outcome.FAILURE)


def _table(
    kinds: Sequence[tuple[int, ...]], prompts: Sequence[int], columns: Sequence[int]
) -> _Table:
    counts = Counter(zip(kinds, prompts, strict=True))
    longest, _, before, _ = max(kinds)
    extremes = {(longest, 0, before, 0), (longest, longest, before, before)}
    rows = sorted({*kinds, *extremes})
    table = np.array([[float(counts[kind, one]) for one in columns] for kind in rows])
    return _Table(table, *np.array(rows, dtype=np.float64).T)


def _rates(
    counts: Sequence[Floats],
    tables: Sequence[_Table],
    se_R: Floats,
    sp_R: Floats,
    *,
    if_unknown: float = math.nan,
) -> tuple[Floats, Floats]:
    """Return the corrected rates of turns and of episodes, `[R]` each, not clipped to [0, 1].

    `if_unknown` is the share that passes turns of which no unfailed episode is known.
    """
    better_R = se_R + sp_R - 1.0

    def passed(turns_C: Floats, flags_C: Floats, counts_CR: Floats) -> Floats:
        chances_CR = (se_R - 1.0) ** flags_C[:, None] * se_R ** (turns_C - flags_C)[:, None]
        chances_CR = chances_CR / better_R ** turns_C[:, None]
        return np.asarray((counts_CR * chances_CR).sum(axis=0))

    turns, *stretches = tables
    flagged_R = (counts[0] * turns.flags_C[:, None]).sum(axis=0)
    flagged_R = flagged_R / (counts[0] * turns.turns_C[:, None]).sum(axis=0)
    turn_rate_R = (flagged_R + sp_R - 1.0) / better_R
    without_R = np.ones_like(better_R)
    for one, counts_CR in zip(stretches, counts[1:], strict=True):
        before_R = passed(one.turns_before_C, one.flags_before_C, counts_CR)
        through_R = passed(one.turns_C, one.flags_C, counts_CR)
        if len(stretches) == 1:
            # Nothing is censored; clipped to [0, 1], the estimate would be biased.
            return turn_rate_R, 1.0 - through_R / before_R
        is_left_R = before_R > 0.0
        share_R = np.clip(through_R / np.where(is_left_R, before_R, 1.0), 0.0, 1.0)
        share_R = np.where(is_left_R, share_R, if_unknown)
        without_R = np.where(without_R > 0.0, without_R * share_R, 0.0)
    return turn_rate_R, 1.0 - without_R


def _refused(reason: str) -> dict[str, Any]:
    return {"is_refused": True, "reason": reason}


def _share(number: int, others: int) -> float:
    return number / (number + others) if number + others else float("nan")


def _with_interval(number: int, others: int, level: float) -> dict[str, Any] | None:
    total = number + others
    if not total:
        return None
    low, high = exact_rate_interval(number / total, total, level=level)
    counts = {"num_found": number, "num_labelled": total}
    return {"value": number / total, "low": low, "high": high, "level": level} | counts


def _labelled(path: Path, place: int, line: str) -> LabelledResponse:
    try:
        row = json.loads(line)
        fault = _fault(row)
    except ValueError as error:
        fault = f"is not JSON: {error}"
    if fault is not None:
        raise DataError(f"line {place} of the labelled responses in {path} {fault}. {_ADVICE}")
    before = (Turn("assistant", row.get("prompt")), Turn("user", row.get("probe")))
    history = tuple(message for message in before if message.text is not None)
    exchange = Exchange(row["response"], history, columns=columns_of_record(row))
    return LabelledResponse(exchange, row["is_failure"])


def _fault(row: Any) -> str | None:
    if not isinstance(row, Mapping):
        return "is not a JSON object"
    if not isinstance(row.get("response"), str):
        return 'has no text "response"'
    if not isinstance(row.get("is_failure"), bool):
        return f'has {row.get("is_failure")!r} as "is_failure"'
    for name, kind in (("prompt", str), ("probe", str), (RECORD_KEY, Mapping)):
        if not isinstance(row.get(name), kind | None):
            return f'has {row[name]!r} as "{name}"'
    for name in ("response", "prompt", "probe"):
        if any("\ud800" <= letter <= "\udfff" for letter in row.get(name) or ""):
            return f'has half a character (a lone surrogate) in "{name}"'
    return None
