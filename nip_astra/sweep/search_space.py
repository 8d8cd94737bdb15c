"""What a search may try: ranges and choices of parameters, and how trials are proposed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from nip_astra.errors import ConfigurationError
from nip_astra.parameters.parameters_base import MAX_WHOLE, SubParameters

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_MAX_DIGITS = 19
_RANGE = re.compile(rf"(log\s+)?({_NUMBER})\.\.({_NUMBER})")


class Range(SubParameters):
    """Numbers from `low` to `high`, both included; whole ones where both ends are."""

    low: int | float
    """Lowest number."""
    high: int | float
    """Highest number."""
    is_log: bool = False
    """Whether numbers are drawn evenly by their logarithm, as suits learning rates."""

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"must have a low, {self.low}, below its high, {self.high}")
        if self.is_log and self.low <= 0:
            raise ValueError(f"has logarithms only above 0, but its low is {self.low}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are tried."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Choice = Range | list[Any]


class SearchParameters(SubParameters):
    """A search for the values of parameters that give most of a figure.

    A path that begins with the name of one of the sweep's trainers is of that trainer's trials
    alone.
    """

    space: Mapping[str, Choice] = {}
    """For each parameter a range, or a list of values. Trainers and scenarios of the sweep, and
    lists of its grid, are tried as well."""
    num_trials: int = Field(default=20, ge=1)
    """Trials in all, those included that were pruned or failed."""
    sampler: Literal["tpe", "random"] = "tpe"
    """tpe proposes what is near to the best trials so far; random does not look at them."""
    pruner: Literal["median", "halving", "none"] = "median"
    """Which trials are stopped early by their dev evaluations: those worse than the median of the
    others at the same iteration, all but the best by successive halving, or none."""
    num_startup_trials: int = Field(default=5, ge=0)
    """Trials at random before tpe proposes, and whole ones before median prunes."""
    objective: str | None = None
    """Figure that is searched for: a name in metrics.jsonl such as dev/failure_rate, the best of a
    run; null for dev/ and the trainer's dev_metric. A name without dev/ is taken from results.json,
    after training, and is not pruned by."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether more of it is better, or less."""
    seed: int = Field(default=0, le=MAX_WHOLE)
    """Root of what is proposed; not the seed of the runs."""


def space_of(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ranges by parameter of `a.b=1..8`, `a.b=log 1e-5..1e-3`.

    Raises
    ------
    ConfigurationError
        When one is no range, or a parameter is given twice.
    """
    space: dict[str, dict[str, Any]] = {}
    for assignment in assignments:
        path, _, said = (part.strip() for part in assignment.partition("="))
        found = _RANGE.fullmatch(said)
        if not path or found is None or path in space:
            raise ConfigurationError(
                f"--search {assignment!r} was to give the range of one parameter each, but it "
                f"{'names a parameter again' if path in space else 'is no range'}. Write --search "
                "'training.lr=log 1e-5..1e-3' or --search training.num_epochs=1..4; values that "
                "are no range are tried by --set a.b=x,y."
            )
        space[path] = {
            "low": _number(found[2]),
            "high": _number(found[3]),
            "is_log": found[1] is not None,
        }
    return space


def whole_number(text: str) -> int | None:
    """The number that a text of digits is, 0 or more; None for any other text."""
    digits = text.strip()
    return int(digits) if digits.isdecimal() and len(digits) < _MAX_DIGITS else None


def _number(text: str) -> int | float:
    whole = whole_number(text.lstrip("+-"))
    return float(text) if whole is None else -whole if text.startswith("-") else whole
