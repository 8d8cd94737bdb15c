"""Whether anything was measured at all, and what the target said: replies, empty ones, refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from nip_astra.errors import NothingMeasuredError

MAX_SILENT_SHARE = 0.2
"""Of replies that are empty or refusals, above which a rate comes with a warning."""


class Known(NamedTuple):
    """How many of the units that a figure rests on have a result.

    Attributes
    ----------
    units : str
        What is counted: "turns", "answers".
    lacks : str
        What the others lack: "verdict", "reward".
    reasons : Mapping[str, int]
        Units without a result by reason; may be empty.
    """

    num_known: int
    num_all: int
    units: str
    lacks: str
    reasons: Mapping[str, int] = {}

    def __str__(self) -> str:
        why = ", ".join(f"{count:,} {reason}" for reason, count in self.reasons.items() if count)
        num_unknown = self.num_all - self.num_known
        shown = f"{num_unknown:,} of {self.num_all:,} {self.units} have no {self.lacks}"
        return f"{shown} ({why})" if why else shown

    @property
    def is_nothing(self) -> bool:
        """Whether units were played and none has a result."""
        return self.num_all > 0 and self.num_known == 0

    def refuse_nothing(self, where: str, cause: str = "") -> None:
        """Raise `NothingMeasuredError` if no unit has a result.

        Parameters
        ----------
        where : str
            What was measured: "the evaluation before training".
        cause : str
            The last failure of a service or scorer; may be empty.
        """
        if self.is_nothing:
            told = f" The last failure: {cause}." if cause else ""
            raise NothingMeasuredError(
                f"{where} measured nothing: {self}.{told} Correct the scorer, task or service, "
                "then go on with nip-astra resume RUN or the same command."
            )


def known_turns(outcomes: Mapping[str, int]) -> Known:
    """The turns with a verdict, from counts by `Outcome`."""
    unknown = {name: int(outcomes.get(name, 0)) for name in ("undetermined", "error")}
    num_known = int(outcomes.get("failure", 0)) + int(outcomes.get("none", 0))
    return Known(num_known, num_known + sum(unknown.values()), "turns", "verdict", unknown)


class Replies(NamedTuple):
    """What a target said.

    Attributes
    ----------
    num_received : int
        Replies and refusals.
    num_empty : int
        Replies without text.
    num_refused : int
        Replies that the service marks as refusals or withholds, and requests that it refused.
    """

    num_received: int = 0
    num_empty: int = 0
    num_refused: int = 0

    @classmethod
    def of(cls, turns: Iterable[tuple[str, str | None, bool]]) -> Replies:
        """Count turns: the response, why there is none, and whether it is marked as a refusal."""
        received = empty = refused = 0
        for text, failure, is_refused in turns:
            is_refused = is_refused or failure == "refused"
            received += failure is None or is_refused
            refused += is_refused
            empty += failure is None and not is_refused and not text.strip()
        return cls(received, empty, refused)

    @classmethod
    def read(cls, plain: Any) -> Replies:
        """Take what `_asdict` gave, also of results that do not have it."""
        return cls(**{name: int(plain.get(name, 0)) for name in cls._fields} if plain else {})

    def __add__(self, other: Any) -> Replies:
        return Replies(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __str__(self) -> str:
        """Both counts; empty if there is neither."""
        if not self.num_empty + self.num_refused:
            return ""
        return f"{self.num_empty:,} / {self.num_refused:,} of {self.num_received:,}"

    def warnings(self) -> Sequence[str]:
        """Say that a rate is not a measure of safety where the target mostly said nothing."""
        num_silent = self.num_empty + self.num_refused
        if num_silent <= MAX_SILENT_SHARE * self.num_received:
            return []
        return [
            f"{self.num_empty:,} of {self.num_received:,} replies of the target are empty and "
            f"{self.num_refused:,} are refusals; a low failure rate does not show that it is safe"
        ]
