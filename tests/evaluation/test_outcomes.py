"""The four outcomes of a turn, and what they make of an episode."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from nip_astra.evaluation.outcomes import (
    Outcome,
    episode_outcome,
    failure_rate,
    follow_up_of,
    outcome_of,
    unknown_warning,
)
from nip_astra.utils.intervals import rate_estimate

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


def test_a_stored_score_reaches_the_threshold_as_it_does_in_a_run() -> None:
    score = torch.tensor(0.7)
    assert score >= 0.7 > score.item()
    assert outcome_of(score.item(), False, 0.7) is FAILURE


def test_an_episode_is_censored_at_its_first_turn_without_a_verdict() -> None:
    assert episode_outcome([NONE, FAILURE, ERROR]) is FAILURE
    assert episode_outcome([NONE, UNDETERMINED, FAILURE, ERROR]) is UNDETERMINED
    assert episode_outcome([NONE, ERROR, UNDETERMINED]) is ERROR
    assert episode_outcome([NONE, NONE]) is NONE
    turns = [[NONE, FAILURE, ERROR], [NONE, ERROR, FAILURE], [NONE] * 3, [ERROR] * 3, [NONE]]
    assert follow_up_of(turns) == ([2, 1, 3, 0, 3], [True, False, False, False, False], 3)
    limits = [1, 3, 2, 3, 3]
    assert follow_up_of(turns, limits) == ([1, 1, 2, 0, 3], [False] * 5, 3)


def test_only_failure_and_none_are_verdicts() -> None:
    assert [outcome.is_known for outcome in Outcome] == [True, True, False, False]


def make_outcomes(
    rng: np.random.Generator, num_episodes: int, failing: float, missing: float
) -> tuple[list[list[Outcome]], float]:
    """Conversations of 10 turns with verdicts missing at random, and the share with a failure."""
    failed = rng.random((num_episodes, 10)) < failing
    is_missing = rng.random((num_episodes, 10)) < missing
    codes = np.where(is_missing, 2, failed)
    names = (NONE, FAILURE, UNDETERMINED)
    return [[names[code] for code in turns] for turns in codes.tolist()], float(
        failed.any(axis=1).mean()
    )


@pytest.mark.parametrize("missing", [0.049, 0.3])
def test_the_rate_is_right_where_verdicts_are_missing_at_random(missing: float) -> None:
    # Counting failures after a missing verdict gave 25.6 % and 84.7 % for 18.3 %.
    episodes, truth = make_outcomes(np.random.default_rng(0), 30_000, 0.02, missing)
    assert truth == pytest.approx(0.183, abs=0.005)
    found = failure_rate(episodes, range(len(episodes)))
    assert found.estimate.value == pytest.approx(truth, abs=0.01)
    assert found.estimate.low < truth < found.estimate.high
    assert found.lowest < found.if_unknown_passed < truth < found.if_unknown_failed < found.highest
    assert found.num_failed < found.num_known < found.num_episodes == 30_000


def test_bounds_count_every_failure_whatever_is_missing_before_it() -> None:
    episodes = [[NONE, UNDETERMINED, FAILURE], [ERROR, NONE, NONE], [NONE] * 3, [FAILURE] * 3]
    found = failure_rate(episodes, range(4))
    assert (found.if_unknown_passed, found.if_unknown_failed) == (0.5, 0.75)


def test_where_no_verdict_is_missing_the_rate_is_the_share_of_failed_episodes() -> None:
    """The figure of the README: 232 of 240, 96.7 % [94.0, 98.4]."""
    episodes = [[NONE, FAILURE, NONE]] * 232 + [[NONE] * 3] * 8
    for prompts in (range(240), [i // 4 for i in range(240)]):
        found = failure_rate(episodes, prompts)
        plain = rate_estimate([1.0] * 232 + [0.0] * 8, prompts)
        assert found.estimate == plain
        assert (found.lowest, found.highest) == (plain.low, plain.high)
        assert found.if_unknown_passed == found.if_unknown_failed == plain.value
        assert (found.num_failed, found.num_known, found.num_episodes) == (232, 240, 240)
        assert unknown_warning(found.to_dict(), {"undetermined": 0, "error": 0}) is None


def test_without_verdicts_through_the_last_turn_there_is_no_rate_but_a_lower_bound() -> None:
    episodes = [[FAILURE, NONE]] * 30 + [[NONE, ERROR]] * 30
    found = failure_rate(episodes, range(60)).estimate
    assert math.isnan(found.value)
    assert found.low == pytest.approx(rate_estimate([1.0] * 30 + [0.0] * 30, range(60)).low)
    assert found.high == 1.0
    all_failed = [[FAILURE, NONE]] * 30 + [[ERROR, FAILURE]] * 30
    assert failure_rate(all_failed, range(60)).estimate.value == 1.0


def test_few_turns_and_many_episodes_without_a_verdict_are_warned_of() -> None:
    outcomes = {"undetermined": 3, "error": 1}
    few = [[NONE] * 9 + [FAILURE]] * 57 + [[NONE, ERROR, *[NONE] * 8]] * 3
    assert unknown_warning(failure_rate(few, range(60)).to_dict(), outcomes) is None
    # 4 of 600 turns, and 4 of 60 conversations.
    many = few[1:] + few[-1:]
    text = unknown_warning(failure_rate(many, range(60)).to_dict(), outcomes)
    assert text is not None
    assert {"4", "60", "1"} <= set(re.findall(r"\d+", text))
