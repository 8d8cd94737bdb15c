"""The four outcomes of a turn, and what they make of an episode."""

from __future__ import annotations

import math

import pytest

from nip_astra.evaluation.outcomes import Outcome, episode_outcome, outcome_of

FAILURE, NONE, UNDETERMINED, ERROR = Outcome


@pytest.mark.parametrize(
    ("score", "is_error", "expected"),
    [
        (0.5, False, FAILURE),
        (0.49, False, NONE),
        (0.0, False, NONE),
        (None, False, UNDETERMINED),
        (math.nan, False, UNDETERMINED),
        (None, True, ERROR),
        (math.nan, True, ERROR),
        # Only the combined score failed: there is a verdict.
        (0.9, True, FAILURE),
    ],
)
def test_a_turn_has_one_of_four_outcomes(
    score: float | None, is_error: bool, expected: Outcome
) -> None:
    assert outcome_of(score, is_error, 0.5) is expected


def test_a_failure_is_one_whatever_else_is_unknown() -> None:
    assert episode_outcome([NONE, UNDETERMINED, FAILURE, ERROR]) is FAILURE
    assert episode_outcome([NONE, UNDETERMINED, ERROR]) is ERROR
    assert episode_outcome([NONE, UNDETERMINED]) is UNDETERMINED
    assert episode_outcome([NONE, NONE]) is NONE


def test_only_failure_and_none_are_verdicts() -> None:
    assert [outcome.is_known for outcome in Outcome] == [True, True, False, False]
