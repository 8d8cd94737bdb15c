"""Accuracy of a scorer on labelled responses, and failure rates corrected for its errors.

With sensitivity Se and specificity Sp the share of turns that a scorer flags is

    E[x] = (1 - Sp) + (Se + Sp - 1) * p,    so    p = (x + Sp - 1) / (Se + Sp - 1)

(Rogan and Gladen 1978). An episode fails if one of its turns does: with independent errors on
different turns, the product over turns of (Se - x_t) / (Se + Sp - 1) is an unbiased estimate of
"no turn fails". With one turn that is the formula above.

Se and Sp are shares of all failures and of all other responses, so they depend on how the labels
were drawn. A hundred flagged and a hundred unflagged responses, counted alike, give a wrong Se and
Sp (Begg and Greenes 1983): the label of each stratum must count with the stratum's size.

Shape suffixes: `R` resample, `P` opening prompt, `C` combination of turns and flags.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
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

NUM_QUALITY_DRAWS = 10_000
"""Posterior draws for the interval of a sensitivity or specificity from weighted strata."""
_ADVICE = (
    'Give a JSON object a line with "response", "is_failure" (true or false), and "prompt" and '
    '"probe" for scorers that read conversations, such as a row of rows.jsonl with "is_failure".'
)
_CHANCE = "the labelled responses do not show that the scorer detects failures better than chance"

_NONE_LEFT = "no episode without a failure has verdicts through its last turn"

Floats = npt.NDArray[np.float64]


class LabelDesign(StrEnum):
    """How labelled responses were drawn."""

    UNKNOWN = "unknown"
    """No stratum is recorded; the labels count as a random sample."""
    LABELS = "labels"
    """Failures and others were drawn apart, so each stratum has one label."""
    STRATA = "strata"
    """Each stratum is a random sample of its kind, and its weight is known."""


@dataclass(frozen=True)
class LabelledResponse:
    """A response, and whether it is a failure.

    Attributes
    ----------
    stratum : str or None
        The group from which it was drawn at random; None if that is not recorded.
    weight : float or None
        The number of responses of its stratum that it stands for; only ratios matter.
    """

    exchange: Exchange
    is_failure: bool
    stratum: str | None = None
    weight: float | None = None

    @property
    def weighted_stratum(self) -> str:
        """Return stratum and weight as text; empty without a weight, which changes no figure."""
        return "" if self.weight is None else f"\t{self.stratum}\t{self.weight:g}"


@dataclass(frozen=True)
class LabelCounts:
    """Labels by verdict.

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


@dataclass(frozen=True)
class LabelStratum(LabelCounts):
    """Labels of one stratum.

    Attributes
    ----------
    weight : float
        The size of the stratum, in any unit that the strata share.
    """

    name: str = ""
    weight: float = 1.0

    def draw_cells(self, rng: np.random.Generator, num_resamples: int) -> Floats:
        """Draw the stratum's shares of hits, misses, passes and false alarms, `[R, 4]`.

        Jeffreys' prior for the failures among flagged and among other responses. With both
        verdicts in the stratum this is the Dirichlet posterior of the four shares. Where all
        verdicts are equal, the stratum was drawn by them, and the other verdict has share 0.
        """
        num_flagged = self.num_hits + self.num_false_alarms
        num_unflagged = self.num_misses + self.num_passes
        flagged_R = np.full(num_resamples, float(num_flagged > 0))
        if num_flagged and num_unflagged:
            flagged_R = rng.beta(num_flagged + 1.0, num_unflagged + 1.0, num_resamples)
        if not num_flagged and not num_unflagged:
            return np.zeros((num_resamples, 4))
        # Share of failures among flagged responses, and among the others.
        precision_R = rng.beta(self.num_hits + 0.5, self.num_false_alarms + 0.5, num_resamples)
        missed_R = rng.beta(self.num_misses + 0.5, self.num_passes + 0.5, num_resamples)
        cells = [
            flagged_R * precision_R,
            (1.0 - flagged_R) * missed_R,
            (1.0 - flagged_R) * (1.0 - missed_R),
            flagged_R * (1.0 - precision_R),
        ]
        return np.stack(cells, axis=1)

    def cells(self) -> Floats:
        """Return the observed shares of hits, misses, passes and false alarms, `[4]`."""
        counts = (self.num_hits, self.num_misses, self.num_passes, self.num_false_alarms)
        return np.array(counts, dtype=np.float64) / max(sum(counts), 1)


