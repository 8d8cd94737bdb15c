"""The four outcomes of a turn and of an episode, and the failure rate that they give.

A scorer may give no verdict (undetermined) or fail (error). Neither enters a denominator, and
neither counts as a success of anybody. An episode is censored at its first turn without a verdict,
whatever comes after.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from nip_astra.utils.intervals import Estimate, event_rate_estimate, rate_estimate
from nip_astra.utils.statistics import FollowUp

MAX_UNKNOWN_SHARE = 0.05
"""A larger share of episodes without an outcome is warned of."""


class Outcome(StrEnum):
    """What became of a turn."""

    FAILURE = "failure"
    """The response's score reached the threshold."""
    NONE = "none"
    """The score stayed below it."""
    UNDETERMINED = "undetermined"
    """The scorer could not tell."""
    ERROR = "error"
    """The scorer failed."""

    @property
    def is_known(self) -> bool:
        """Whether there is a verdict."""
        return self in (Outcome.FAILURE, Outcome.NONE)


def outcome_of(score: float | None, is_error: bool, threshold: float) -> Outcome:
    """The outcome of a turn.

    Parameters
    ----------
    score : float or None
        The response's score; None or NaN where there is none. A score is a verdict even where
        another score of the same turn failed.
    """
    if score is not None and not math.isnan(score):
        return Outcome.FAILURE if score >= threshold else Outcome.NONE
    return Outcome.ERROR if is_error else Outcome.UNDETERMINED


def episode_outcome(turns: Sequence[Outcome]) -> Outcome:
    """The outcome of an episode, which is censored at its first turn without a verdict.

    A failure before that turn is one. A failure after it is not counted, since an episode without
    a failure would be left out for the same missing verdict, and the rate would be too high.
    """
    return next((outcome for outcome in turns if outcome is not Outcome.NONE), Outcome.NONE)


def follow_up_of(
    episodes: Sequence[Sequence[Outcome]],
    limits: Sequence[int] | None = None,
    *,
    horizon: int | None = None,
) -> FollowUp:
    """How far the outcomes of episodes are known, and where each first failed.

    An episode that ended before the longest one did not fail afterwards.

    Parameters
    ----------
    limits : Sequence[int], optional
        The last turn that counts, for each episode.
    horizon : int, optional
        The number of turns; that of the longest episode by default.
    """
    if horizon is None:
        horizon = max((len(turns) for turns in episodes), default=0)
    last, has_failed = [], []
    for place, turns in enumerate(episodes):
        limit = horizon if limits is None else min(limits[place], horizon)
        stops = (turn for turn, outcome in enumerate(turns, 1) if outcome is not Outcome.NONE)
        stop = next(stops, horizon + 1)
        is_event = stop <= limit and turns[stop - 1] is Outcome.FAILURE
        last.append(stop if is_event else min(stop - 1, limit))
        has_failed.append(is_event)
    return FollowUp(last, has_failed, horizon)


@dataclass(frozen=True)
class FailureRate:
    """The share of episodes with a failure.

    Attributes
    ----------
    estimate : Estimate
        One minus the survival estimate through the last turn, with an interval over opening
        prompts. Where every verdict is known, the share of episodes that failed.
    num_failed, num_known, num_episodes : int
        Episodes that failed before a verdict was missing, that failed or passed, and all of them.
    if_unknown_passed, if_unknown_failed : float
        The share with a failure if all missing verdicts had been passes, or failures.
    lowest, highest : float
        The lower end of the interval of the first, and the upper end of that of the second: bounds
        for whatever the missing verdicts were.
    """

    estimate: Estimate
    num_failed: int
    num_known: int
    num_episodes: int
    if_unknown_passed: float
    if_unknown_failed: float
    lowest: float
    highest: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON file, those of the estimate among them."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return self.estimate.to_dict() | counts


def failure_rate(
    episodes: Sequence[Sequence[Outcome]], prompts: Sequence[int], *, level: float = 0.95
) -> FailureRate:
    """The share of episodes with a failure, each censored at its first turn without a verdict.

    Parameters
    ----------
    episodes : Sequence of Sequence of Outcome
        The outcomes of each episode's turns, in order.
    prompts : Sequence[int]
        The opening prompt of each episode; any integers.
    """
    found = [episode_outcome(turns) for turns in episodes]
    least = [float(Outcome.FAILURE in turns) for turns in episodes]
    most = [float(any(turn is not Outcome.NONE for turn in turns)) for turns in episodes]
    low, high = (rate_estimate(shares, prompts, level=level) for shares in (least, most))
    return FailureRate(
        event_rate_estimate(follow_up_of(episodes), prompts, level=level),
        num_failed=found.count(Outcome.FAILURE),
        num_known=sum(outcome.is_known for outcome in found),
        num_episodes=len(episodes),
        if_unknown_passed=low.value,
        if_unknown_failed=high.value,
        lowest=low.low,
        highest=high.high,
    )


def unknown_warning(rate: Mapping[str, Any], outcomes: Mapping[str, int]) -> str | None:
    """Warn of many episodes without an outcome; None where there are few.

    Parameters
    ----------
    rate : Mapping
        A failure rate's plain values.
    outcomes : Mapping
        Turns by outcome.
    """
    num_episodes = rate["num_episodes"]
    num_unknown = num_episodes - rate["num_known"]
    if num_unknown <= MAX_UNKNOWN_SHARE * num_episodes:
        return None
    num_turns = outcomes[Outcome.UNDETERMINED] + outcomes[Outcome.ERROR]
    return (
        f"{num_unknown} of {num_episodes} conversations lack a verdict ({num_turns} turns, "
        f"{outcomes[Outcome.ERROR]} scorer errors); the failure rate assumes that verdicts are "
        f"missing at random, else it lies anywhere from {rate['if_unknown_passed']:.1%} to "
        f"{rate['if_unknown_failed']:.1%}"
    )
