"""Scorers on the CPU, and a scorer made of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from nip_astra.scorers.base import Exchange, Message, Scorer, Verdict
from tests.kit.tiny import CPU

AnyScorer = TypeVar("AnyScorer", bound=Scorer)
HISTORY = (Message("assistant", "good day"), Message("user", "hello you"))
"""Messages before a rated text."""


def scorer_on_cpu(
    kind: type[AnyScorer], scenario_dir: Path | None = None, **parameters: Any
) -> AnyScorer:
    """A scorer with parameters as in a parameter file."""
    given = kind.Parameters.from_dict(parameters)
    return kind(given, device=CPU, scenario_dir=scenario_dir)


class ScorerOf(Scorer):
    """Rates by a function of the exchange, and records the exchanges."""

    def __init__(
        self, verdict: Callable[[Exchange], Verdict], *, reads_history: bool = False
    ) -> None:
        super().__init__(Scorer.Parameters(), device=CPU)
        self.verdict, self.reads_history = verdict, reads_history
        self.seen: list[Exchange] = []

    def _score(self, texts: Sequence[str]) -> Sequence[Verdict]:
        assert not self.reads_history
        return self._score_exchanges([Exchange(text) for text in texts])

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> Sequence[Verdict]:
        self.seen += exchanges
        return [self.verdict(exchange) for exchange in exchanges]