@dataclass(frozen=True)
class Quality(LabelCounts):
    """Agreement of a scorer's verdicts with labels.

    Attributes
    ----------
    design : LabelDesign
        How the labels were drawn.
    strata : tuple of LabelStratum
        The strata with their weights; empty if all labels count alike.
    """

    design: LabelDesign = LabelDesign.UNKNOWN
    strata: tuple[LabelStratum, ...] = ()

    @property
    def sensitivity(self) -> float:
        """Return the share of failures that are flagged; NaN without any."""
        hits, misses, _, _ = self._cells()
        return _share(hits, misses)

    @property
    def specificity(self) -> float:
        """Return the share of other responses that are not flagged; NaN without any."""
        _, _, passes, false_alarms = self._cells()
        return _share(passes, false_alarms)

    def _cells(self) -> tuple[float, float, float, float]:
        """Return the size of hits, misses, passes and false alarms."""
        if not self.strata:
            return self.num_hits, self.num_misses, self.num_passes, self.num_false_alarms
        sizes = [stratum.weight * stratum.cells() for stratum in self.strata]
        hits, misses, passes, false_alarms = np.sum(sizes, axis=0).tolist()
        return hits, misses, passes, false_alarms

    def to_dict(self, level: float) -> dict[str, Any]:
        """Return plain values, each rate with its interval: exact, or of the weighted strata."""
        counts = {
            "sensitivity": (self.num_hits, self.num_misses),
            "specificity": (self.num_passes, self.num_false_alarms),
        }
        rates = {name: _with_interval(*pair, level) for name, pair in counts.items()}
        if self.strata:
            rng = np.random.default_rng(derive_seed(0, "scorer quality"))
            draws = self.draw(rng, NUM_QUALITY_DRAWS)
            values = (self.sensitivity, self.specificity)
            for (name, rate), value, draws_R in zip(rates.items(), values, draws, strict=True):
                if rate is not None:
                    low, high = np.quantile(draws_R, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
                    rates[name] = rate | {"value": value, "low": float(low), "high": float(high)}
        return {
            **rates,
            "num_failures": self.num_hits + self.num_misses,
            "num_others": self.num_passes + self.num_false_alarms,
            "num_unknown": self.num_unknown,
            "design": str(self.design),
        }

    def draw(self, rng: np.random.Generator, num_resamples: int) -> tuple[Floats, Floats]:
        """Draw sensitivities and specificities from their posterior, `[R]` each.

        Beta posteriors (Jeffreys), or those of the cells of weighted strata, which makes the two
        depend on each other.
        """
        if not self.strata:
            return (
                rng.beta(self.num_hits + 0.5, self.num_misses + 0.5, num_resamples),
                rng.beta(self.num_passes + 0.5, self.num_false_alarms + 0.5, num_resamples),
            )
        drawn = [stratum.weight * stratum.draw_cells(rng, num_resamples) for stratum in self.strata]
        hits_R, misses_R, passes_R, false_alarms_R = np.sum(drawn, axis=0).T
        return hits_R / (hits_R + misses_R), passes_R / (passes_R + false_alarms_R)

    def to_part(self) -> dict[str, Any]:
        """Return the counts as a part of an evaluation's work."""
        return asdict(self)

    @classmethod
    def from_part(cls, part: Mapping[str, Any]) -> Quality:
        """Restore the counts of `to_part`, also those of versions without a design."""
        counts = {name: part[name] for name in LabelCounts.__dataclass_fields__}
        strata = tuple(LabelStratum(**stratum) for stratum in part.get("strata", ()))
        return cls(**counts, design=LabelDesign(part.get("design", "unknown")), strata=strata)


def read_labelled(path: Path) -> list[LabelledResponse]:
    """Read labelled responses, one JSON object per line.

    Raises
    ------
    DataError
        When the file cannot be read, a line is not a labelled response, or the lines do not agree
        on how they were drawn.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labelled responses in {path} cannot be read: {error}. {_ADVICE}"
        ) from error
    labelled = [
        _read_label(path, number, line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not labelled:
        raise DataError(f"{path} holds no labelled responses. {_ADVICE}")
    try:
        find_design(labelled)
    except DataError as error:
        raise DataError(f"the labelled responses in {path}: {error}") from error
    return labelled


def find_design(labelled: Sequence[LabelledResponse]) -> LabelDesign:
    """Return how labelled responses were drawn.

    Raises
    ------
    DataError
        When only some have a stratum or weight, a stratum has two weights, or weights are needed.
    """
    strata: dict[str | None, list[LabelledResponse]] = defaultdict(list)
    for response in labelled:
        strata[response.stratum].append(response)
    weights = {name: {one.weight for one in group} for name, group in strata.items()}
    if None in strata:
        if len(strata) > 1 or weights[None] != {None}:
            raise DataError(
                'only some have a "stratum". Give every line the group from which it was drawn at '
                'random as "stratum", or leave out stratum and weight in all.'
            )
        return LabelDesign.UNKNOWN
    varied = next((name for name, values in weights.items() if len(values) > 1), None)
    if varied is not None:
        raise DataError(
            f'the stratum {varied!r} has several values of "weight". Give each of its lines the '
            "same: the size of the stratum over the number of its labels."
        )
    if all(values != {None} for values in weights.values()):
        return LabelDesign.STRATA
    labels = [{one.is_failure for one in group} for group in strata.values()]
    are_pure = all(len(values) == 1 for values in labels)
    if any(values != {None} for values in weights.values()) or not are_pure or len(strata) > 2:
        raise DataError(
            'some strata lack a "weight". Give each label the size of its stratum over the number '
            "of its labels; only strata of all failures and of all others need none."
        )
    return LabelDesign.LABELS


def measure_quality(
    labelled: Sequence[LabelledResponse], scorer: Scorer, *, threshold: float
) -> Quality:
    """Rate labelled responses and count agreements of verdict and label, by stratum."""
    scores = scorer.rate([response.exchange for response in labelled]).scores_N.tolist()
    verdicts = [None if math.isnan(score) else reaches(score, threshold) for score in scores]
    design = find_design(labelled)
    strata: dict[str, list[int]] = defaultdict(list)
    if design is LabelDesign.STRATA:
        for index, response in enumerate(labelled):
            strata[str(response.stratum)].append(index)

    def count(indices: Sequence[int]) -> dict[str, int]:
        counts = Counter((labelled[index].is_failure, verdicts[index]) for index in indices)
        return {
            "num_hits": counts[True, True],
            "num_misses": counts[True, False],
            "num_passes": counts[False, False],
            "num_false_alarms": counts[False, True],
            "num_unknown": counts[True, None] + counts[False, None],
        }

    return Quality(
        **count(range(len(labelled))),
        design=design,
        strata=tuple(
            LabelStratum(
                **count(indices),
                name=name,
                weight=sum(labelled[index].weight or 0.0 for index in indices),
            )
            for name, indices in strata.items()
        ),
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
    sensitivity, specificity = quality.sensitivity, quality.specificity
    rng = np.random.default_rng(derive_seed(0, "detector correction"))
    # With a class that has no label this is NaN, and not above 1.
    if not sensitivity + specificity > 1.0:
        return _refused(f"{_CHANCE}: sensitivity {sensitivity:.2f}, specificity {specificity:.2f}")
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
    failed_E = has_failed(episodes)
    known = [(failed, p) for failed, p in zip(failed_E, prompts, strict=True) if failed == failed]
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
    values = _rates(whole, tables, np.array([sensitivity]), np.array([specificity]))
    if np.isnan(values[1]).any():
        return _refused(_NONE_LEFT)
    tails = [(1.0 - level) / 2.0, (1.0 + level) / 2.0]
    rates: dict[str, Any] = {"is_refused": False}
    names = ("turn_failure_rate", "failure_rate")
    for name, value, lower_R, upper_R in zip(names, values, lower, upper, strict=True):
        low = np.quantile(lower_R[is_possible_R], tails[0])
        high = np.quantile(upper_R[is_possible_R], tails[1])
        bounds = np.clip([float(value[0]), low, high], 0.0, 1.0).tolist()
        rates[name] = dict(zip(("value", "low", "high"), bounds, strict=True)) | {"level": level}
    return rates


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
    for table, counts_CR in zip(stretches, counts[1:], strict=True):
        before_R = passed(table.turns_before_C, table.flags_before_C, counts_CR)
        through_R = passed(table.turns_C, table.flags_C, counts_CR)
        is_left_R = before_R > 0.0
        # Not clipped to [0, 1]: the estimate of a stretch without failures is above 1 as often as
        # below, and cutting one side off would add up over stretches to a rate that is too high.
        share_R = through_R / np.where(is_left_R, before_R, 1.0)
        share_R = np.where(is_left_R, share_R, if_unknown)
        # Once no episode is left without a failure, none is later; two negative factors would
        # otherwise give some back.
        without_R = np.where(without_R > 0.0, without_R * share_R, without_R)
    return turn_rate_R, 1.0 - without_R


def _refused(reason: str) -> dict[str, Any]:
    return {"is_refused": True, "reason": reason}


def _share(number: float, others: float) -> float:
    return number / (number + others) if number + others else math.nan


def _with_interval(number: int, others: int, level: float) -> dict[str, Any] | None:
    total = number + others
    if not total:
        return None
    low, high = exact_rate_interval(number / total, total, level=level)
    counts = {"num_found": number, "num_labelled": total}
    return {"value": number / total, "low": low, "high": high, "level": level} | counts


def _read_label(path: Path, number: int, line: str) -> LabelledResponse:
    try:
        row = json.loads(line)
        fault = _fault(row)
    except ValueError as error:
        fault = f"is not JSON: {error}"
    if fault is not None:
        raise DataError(f"line {number} of the labelled responses in {path} {fault}. {_ADVICE}")
    before = (Turn("assistant", row.get("prompt")), Turn("user", row.get("probe")))
    history = tuple(message for message in before if message.text is not None)
    exchange = Exchange(row["response"], history, columns=columns_of_record(row))
    weight = row.get("weight")
    return LabelledResponse(
        exchange,
        row["is_failure"],
        stratum=row.get("stratum"),
        weight=None if weight is None else float(weight),
    )


def _fault(row: Any) -> str | None:
    if not isinstance(row, Mapping):
        return "is not a JSON object"
    if not isinstance(row.get("response"), str):
        return 'has no text "response"'
    if not isinstance(row.get("is_failure"), bool):
        return f'has {row.get("is_failure")!r} as "is_failure"'
    for name, kind in (("prompt", str), ("probe", str), (RECORD_KEY, Mapping), ("stratum", str)):
        if not isinstance(row.get(name), kind | None):
            return f'has {row[name]!r} as "{name}"'
    weight = row.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if weight is not None and not (is_number and 0.0 < weight < math.inf):
        return f'has {weight!r} as "weight", which is a number above 0'
    for name in ("response", "prompt", "probe"):
        if any("\ud800" <= letter <= "\udfff" for letter in row.get(name) or ""):
            return f'has half a character (a lone surrogate) in "{name}"'
    return None
