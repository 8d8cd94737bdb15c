"""A scorer made of a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nip_astra.scorers.base import Exchange, Scorer, Verdict
from tests.kit.tiny import CPU


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
