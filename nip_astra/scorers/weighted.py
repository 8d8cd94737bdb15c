"""Several scorers as one."""

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
    """A scorer among several."""

    scorer: PartParameters  # type: ignore[valid-type]
    """What rates."""
    weight: float = Field(default=1.0, gt=0)
    """How much it counts beside the others. Larger draws the mean towards it."""


@register_scorer(ScorerType.WEIGHTED)
class WeightedScorer(Scorer):
    """The weighted mean of scorers, `sum(w_k * s_k) / sum(w_k)`, which is in [0, 1] again.

    Where one part has no verdict there is none: a mean over the others would be another measure.
    Where one part fails the whole fails, and what becomes of that the whole's `on_failure` says.
    """

    class Parameters(Scorer.Parameters):
        """Which scorers, and how much each counts."""

        parts: dict[str, WeightedPart] = Field(min_length=1)
        """The scorers by names of your choice, which messages use."""

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
                        f"the scorer 'weighted' was asked to rate the text "
                        f"{exchange.text[:60]!r}, but its part {failed[0]!r} failed. Mend that "
                        "part, or set the whole's on_failure to skip, which counts such texts as "
                        "errors."
                    )
                )
                continue
            total = sum(weight * scores[name][number] for name, weight in weights.items())
            mean = total / sum(weights.values())
            # NaN is a part without a verdict; parts that failed were told above.
            verdicts.append(None if math.isnan(mean) else mean)
        return verdicts
