"""The weighted mean of several scorers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from nip_astra.errors import ScorerError
from nip_astra.parameters.parameters_base import SubParameters, polymorphic
from nip_astra.parameters.types import ScorerType
from nip_astra.scorers.base import SCORERS, Exchange, Scorer, Verdict, build_scorer, register_scorer


def _kind(name: str) -> type[Scorer]:
    return SCORERS.get(name)


# Not the registry's own method, which would put every kind into the JSON Schema of a part: this one
# is among them, and its schema would have no end.
PartParameters = polymorphic(_kind, Scorer.Parameters)


class WeightedPart(SubParameters):
    """A scorer and its weight."""

    scorer: PartParameters  # type: ignore[valid-type]
    """The scorer."""
    weight: float = Field(default=1.0, gt=0)
    """Weight in the mean."""


@register_scorer(ScorerType.WEIGHTED)
class WeightedScorer(Scorer):
    """The weighted mean of scorers, `sum(w_k * s_k) / sum(w_k)`, in [0, 1].

    If one part gives no verdict, there is none, because a mean over the others would be a different
    measure. If one part fails, the whole fails, and its `on_failure` applies.
    """

    class Parameters(Scorer.Parameters):
        """Scorers and their weights."""

        parts: dict[str, WeightedPart] = Field(min_length=1)
        """Scorers by name; messages use these names."""

    def __init__(
        self, parameters: Any, *, device: torch.device, scenario_dir: Path | None = None
    ) -> None:
        super().__init__(parameters, device=device, scenario_dir=scenario_dir)
        self._parts = {
            name: build_scorer(part.scorer, device=device, scenario_dir=scenario_dir)
            for name, part in parameters.parts.items()
        }
        self.reads_history = any(part.reads_history for part in self._parts.values())

    @property
    def nested_scorers(self) -> Sequence[Scorer]:
        return tuple(self._parts.values())

    def _score_exchanges(self, exchanges: Sequence[Exchange]) -> list[Verdict]:
        weights = {name: part.weight for name, part in self.parameters.parts.items()}
        ratings = {name: part.rate(exchanges) for name, part in self._parts.items()}
        scores = {name: rating.scores_N.tolist() for name, rating in ratings.items()}
        is_error = {name: rating.is_error_N.tolist() for name, rating in ratings.items()}
        verdicts: list[Verdict] = []
        for number, exchange in enumerate(exchanges):
            failed = [name for name in weights if is_error[name][number]]
            if failed:
                verdicts.append(
                    ScorerError(
                        f"part {failed[0]!r} of the scorer 'weighted' failed on the text "
                        f"{exchange.text[:60]!r}. Fix that part, or set on_failure to skip."
                    )
                )
                continue
            total = sum(weight * scores[name][number] for name, weight in weights.items())
            mean = total / sum(weights.values())
            # NaN here is a part without a verdict.
            verdicts.append(None if math.isnan(mean) else mean)
        return verdicts
