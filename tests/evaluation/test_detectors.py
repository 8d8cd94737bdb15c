"""Accuracy of scorers on labelled responses, and rates corrected for their errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nip_astra.errors import DataError
from nip_astra.evaluation.detectors import (
    LabelDesign,
    LabelStratum,
    Quality,
    corrected_rates,
    find_design,
    measure_quality,
    read_labelled,
)
from nip_astra.evaluation.storage import Episode
from nip_astra.scorers.base import Message
from nip_astra.utils.intervals import exact_rate_interval
from tests.evaluation.rows_by_hand import episode, judged
from tests.kit.scorers import ScorerOf

OPTIONS: dict[str, Any] = {"num_resamples": 300, "level": 0.95}


def flagged(number: int, flags: Sequence[bool], prompt: str = "hello") -> Episode:
    return episode(number, [0.9 if flag else 0.1 for flag in flags], prompt=prompt)


def test_rates_are_those_worked_out_by_hand() -> None:
    # Of single turns that of Rogan and Gladen: (.10 + .97 - 1) / (.95 + .97 - 1).
    singles = judged(*(flagged(i, [i < 10], prompt=str(i)) for i in range(100)))
    result = corrected_rates(singles, Quality(95, 5, 97, 3), **OPTIONS)
    for name in ("turn_failure_rate", "failure_rate"):
        assert result[name]["value"] == pytest.approx(0.07 / 0.92)
        assert 0.0 <= result[name]["low"] < 0.07 / 0.92 < result[name]["high"] < 0.25
    # Of 64 episodes of two turns, 16 fail at the first and 16 at both; Se = Sp = 3/4.
    episodes: list[Episode] = []
    for truth in ([True, False], [True, True], [False, False], [False, False]):
        for first, second in product(range(4), repeat=2):
            # Each verdict is right in three cases of four.
            errs = (first == 0, second == 0)
            flags = [real is not wrong for real, wrong in zip(truth, errs, strict=True)]
            episodes.append(flagged(len(episodes), flags, prompt=str(len(episodes))))
    result = corrected_rates(judged(*episodes), Quality(75, 25, 75, 25), **OPTIONS)
    assert result["turn_failure_rate"]["value"] == pytest.approx(3 / 8)
    assert result["failure_rate"]["value"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(
    ("quality", "reason"),
    [
        (Quality(5, 5, 5, 5), "sensitivity 0.50, specificity 0.50"),
        (Quality(0, 10, 9, 1), "sensitivity 0.00, specificity 0.90"),
        (Quality(0, 0, 9, 1), "sensitivity nan, specificity 0.90"),
        (Quality(2, 1, 2, 1), "there are too few of them"),
    ],
)
def test_a_scorer_that_may_be_no_better_than_chance_is_not_corrected_for(
    quality: Quality, reason: str
) -> None:
    result = corrected_rates(judged(flagged(0, [True])), quality, **OPTIONS)
    assert result["is_refused"] is True
    assert result["reason"].endswith(reason)
    # Without a verdict through the last turn nothing is corrected.
    failing = [flagged(i, [True, False], prompt=str(i)) for i in range(4)]
    unknown = [episode(i, [0.1, None], prompt=str(i)) for i in range(4, 8)]
    for episodes in (unknown, [*failing, *unknown]):
        assert corrected_rates(judged(*episodes), Quality(90, 10, 90, 10), **OPTIONS)["is_refused"]


def test_a_corrected_rate_is_right_where_verdicts_are_missing_at_random() -> None:
    rng = np.random.default_rng(0)
    failed = rng.random((6000, 5)) < 0.05
    flags = np.where(failed, rng.random(failed.shape) < 0.9, rng.random(failed.shape) < 0.02)
    scores = np.where(rng.random(failed.shape) < 0.3, np.nan, flags).tolist()
    episodes = judged(*(episode(i, row, prompt=str(i)) for i, row in enumerate(scores)))
    result = corrected_rates(episodes, Quality(9000, 1000, 9800, 200), **OPTIONS)
    truth = (failed.mean(), failed.any(axis=1).mean())
    for name, share in zip(("turn_failure_rate", "failure_rate"), truth, strict=True):
        assert result[name]["value"] == pytest.approx(share, abs=0.02)
        assert result[name]["low"] < share < result[name]["high"]


def test_without_errors_a_corrected_rate_has_the_exact_interval() -> None:
    quality = Quality(10**7, 0, 10**7, 0)
    options = OPTIONS | {"num_resamples": 20_000}
    for num_failing in (0, 3, 30):
        episodes = judged(*(flagged(i, [i < num_failing], prompt=str(i)) for i in range(30)))
        result = corrected_rates(episodes, quality, **options)
        expected = exact_rate_interval(num_failing / 30, 30)
        for name in ("turn_failure_rate", "failure_rate"):
            assert (result[name]["low"], result[name]["high"]) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("num_prompts", "num_played", "rate"), [(20, 1, 0.02), (5, 4, 0.3)])
def test_neither_bound_of_a_corrected_rate_errs_often(
    num_prompts: int, num_played: int, rate: float
) -> None:
    """Prompts differ in their failure rates, and quality is estimated from 80 labels each."""
    rng = np.random.default_rng(3)
    below = above = 0
    for _ in range(120):
        own = rng.beta(2.0 * rate, 2.0 * (1.0 - rate), size=num_prompts).repeat(num_played)
        failing = rng.random(len(own)) < own
        verdicts = np.where(failing, rng.random(len(own)) < 0.9, rng.random(len(own)) > 0.95)
        episodes = judged(
            *(flagged(i, [item], str(i // num_played)) for i, item in enumerate(verdicts.tolist()))
        )
        hits, passes = int(rng.binomial(80, 0.9)), int(rng.binomial(80, 0.95))
        quality = Quality(hits, 80 - hits, passes, 80 - passes)
        result = corrected_rates(episodes, quality, **OPTIONS)["failure_rate"]
        below += result["low"] > rate
        above += result["high"] < rate
    assert max(below, above) <= 7


def test_labels_drawn_by_verdict_count_with_the_size_of_their_stratum() -> None:
    # Of 1000 responses 180 are flagged, half of them failures; one of 100 others is one too.
    flagged_ones = LabelStratum(50, 0, 0, 50, name="flagged", weight=180.0)
    others = LabelStratum(0, 1, 99, 0, name="others", weight=820.0)
    quality = Quality(50, 1, 99, 50, design=LabelDesign.STRATA, strata=(flagged_ones, others))
    assert quality.sensitivity == pytest.approx(90.0 / 98.2)
    assert quality.specificity == pytest.approx(811.8 / 901.8)
    assert Quality.from_part(json.loads(json.dumps(quality.to_part()))) == quality
    turns = judged(*(flagged(i, [i < 180], prompt=str(i)) for i in range(1000)))
    rates = corrected_rates(turns, quality, **OPTIONS)["turn_failure_rate"]
    # The share of failures among the flagged ones and among the others, each with its size.
    assert rates["value"] == pytest.approx(0.0982)
    assert 0.05 < rates["low"] < 0.0982 < rates["high"] < 0.16
    shown = quality.to_dict(0.95)
    assert shown["sensitivity"]["low"] < 90.0 / 98.2 < shown["sensitivity"]["high"]
    # Counted alike, the same labels show a scorer that finds no failure at all.
    alike = corrected_rates(turns, Quality(50, 1, 99, 50), **OPTIONS)["turn_failure_rate"]
    assert alike["high"] < 0.0982


def test_a_single_stratum_counts_as_a_random_sample() -> None:
    counts = (40, 10, 30, 20)
    one = Quality(*counts, design=LabelDesign.STRATA, strata=(LabelStratum(*counts, weight=7.0),))
    plain = Quality(*counts)
    assert (one.sensitivity, one.specificity) == pytest.approx(
        (plain.sensitivity, plain.specificity)
    )
    drawn = (quality.draw(np.random.default_rng(0), 100_000) for quality in (one, plain))
    for first_R, second_R in zip(*drawn, strict=True):
        quantiles = [0.025, 0.5, 0.975]
        expected = np.quantile(second_R, quantiles).tolist()
        assert np.quantile(first_R, quantiles).tolist() == pytest.approx(expected, abs=0.005)


def test_an_estimate_above_1_is_not_cut_off_before_the_last_turn() -> None:
    """No turn fails: stretches between missing verdicts err to both sides, and do not add up."""
    rng = np.random.default_rng(0)
    values = []
    for _ in range(20):
        scores = (rng.random((200, 8)) < 0.1).astype(float)
        scores = np.where(rng.random(scores.shape) < 0.1, np.nan, scores)
        episodes = judged(
            *(episode(i, row, prompt=str(i)) for i, row in enumerate(scores.tolist()))
        )
        result = corrected_rates(episodes, Quality(900, 100, 900, 100), **OPTIONS)
        values.append(result["failure_rate"]["value"])
    # Half of the estimates are below 0, hence shown as 0.
    assert 5 <= values.count(0.0) <= 15


def test_labels_are_counted_against_verdicts_and_missing_labels_are_in_no_rate(
    tmp_path: Path,
) -> None:
    labels = {"rude .": True, "fine .": True, "odd rude": True, "good .": False, "not rude": False}
    rows: list[dict[str, Any]] = [
        {"response": text, "is_failure": is_failure} for text, is_failure in labels.items()
    ]
    # Line breaks of Unicode end no row.
    rows[0] |= {"probe": "well\u2028\x85?", "prompt": "hi !", "prompt_columns": {"goal": "rude"}}
    path = tmp_path / "labels.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    scorer = ScorerOf(
        lambda e: None if "odd" in e.text else 0.9 if "rude" in e.text else 0.1, reads_history=True
    )
    quality = measure_quality(read_labelled(path), scorer, threshold=0.5)
    assert quality == Quality(1, 1, 1, 1, num_unknown=1)
    figures = quality.to_dict(0.95)
    assert figures["sensitivity"] == {
        "value": 0.5, "level": 0.95, **exact_rate_interval(0.5, 2)._asdict(),
        "num_found": 1, "num_labelled": 2,
    }  # fmt: skip
    assert (figures["num_failures"], figures["num_others"], figures["num_unknown"]) == (2, 2, 1)
    assert Quality(0, 0, 1, 0).to_dict(0.95)["sensitivity"] is None
    assert scorer.seen[0].history == (
        Message("assistant", "hi !"),
        Message("user", "well\u2028\x85?"),
    )
    assert scorer.seen[0].columns == (("goal", "rude"),)
    for number, row in enumerate(rows):
        row |= {"stratum": "long" if number % 2 else "short", "weight": 2 if number % 2 else 5.5}
    path.write_text("\n".join(map(json.dumps, rows)))
    quality = measure_quality(read_labelled(path), scorer, threshold=0.5)
    assert quality.design is LabelDesign.STRATA
    sizes = {stratum.name: stratum.weight for stratum in quality.strata}
    assert sizes == {"short": 3 * 5.5, "long": 2 * 2.0}


@pytest.mark.parametrize(
    ("labels", "design"),
    [
        ([(True, None, None), (False, None, None)], LabelDesign.UNKNOWN),
        ([(True, "failures", None), (False, "others", None)], LabelDesign.LABELS),
        ([(True, "flagged", 1.5), (False, "flagged", 1.5), (False, "not", 8)], LabelDesign.STRATA),
        ([(True, "flagged", None), (False, None, None)], None),
        ([(True, None, 2.0), (False, None, 2.0)], None),
        ([(True, "flagged", 2.0), (False, "flagged", 3.0)], None),
        ([(True, "flagged", None), (False, "flagged", None)], None),
        ([(True, "flagged", 2.0), (False, "not", None)], None),
    ],
)
def test_the_design_of_labels_is_known_from_their_strata(
    tmp_path: Path, labels: list[tuple[bool, Any, Any]], design: LabelDesign | None
) -> None:
    path = tmp_path / "labels.jsonl"
    rows = [
        {"response": "a", "is_failure": failed, "stratum": stratum, "weight": weight}
        for failed, stratum, weight in labels
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    if design is None:
        with pytest.raises(DataError) as caught:
            read_labelled(path)
        assert '"stratum"' in str(caught.value) or '"weight"' in str(caught.value)
        return
    assert find_design(read_labelled(path)) is design


LABELLED = {"response": "a", "is_failure": True}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"is_failure": true}', '"response"'),
        (json.dumps(LABELLED | {"is_failure": 1}), '1 as "is_failure"'),
        (json.dumps(LABELLED | {"probe": 3}), '3 as "probe"'),
        (json.dumps(LABELLED | {"stratum": 3}), '3 as "stratum"'),
        (json.dumps(LABELLED | {"weight": 0}), '0 as "weight"'),
        (json.dumps(LABELLED | {"weight": True}), 'True as "weight"'),
        (json.dumps(LABELLED | {"prompt_columns": 3}), '3 as "prompt_columns"'),
        *(
            (json.dumps(LABELLED | {name: "a\ud800"}), f'surrogate) in "{name}"')
            for name in ("response", "prompt", "probe")
        ),
        ("\n", "holds no labelled"),
        (None, "cannot be read"),
    ],
)
def test_a_file_without_labels_is_refused(tmp_path: Path, text: str | None, fact: str) -> None:
    if text is not None:
        (tmp_path / "labels.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        read_labelled(tmp_path / "labels.jsonl")
    assert fact in str(caught.value)
    assert '"response", "is_failure"' in str(caught.value)
