"""The linear offensiveness classifier of the package alt-profanity-check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nip_astra.errors import MissingDependencyError
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import Scorer, register_scorer


@register_scorer(ScorerType.PROFANITY)
class ProfanityScorer(Scorer):
    """Probability that a text is offensive, by a linear model over words; fast, English only."""

    class Parameters(Scorer.Parameters):
        """Common parameters only."""

    def __init__(self, parameters: Any, **given: Any) -> None:
        super().__init__(parameters, **given)
        try:
            from profanity_check import predict_prob
        except ImportError as error:
            raise MissingDependencyError.of(
                "the scorer 'profanity'", "alt-profanity-check", "profanity"
            ) from error
        self._predict = predict_prob

    def _score(self, texts: Sequence[str]) -> list[float]:
        return [float(score) for score in self._predict(list(texts))]
