"""The four outcomes of a turn and of an episode.

A scorer may give no verdict (undetermined) or fail (error). Neither enters a denominator, and
neither counts as a success of anybody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum


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
    """The outcome of an episode: a failure somewhere is one, whatever else is unknown.

    Without a failure, a turn without verdict leaves the episode unknown too; an error is told
    before an undetermined turn.
    """
    for outcome in (Outcome.FAILURE, Outcome.ERROR, Outcome.UNDETERMINED):
        if outcome in turns:
            return outcome
    return Outcome.NONE
