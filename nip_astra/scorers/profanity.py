"""The linear offensiveness classifier of the package alt-profanity-check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nip_astra.lazy import import_extra
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import Scorer, register_scorer


@register_scorer(ScorerType.PROFANITY)
class ProfanityScorer(Scorer):
    """Probability that a text is offensive, by a linear model over words; fast, English only."""

    def __init__(self, parameters: Any, **keywords: Any) -> None:
        super().__init__(parameters, **keywords)
        package = import_extra("profanity_check", "the scorer 'profanity'", "profanity")
        self._predict = package.predict_prob

    def _score(self, texts: Sequence[str]) -> list[float]:
        return [float(score) for score in self._predict(list(texts))]
